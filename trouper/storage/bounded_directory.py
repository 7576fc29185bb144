"""The files of a cache directory, within one bound that all writers keep together."""

# A write reserves bytes in the shared count (`shared_usage`) before creating the temporary file in
# full size. A listing may miss a file that another writer renames meanwhile, hence the count may be
# too low by one file a writer until the next listing.

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import attrs

from trouper.storage.cache_directory import TEMPORARY_SUFFIX, DiskLimits
from trouper.storage.file_operations import Buffer, Disk, File, write_all
from trouper.storage.run_format import SUFFIX
from trouper.storage.run_uses import RunUse, RunUses
from trouper.storage.shared_usage import LockedUsage, SharedUsage

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
        """Evict the least recently used files until `nbytes` more fit. A full disk is worse than an
        empty cache: `keep_free_bytes` may evict everything. Files that cannot be removed stay.
        Raises `OSError` if the free space is unknown."""
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
        """Remove a file, which may be missing. Raises `OSError`."""
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
