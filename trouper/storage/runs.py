"""The run store: lists, writes, reads and evicts the files of one namespace.

Two servers may share the directory. Runs are never rewritten, their names identify their contents, and all reads are
verified, so no lock is necessary: a file that another server removes is a miss, a file that it writes is found by the next
`refresh`, and a run that both write is written once. One caller at a time, except for `read` and `verify`, which change no
state.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs

from trouper.protocol.blocks import BlockData, BlockRef
from trouper.storage import catalogue
from trouper.storage.cache_directory import TEMPORARY_SUFFIX
from trouper.storage.file_operations import Buffer, Disk, File, read_all, write_all
from trouper.storage.run_format import SUFFIX, Sealed, seal
from trouper.storage.run_reading import open_run
from trouper.storage.run_uses import RunUse, RunUses
from trouper.storage.stored_blocks import BlockEntry, Damaged, Reason, RunInfo, parents_first

__all__ = [
    "BlockData",
    "BlockEntry",
    "BlockRef",
    "Changes",
    "Damaged",
    "Disk",
    "Reason",
    "Room",
    "RunInfo",
    "RunStore",
    "Sealed",
]  # fmt: skip

NAMESPACE_DIGITS: Final = 32
NAMESPACE: Final = re.compile(rf"[0-9a-f]{{{NAMESPACE_DIGITS}}}")
"""Pattern of the names of namespace directories; other directories are ignored."""


@attrs.frozen
class Changes:
    """Differences between two listings of the directory."""

    appeared: tuple[RunInfo, ...]
    """New runs; parents come before the runs that continue them."""
    vanished: tuple[RunInfo, ...]


@attrs.frozen
class Room:
    """Result of an eviction. `fits`: enough was removed."""

    fits: bool
    removed: tuple[RunInfo, ...] = ()
    """Removed runs of this namespace."""
    removed_elsewhere: int = 0
    """Number of removed files of other namespaces: all namespaces share one limit."""


class RunStore:
    """The runs of one namespace. `directory`: the prepared cache directory. `namespace`: at least `NAMESPACE_DIGITS` hex digits."""

    def __init__(self, directory: Path, namespace: str, disk: Disk | None = None) -> None:
        self.directory, self.namespace = directory, namespace
        self.path = directory / namespace[:NAMESPACE_DIGITS]
        if not NAMESPACE.fullmatch(self.path.name):
            raise ValueError(f"not a namespace: {namespace!r}")
        self.damaged: Counter[Reason] = Counter()
        """Number of files that `refresh` removed, by the kind of damage."""
        self.unreadable = 0
        """Number of files that the disk cannot read. They stay, and their bytes count as long as they exist."""
        self._disk = disk or Disk()
        self._runs: dict[str, RunInfo] = {}
        self._uses = RunUses(self._disk, {})
        self._refreshed = False

    # -- listing ---------------------------------------------------------------------------------

    @property
    def runs(self) -> Collection[RunInfo]:
        """The runs as of the last `refresh`, with later writes and removals of this store."""
        return self._runs.values()

    @property
    def total_bytes(self) -> int:
        """Bytes of all namespaces' runs, except those that another server has written since the last `refresh`."""
        return self._uses.total_bytes

    def refresh(self) -> Changes:
        """List the directory again, since other servers and sweeps change it, too. Opens only files that neither an earlier `refresh`
        nor the saved catalogue knows. Removes damaged files. Raises `OSError`."""
        known = self._runs if self._refreshed else {run.name: run for run in self._saved()}
        before, runs, uses = self._runs, dict[str, RunInfo](), dict[Path, RunUse]()
        for path, file in self._files():
            uses[path] = RunUse(file.bytes, file.used_ns)
            if path.parent != self.path:
                continue
            try:
                runs[file.name] = self._recognize(path, file, known)
            except Damaged as damaged:
                if self._discard(path, damaged):
                    del uses[path]
            except OSError:
                self.unreadable += 1
        self._runs, self._uses, self._refreshed = runs, RunUses(self._disk, uses), True
        return Changes(
            tuple(parents_first(run for name, run in runs.items() if name not in before)),
            tuple(run for name, run in before.items() if name not in runs),
        )

    def save_catalogue(self) -> None:
        """Write the catalogue. Raises `OSError`; then the old file still exists."""
        self._disk.mkdir(self.path)
        self._put(self.path / catalogue.NAME, catalogue.encode(self.namespace, self._runs.values()))

    def _saved(self) -> list[RunInfo]:
        with suppress(OSError):
            fd = self._disk.open(self.path / catalogue.NAME)
            try:
                return catalogue.decode(self.namespace, read_all(self._disk, fd, self._disk.size(fd), 0))
            finally:
                self._disk.close(fd)
        return []

    def _files(self) -> list[tuple[Path, File]]:
        names = [name for name in self._disk.directories(self.directory) if NAMESPACE.fullmatch(name)]
        found = []
        for directory in (self.directory / name for name in names):
            with suppress(FileNotFoundError):
                found += [(directory / file.name, file) for file in self._disk.files(directory)]
        return [(path, file) for path, file in found if path.suffix == SUFFIX]

    def _recognize(self, path: Path, file: File, known: dict[str, RunInfo]) -> RunInfo:
        run = known.get(file.name)
        if run is not None and run.file_bytes == file.bytes:
            return run
        with open_run(self._disk, path, self.namespace) as opened:
            return opened.header.info

    def _discard(self, path: Path, damaged: Damaged) -> bool:
        """Remove a damaged file. True if the file does not exist any more."""
        if damaged.reason == "vanished":
            return True
        self.damaged[damaged.reason] += 1
        try:
            self._disk.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    # -- writing ---------------------------------------------------------------------------------

    def seal(self, parent: bytes, blocks: Sequence[BlockData]) -> Sealed:
        """Encode a run, whose exact size is needed to make room for it before `put`. `blocks`: at least one, each the
        continuation of the previous one; `parent`: the key that the first one continues."""
        return seal(self.namespace, parent, blocks)

    def put(self, sealed: Sealed) -> RunInfo:
        """Write a run. Raises `OSError`; then no file is left. A run that exists in full is not written again."""
        run = sealed.info
        path = self.path / run.name
        if not self._is_there(path, run.file_bytes):
            self._disk.mkdir(self.path)
            self._put(path, sealed.buffers)
        self._uses.record(path, RunUse(run.file_bytes, time.time_ns()))
        self._runs[run.name] = run
        return run

    def _is_there(self, path: Path, size: int) -> bool:
        try:
            if self._disk.stat(path).bytes != size:
                return False
        except FileNotFoundError:
            return False
        with suppress(OSError):
            self._disk.touch(path)
        return True

    def _put(self, path: Path, buffers: Sequence[Buffer]) -> None:
        """Write a temporary file and rename it, so that a file under its own name is always complete, except after a crash of
        the system. Servers in different containers may have the same process id, so the temporary name is random."""
        temporary = path.with_name(f"{path.stem}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
        try:
            fd = self._disk.create(temporary)
            try:
                write_all(self._disk, fd, buffers)
            finally:
                self._disk.close(fd)
            self._disk.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                self._disk.unlink(temporary)
            raise

    # -- reading ---------------------------------------------------------------------------------

    def read(self, name: str, refs: Sequence[BlockRef]) -> list[BlockData]:
        """Read blocks of a run, in the order of `refs`. Raises `Damaged` if the file is unusable, and the caller should
        `remove` it; and `OSError` if the disk fails."""
        with open_run(self._disk, self.path / name, self.namespace) as run:
            return run.blocks(refs)

    def verify(self, name: str) -> RunInfo:
        """Read and verify a whole run. Raises as `read` does."""
        with open_run(self._disk, self.path / name, self.namespace) as run:
            run.everything()
            return run.header.info

    def touch(self, names: Iterable[str]) -> None:
        """Set the runs' last use to the present time. Raises `OSError`."""
        for name in names:
            path = self.path / name
            with suppress(FileNotFoundError):
                self._disk.touch(path)
                self._uses.record_use(path, time.time_ns())

    # -- removing --------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Remove a run, which may already be missing. Raises `OSError`."""
        self._remove(self.path / name)

    def make_room(self, bytes_needed: int, max_bytes: int, floor_bytes: int = 0) -> Room:
        """Evict the least recently used runs, until `bytes_needed` more bytes fit into `max_bytes` and the disk would still have
        `floor_bytes` free. A full disk is worse than an empty cache, so the floor may evict all runs. Files that cannot be
        removed stay. Raises `OSError` if the disk's free space is unknown."""
        if not self._refreshed:
            self.refresh()
        if bytes_needed > max_bytes:
            return Room(fits=False)
        lacking = floor_bytes + bytes_needed - self._disk.free_bytes(self.directory) if floor_bytes else 0
        target = self.total_bytes - max(self.total_bytes + bytes_needed - max_bytes, lacking)
        removed: list[RunInfo | None] = []
        oldest = self._uses.least_recently_used()
        while self.total_bytes > target and (path := next(oldest, None)) is not None:
            with suppress(OSError):
                removed.append(self._remove(path))
        removed_here = tuple(run for run in removed if run is not None)
        return Room(self.total_bytes <= target, removed_here, len(removed) - len(removed_here))

    def _remove(self, path: Path) -> RunInfo | None:
        with suppress(FileNotFoundError):
            self._disk.unlink(path)
        self._uses.remove(path)
        return self._runs.pop(path.name, None) if path.parent == self.path else None
