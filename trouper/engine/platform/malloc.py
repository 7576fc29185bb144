"""Settings of glibc's malloc, so that it keeps the large buffers that MLX's CPU backend frees at
each step.

By default glibc returns them to the kernel, and the next step faults every page in again: restoring
KV of 512 tokens took 3 to 6 times longer. `mallopt` does what MALLOC_TRIM_THRESHOLD_ and
MALLOC_MMAP_THRESHOLD_ do, without having to start the process a second time to set its environment.
"""

from __future__ import annotations

import ctypes
import os

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
    """Apply the settings, except those that the environment sets. True if the process runs on glibc
    and all were accepted."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    taken = [
        libc.mallopt(option, size) == 1 for name, option, size in OPTIONS if name not in os.environ
    ]
    return all(taken)
