"""Options of glibc's malloc, and freed memory.

glibc returns MLX's large buffers to the kernel at each step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_MAX_BYTES = 32 * 2**20  # glibc's largest threshold (HEAP_MAX_SIZE / 2 on 64 bits).
TRIM_THRESHOLD_BYTES = 512 * 2**20
OPTIONS = (
    ("MALLOC_MMAP_THRESHOLD_", M_MMAP_THRESHOLD, MMAP_THRESHOLD_MAX_BYTES),
    ("MALLOC_TRIM_THRESHOLD_", M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
)


def keep_large_buffers() -> bool:
    """Set options absent in the environment; whether glibc accepted all."""
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
    """Return free memory of glibc's heaps to the system: milliseconds, and later page faults."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
