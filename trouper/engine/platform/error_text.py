"""Texts of errors of other libraries, in one line."""

from __future__ import annotations


def first_line_of(error: Exception) -> str:
    """Return the first line of an error's text; the name of its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def line_of(error: Exception) -> str:
    """Shorten an error's text to its first two lines, joined: errors of MLX have a list below a headline that ends in a colon."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    text = " ".join(line.strip() for line in lines[:2])
    kind = "" if isinstance(error, (ValueError, RuntimeError, OSError)) else f"{type(error).__name__}: "
    return kind + (text if len(text) <= 300 else text[:300] + " ...")
