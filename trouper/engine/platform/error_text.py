"""What somebody else's error says, in one line."""

from __future__ import annotations


def line_of(error: Exception) -> str:
    """Errors of MLX have a list below a headline that ends in a colon: one line says it."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    text = " ".join(line.strip() for line in lines[:2])
    kind = "" if isinstance(error, (ValueError, RuntimeError, OSError)) else f"{type(error).__name__}: "
    return kind + (text if len(text) <= 300 else text[:300] + " ...")
