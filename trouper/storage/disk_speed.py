"""A disk's speed: writes include fsync, reads bypass the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
import time
from pathlib import Path

import attrs

PROBE_BYTES = 2**26
PIECE_BYTES = 2**22


@attrs.frozen
class DiskSpeed:
    """Bytes per second."""

    write: float
    read: float


def measure(directory: Path) -> DiskSpeed:
    """Measure with a temporary file. Raises `OSError`."""
    piece = os.urandom(PIECE_BYTES)  # Some disks compress.
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(PROBE_BYTES // PIECE_BYTES):
            file.write(piece)
        os.fsync(file.fileno())
        written = time.perf_counter()
        _forget(file.fileno())
        file.seek(0)
        read_began = time.perf_counter()
        while file.read(PIECE_BYTES):
            pass
        return DiskSpeed(
            PROBE_BYTES / (written - began), PROBE_BYTES / (time.perf_counter() - read_began)
        )


def _forget(descriptor: int) -> None:
    # Evict the file from the page cache, as far as possible.
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    else:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def nearest(directory: Path) -> Path:
    """The directory or its nearest existing parent. Raises `OSError` if the parent is a file."""
    first = next(path for path in (directory, *directory.parents) if path.exists())
    if not first.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(first))
    return first
