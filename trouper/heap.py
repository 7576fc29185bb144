"""Options of glibc's malloc, and freed memory that the process keeps.

By default glibc returns the large buffers that MLX's CPU backend frees at each step to the kernel,
and the next step faults every page in again: restoring KV of 512 tokens took 3 to 6 times longer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_MAX_BYTES = 32 * 2**20
"""Largest threshold that glibc accepts (HEAP_MAX_SIZE / 2 on 64 bits)."""
TRIM_THRESHOLD_BYTES = 512 * 2**20
OPTIONS = (
    ("MALLOC_MMAP_THRESHOLD_", M_MMAP_THRESHOLD, MMAP_THRESHOLD_MAX_BYTES),
    ("MALLOC_TRIM_THRESHOLD_", M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
)


def keep_large_buffers() -> bool:
    """Set both options, apart from those that the environment sets. True if the process runs on
    glibc and all were accepted."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    taken = [
        libc.mallopt(option, size) == 1 for name, option, size in OPTIONS if name not in os.environ
    ]
    return all(taken)


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
