"""Texts of errors of other libraries, in one line."""

from __future__ import annotations

from trouper.protocol.problems import printable

LONGEST = 300
OUT_OF_MEMORY = ("unable to allocate", "out of memory", "memoryerror", "insufficient memory")
"""Parts of the texts of failed allocations: MLX's own, CUDA's, Python's and Metal's."""


def first_line_of(error: Exception) -> str:
    """Return the first line of an error's text; the name of its type if it has no text."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0], LONGEST)


def is_of_library(error: BaseException) -> bool:
    """Whether a library has raised an error for what it was given. A panic of Rust is no
    `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def line_of(error: BaseException) -> str:
    """Shorten an error's text to its first two lines, joined: errors of MLX have a list below a
    headline that ends in a colon."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    text = " ".join(line.strip() for line in lines[:2])
    kind = (
        ""
        if isinstance(error, (ValueError, RuntimeError, OSError))
        else f"{type(error).__name__}: "
    )
    return kind + printable(text, LONGEST)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated."""
    return is_out_of_memory(f"{type(error).__name__}: {error}")


def is_out_of_memory(text: str) -> bool:
    """Whether the text of an error says that memory could not be allocated."""
    return any(sign in text.lower() for sign in OUT_OF_MEMORY)
