"""Writes that survive a crash of the process and of the machine: a file has its final name only
when it is complete.

The storage package needs none of this: a damaged block of the cache is a miss, but a damaged answer
of a batch is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trouper.protocol.private_files import FILE_MODE

PART_SUFFIX = ".part"
"""Suffix of a file that is being written. What a crash left with it is removed at the next
start."""


def create(path: Path) -> int:
    """Open a file for writing, empty. Raises `OSError`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`. Raises `OSError`."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


def commit(fd: int, path: Path) -> None:
    """Complete a file that was written as `path` with `PART_SUFFIX`: it is on disk, under its name,
    when this returns. Closes `fd`. Raises `OSError`."""
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    part_of(path).replace(path)
    sync_directory(path.parent)


def write(path: Path, parts: Iterable[bytes]) -> int:
    """Write a file durably and return its size in bytes; a file of that name is replaced. Raises
    `OSError`."""
    fd, size = create(part_of(path)), 0
    try:
        for part in parts:
            write_all(fd, part)
            size += len(part)
    except BaseException:
        os.close(fd)
        part_of(path).unlink(missing_ok=True)
        raise
    commit(fd, path)
    return size


def part_of(path: Path) -> Path:
    return path.with_name(path.name + PART_SUFFIX)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep_parts(directory: Path) -> None:
    """Remove files that a crash left half written. Only the owner of the directory may do so.
    Raises `OSError`."""
    for path in directory.glob("*" + PART_SUFFIX):
        path.unlink(missing_ok=True)
