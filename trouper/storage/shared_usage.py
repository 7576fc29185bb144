"""Bytes of the cache directory, in one small file that all writers update under a lock."""

# Models, servers and ranks share the directory, and listing before each write is too slow. Writers
# add before creating a file and subtract after removing one: a killed process leaves a count that
# is too high, until the next listing.

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

# Longest wait for the lock, held for microseconds, a listing, or by a stopped process; reads wait
# meanwhile.
LOCK_PATIENCE_S: Final = 0.25
LOCK_POLL_S: Final = 0.002
DIGITS: Final = 20
SIZE: Final = DIGITS + 9


@attrs.define
class LockedUsage:
    """The count under lock. `bytes` None: unknown."""

    disk: Disk
    fd: int
    bytes: int | None

    def set(self, nbytes: int) -> None:
        """Raises `OSError`; then only this object has the new count."""
        self.bytes = max(0, nbytes)
        self.disk.pwrite(self.fd, _encoded(self.bytes), 0)

    def add(self, nbytes: int) -> None:
        """Add bytes to a known count. Raises `OSError`."""
        if self.bytes is not None and nbytes:
            self.set(self.bytes + nbytes)


class SharedUsage:
    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk, self._path = disk, directory / USAGE

    @contextmanager
    def locked(self) -> Iterator[LockedUsage | None]:
        """Hold the lock; None after `LOCK_PATIENCE_S`. Raises `OSError`."""
        fd = self._disk.open_shared(self._path)
        try:
            yield self._read(fd) if self._acquire(fd) else None
        finally:
            self._disk.close(fd)  # Releases the lock.

    def add(self, nbytes: int) -> None:
        """Add bytes; without the lock the count stays. Raises `OSError`."""
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
    # Constant length, since a rewrite must need no room. The checksum detects a torn write.
    number = b"%0*d" % (DIGITS, nbytes)
    return b"%s %08x" % (number, crc32(number))
