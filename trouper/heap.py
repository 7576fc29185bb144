"""Freed memory that the process keeps. See `engine/malloc.py` for why glibc is told to keep much."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return what is free inside of glibc's heaps to the system: each thread has one, and each keeps up to half a gigabyte. A
    prompt of 15 MB once left 1.2 GB behind. Takes milliseconds, and the next steps fault their pages in again, so this is for
    after something huge. Elsewhere nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
