"""Bytes of the cache directory as all its writers count them, in one small file that each updates
under a lock.

Models of one server, several servers and the ranks of a group write into the same directory, and no
writer lists it before each write. So a writer adds the bytes of a file here before it creates it,
and subtracts those of one that it has removed. A process that is killed in between leaves a count
that is too high, never one that is too low; the next listing of the directory sets it right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from zlib import crc32

import attrs

from trouper.storage.cache_directory import USAGE
from trouper.storage.file_operations import Disk, read_all

LOCK_PATIENCE_S: Final = 0.25
"""Longest wait for the lock. It is held for microseconds, for as long as a listing takes, or by a
process that was stopped; reads wait behind a writer that waits."""
LOCK_POLL_S: Final = 0.002
DIGITS: Final = 20
SIZE: Final = DIGITS + 9


@attrs.define
class LockedUsage:
    """The count while its lock is held. `bytes` is None if nobody has counted, or the file cannot
    be read."""

    disk: Disk
    fd: int
    bytes: int | None

    def set(self, nbytes: int) -> None:
        """Raises `OSError`; then only this object has the new count."""
        self.bytes = max(0, nbytes)
        self.disk.pwrite(self.fd, _encoded(self.bytes), 0)

    def add(self, nbytes: int) -> None:
        """Add `nbytes`, or subtract them if they are negative; an unknown count stays unknown.
        Raises `OSError`."""
        if self.bytes is not None and nbytes:
            self.set(self.bytes + nbytes)


class SharedUsage:
    """The count of one directory."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk, self._path = disk, directory / USAGE

    @contextmanager
    def locked(self) -> Iterator[LockedUsage | None]:
        """Hold the lock. None if another writer does not release it within `LOCK_PATIENCE_S`.
        Raises `OSError`."""
        fd = self._disk.open_shared(self._path)
        try:
            yield self._read(fd) if self._acquire(fd) else None
        finally:
            self._disk.close(fd)  # Releases the lock.

    def add(self, nbytes: int) -> None:
        """Add bytes, or subtract them if negative. If the lock cannot be had, the count stays as it
        is. Raises `OSError`."""
        with self.locked() as usage:
            if usage is not None:
                usage.add(nbytes)

    def _acquire(self, fd: int) -> bool:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while not self._disk.try_lock(fd):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_POLL_S)
        return True

    def _read(self, fd: int) -> LockedUsage:
        data = b""
        with suppress(OSError):
            data = read_all(self._disk, fd, SIZE, 0)
        number = data[:DIGITS]
        return LockedUsage(
            self._disk,
            fd,
            int(number) if number.isdigit() and data == _encoded(int(number)) else None,
        )


def _encoded(nbytes: int) -> bytes:
    """Always of the same length, so that writing it again needs no room on a full disk. The
    checksum detects a torn write."""
    number = b"%0*d" % (DIGITS, nbytes)
    return b"%s %08x" % (number, crc32(number))
