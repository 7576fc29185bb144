"""Errors of other libraries: their texts in one line, and shortages that they do not report."""

from __future__ import annotations

import subprocess
from contextlib import suppress

from trouper.protocol.problems import is_shortage, printable

LONGEST = 300

# In texts of failed allocations of MLX, CUDA, Python and Metal.
OUT_OF_MEMORY = ("unable to allocate", "out of memory", "memoryerror", "insufficient memory")


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
    return is_out_of_memory(f"{type(error).__name__}: {error}")


def is_out_of_memory(text: str) -> bool:
    return any(sign in text.lower() for sign in OUT_OF_MEMORY)


TRIAL = ("/bin/sh", "-c", ":")
TRIAL_S = 5.0


def system_shortage() -> str:
    """The shortage in the system's words, or "". Takes milliseconds."""
    try:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603 - the shell that a compiler is started by
                TRIAL, stdout=subprocess.PIPE, timeout=TRIAL_S, check=False
            )
    except OSError as error:
        return str(error.strerror) if is_shortage(error) else ""
    return ""
