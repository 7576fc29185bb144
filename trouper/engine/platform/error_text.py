"""Texts of other libraries' errors, in one line."""

from __future__ import annotations

from trouper.protocol.problems import printable

LONGEST = 300
OUT_OF_MEMORY = ("unable to allocate", "out of memory", "memoryerror", "insufficient memory")
"""In texts of failed allocations of MLX, CUDA, Python and Metal."""


def first_line_of(error: Exception) -> str:
    """The first line, or the type's name without text."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0], LONGEST)


def is_of_library(error: BaseException) -> bool:
    """Whether a library raised the error for its input, or panicked in Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def line_of(error: BaseException) -> str:
    """The first two lines, joined: MLX lists details below a headline with a colon."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    text = " ".join(line.strip() for line in lines[:2])
    kind = (
        ""
        if isinstance(error, (ValueError, RuntimeError, OSError))
        else f"{type(error).__name__}: "
    )
    return kind + printable(text, LONGEST)


def lacks_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated."""
    return is_out_of_memory(f"{type(error).__name__}: {error}")


def is_out_of_memory(text: str) -> bool:
    return any(sign in text.lower() for sign in OUT_OF_MEMORY)
