"""The files of a cache directory, within one bound that all writers keep together."""

# A write reserves bytes in the shared count (`SharedUsage`) before creating the temporary file in
# full size. A listing may miss a file that another writer renames meanwhile, hence the count may be
# too low by one file a writer until the next listing.

from __future__ import annotations

import heapq
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final
from zlib import crc32

import attrs

from trouper.storage.cache_directory import TEMPORARY_SUFFIX, USAGE, DiskLimits
from trouper.storage.file_operations import Buffer, Disk, File, lock_within, read_all, write_all
from trouper.storage.run_format import SUFFIX

# Models, servers and ranks share the directory, and listing before each write is too slow. Writers
# add before creating a file and subtract after removing one: a killed process leaves a count that
# is too high, until the next listing.

# Longest wait for the lock, held for microseconds, a listing, or by a stopped process; reads wait
# meanwhile.
LOCK_PATIENCE_S: Final = 0.25
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
            locked = lock_within(self._disk, fd, LOCK_PATIENCE_S)
            yield self._read(fd) if locked else None
        finally:
            self._disk.close(fd)  # Releases the lock.

    def add(self, nbytes: int) -> None:
        """Add bytes; without the lock the count stays. Raises `OSError`."""
        with self.locked() as usage:
            if usage is not None:
                usage.add(nbytes)

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


@attrs.frozen
class RunUse:
    bytes: int
    used_ns: int


class RunUses:
    def __init__(self, disk: Disk, uses: Mapping[Path, RunUse]) -> None:
        self._disk, self._uses = disk, dict(uses)
        self.total_bytes = sum(use.bytes for use in uses.values())

    def record(self, path: Path, use: RunUse) -> None:
        self.remove(path)
        self._uses[path] = use
        self.total_bytes += use.bytes

    def record_use(self, path: Path, used_ns: int) -> None:
        if path in self._uses:
            self.record(path, RunUse(self._uses[path].bytes, used_ns))

    def remove(self, path: Path) -> None:
        use = self._uses.pop(path, None)
        if use is not None:
            self.total_bytes -= use.bytes

    def least_recently_used(self) -> Iterator[Path]:
        """Paths by last use. Runs that another server has used since come later."""
        oldest = [(use.used_ns, path) for path, use in self._uses.items()]
        heapq.heapify(oldest)
        while oldest:
            used_ns, path = heapq.heappop(oldest)
            later_ns = self._used_since(path, used_ns)
            if later_ns is None:
                yield path
            else:
                heapq.heappush(oldest, (later_ns, path))

    def _used_since(self, path: Path, used_ns: int) -> int | None:
        # The later time of use by another server, or None.
        with suppress(OSError):
            file = self._disk.stat(path)
            if file.used_ns > used_ns:
                self.record(path, RunUse(file.bytes, file.used_ns))
                return file.used_ns
        return None


NAMESPACE_DIGITS: Final = 32
# Other directories are ignored.
NAMESPACE: Final = re.compile(rf"[0-9a-f]{{{NAMESPACE_DIGITS}}}")


@attrs.frozen
class Evicted:
    fits: bool
    removed: tuple[Path, ...] = ()


class BoundedDirectory:
    """The directory as one writer knows."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.disk, self.path = disk, path
        self.uses = RunUses(disk, {})
        """Files of the last listing, with this writer's later writes and removals."""
        self._usage = SharedUsage(disk, path)

    def list_files(self) -> list[tuple[Path, File]]:
        """List the files of blocks, and set the shared count. Raises `OSError`."""
        with self._usage.locked() as usage:
            return self._list(usage)

    def _list(self, usage: LockedUsage | None) -> list[tuple[Path, File]]:
        found = list[tuple[Path, File]]()
        for directory in (self.path / name for name in namespaces(self.disk, self.path)):
            with suppress(FileNotFoundError):
                found += [(directory / file.name, file) for file in self.disk.files(directory)]
        if usage is not None:
            # A full disk: what is evicted now makes room for the next count.
            with suppress(OSError):
                usage.set(sum(file.bytes for _, file in found))
        runs = [(path, file) for path, file in found if path.suffix == SUFFIX]
        self.uses = RunUses(
            self.disk, {path: RunUse(file.bytes, file.used_ns) for path, file in runs}
        )
        return runs

    # -- writing ---------------------------------------------------------------------------------

    def write(
        self, path: Path, buffers: Sequence[Buffer], nbytes: int, limits: DiskLimits
    ) -> Evicted:
        """Write a file after making room, by renaming a temporary file: a file is complete, except
        after a crash of the system. `fits` False: nothing was written. Raises `OSError`, leaving no
        file."""
        # Servers in different containers may have the same process id, so the temporary name is
        # random.
        temporary = path.with_name(f"{path.stem}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
        reserved = replaced = 0
        try:
            with ExitStack() as opened:
                with self._usage.locked() as usage:
                    evicted = (
                        Evicted(fits=False) if usage is None else self._evict(usage, nbytes, limits)
                    )
                    if usage is None or not evicted.fits:
                        return evicted
                    usage.add(nbytes)
                    reserved = nbytes
                    fd = self.disk.create(temporary, nbytes)
                    opened.callback(self.disk.close, fd)
                write_all(self.disk, fd, buffers)
            with suppress(FileNotFoundError):
                replaced = self.disk.stat(path).bytes
            self.disk.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                self._remove_temporary(temporary, reserved)
            raise
        # Then the count is too high until the next listing, and the file is there.
        with suppress(OSError):
            self._usage.add(-replaced)
        return evicted

    def _remove_temporary(self, temporary: Path, reserved: int) -> None:
        with suppress(FileNotFoundError):
            self.disk.unlink(temporary)
        if reserved:
            self._usage.add(-reserved)

    # -- removing --------------------------------------------------------------------------------

    def make_room(self, nbytes: int, limits: DiskLimits) -> Evicted:
        """Evict the least recently used files until `nbytes` more fit. `keep_free_bytes` may evict
        everything. Files that cannot be removed stay. Raises `OSError` if the free space is
        unknown."""
        with self._usage.locked() as usage:
            return Evicted(fits=False) if usage is None else self._evict(usage, nbytes, limits)

    def _evict(self, usage: LockedUsage, nbytes: int, limits: DiskLimits) -> Evicted:
        if nbytes > limits.max_bytes:
            return Evicted(fits=False)
        fits, removed = self._evict_known(usage, nbytes, limits)
        if not fits:  # Other writers have filled the directory since this one listed it.
            self._list(usage)
            fits, more = self._evict_known(usage, nbytes, limits)
            removed += more
        return Evicted(fits, tuple(removed))

    def _evict_known(
        self, usage: LockedUsage, nbytes: int, limits: DiskLimits
    ) -> tuple[bool, list[Path]]:
        if usage.bytes is None:
            self._list(usage)
        assert usage.bytes is not None, "listing counts"
        floor = limits.keep_free_bytes
        lacking = floor + nbytes - self.disk.free_bytes(self.path) if floor else 0
        surplus = max(usage.bytes + nbytes - limits.max_bytes, lacking)
        freed, removed = 0, list[Path]()
        oldest = self.uses.least_recently_used()
        while freed < surplus and (path := next(oldest, None)) is not None:
            with suppress(OSError):
                freed += self._unlink(path)
                removed.append(path)
        with suppress(OSError):  # Then it is too high until the next listing.
            usage.add(-freed)
        return freed >= surplus, removed

    def remove(self, path: Path) -> None:
        """The file may be missing. Raises `OSError`."""
        if freed := self._unlink(path):
            self._usage.add(-freed)

    def _unlink(self, path: Path) -> int:
        freed = 0
        with suppress(FileNotFoundError):
            size = self.disk.stat(path).bytes
            self.disk.unlink(path)
            freed = size
        self.uses.remove(path)
        return freed


def namespaces(disk: Disk, directory: Path) -> list[str]:
    """Subdirectories with files of blocks. Raises `OSError`."""
    return [name for name in disk.directories(directory) if NAMESPACE.fullmatch(name)]
