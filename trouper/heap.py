"""Freed memory that the process keeps. See `engine/platform/malloc.py` for why glibc is told to
keep much."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process; 0 where `give_back` does nothing."""
    if _trim() is None:
        return 0
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def give_back() -> None:
    """Return what is free inside of glibc's heaps to the system: each thread has one, and each
    keeps up to half a gigabyte. A prompt of 15 MB once left 1.2 GB behind. Takes milliseconds, and
    the next steps fault their pages in again, so this is for after something huge. Elsewhere
    nothing happens."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None where there is none."""
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
