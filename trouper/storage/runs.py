"""The run store: lists, writes, reads and evicts the files of one namespace."""

# Servers may share the directory. Reading needs no lock, since runs are never rewritten, names
# identify contents, and reads are verified: a removed file is a miss, the next `refresh` finds a
# new one, and a common run is written once. One caller at a time, except for `read` and `verify`.

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from trouper.protocol.blocks import BlockData, BlockRef
from trouper.storage.bounded_directory import (
    NAMESPACE,
    NAMESPACE_DIGITS,
    BoundedDirectory,
    Evicted,
    RunUse,
)
from trouper.storage.cache_directory import NO_DISK_LIMITS, DiskLimits
from trouper.storage.file_operations import Buffer, Disk, File
from trouper.storage.run_format import SUFFIX, Sealed, seal
from trouper.storage.run_reading import open_run
from trouper.storage.stored_blocks import Damaged, Reason, RunInfo, parents_first


@attrs.frozen
class Changes:
    """Differences between two listings."""

    appeared: tuple[RunInfo, ...]
    """New runs, parents first."""
    vanished: tuple[RunInfo, ...]


@attrs.frozen
class Room:
    """Result of an eviction. `fits`: enough was removed."""

    fits: bool
    removed: tuple[RunInfo, ...] = ()
    """Removed files of this namespace; others share the limit."""


class RunStore:
    """The runs of one namespace. `directory`: prepared. `namespace`: at least `NAMESPACE_DIGITS`
    hex digits."""

    def __init__(self, directory: Path, namespace: str, disk: Disk | None = None) -> None:
        self.directory, self.namespace = directory, namespace
        self.path = directory / namespace[:NAMESPACE_DIGITS]
        if not NAMESPACE.fullmatch(self.path.name):
            raise ValueError(f"not a namespace: {namespace!r}")
        self.damaged: Counter[Reason] = Counter()
        """Files removed by `refresh`, by kind of damage."""
        self.unreadable = 0
        """Files with an unreadable header, which stay and count."""
        # Names of unreadable files.
        self._skipped: set[str] = set()
        # Those that only a `refresh` tries again: reads of a faulty disk take seconds.
        self._failed: set[str] = set()
        self._disk = disk or Disk()
        self._runs: dict[str, RunInfo] = {}
        self._files = BoundedDirectory(self._disk, directory)
        self._refreshed = False

    # -- listing ---------------------------------------------------------------------------------

    @property
    def runs(self) -> Collection[RunInfo]:
        """Runs of the last `refresh`, with this store's later writes and removals."""
        return self._runs.values()

    @property
    def total_bytes(self) -> int:
        """Bytes of all namespaces' runs, as of the last `refresh` and this store's changes."""
        return self._files.uses.total_bytes

    def refresh(self) -> Changes:
        """List the directory again. Opens only unknown files, removes damaged ones. Raises
        `OSError`."""
        before, runs = self._runs, dict[str, RunInfo]()
        self._failed.clear()
        for path, file in self._files.list_files():
            if path.parent != self.path or file.name in self._skipped:
                continue
            if (run := self._recognize(path, file)) is not None:
                runs[file.name] = run
        self._runs, self._refreshed = runs, True
        return Changes(
            tuple(parents_first(run for name, run in runs.items() if name not in before)),
            tuple(run for name, run in before.items() if name not in runs),
        )

    def poll(self) -> Changes:
        """Find what other servers have written and removed since, by names alone. Raises
        `OSError`."""
        names = set[str]()
        with suppress(FileNotFoundError):  # Nobody has written yet, or all of it was cleared.
            names.update(name for name in self._disk.list_names(self.path) if name.endswith(SUFFIX))
        appeared = list[RunInfo]()
        for name in names - self._runs.keys() - self._skipped - self._failed:
            path = self.path / name
            with suppress(OSError):  # Of another server, which has removed it already.
                file = self._disk.stat(path)
                if (run := self._recognize(path, file)) is not None:
                    self._files.uses.record(path, RunUse(file.bytes, file.used_ns))
                    appeared.append(run)
        vanished = [run for name, run in self._runs.items() if name not in names]
        for run in vanished:
            del self._runs[run.name]
            self._files.uses.remove(self.path / run.name)
        self._runs.update((run.name, run) for run in appeared)
        return Changes(tuple(parents_first(appeared)), tuple(vanished))

    def _recognize(self, path: Path, file: File) -> RunInfo | None:
        """The run of a file. None: damaged, which is removed, or unreadable."""
        run = self._runs.get(file.name)
        if run is not None and run.file_bytes == file.bytes:
            return run
        try:
            with open_run(self._disk, path, self.namespace) as opened:
                return opened.header.info
        except Damaged as damaged:
            self._discard(path, damaged)
        except OSError:
            self.unreadable += 1
            self._failed.add(file.name)
        return None

    def _discard(self, path: Path, damaged: Damaged) -> None:
        if damaged.reason != "vanished":
            self.damaged[damaged.reason] += 1
        with suppress(OSError):
            self._files.remove(path)

    # -- writing ---------------------------------------------------------------------------------

    def seal(self, parent: bytes, blocks: Sequence[BlockData]) -> Sealed:
        """Encode a run of consecutive blocks, whose size `put` needs. `parent`: the key before the
        first."""
        return seal(self.namespace, parent, blocks)

    def put(self, sealed: Sealed, limits: DiskLimits = NO_DISK_LIMITS) -> Room:
        """Write a run after making room; without `fits` nothing was written. An existing run is not
        written again. Raises `OSError`, leaving no file."""
        if not self._refreshed:
            self.refresh()
        run, path, removed = sealed.info, self.path / sealed.info.name, tuple[Path, ...]()
        if run.name in self._skipped or not self._is_there(path, run.file_bytes):
            evicted = self._write(path, sealed.buffers, run.file_bytes, limits)
            if not evicted.fits:
                return self._room(evicted)
            removed = evicted.removed
        self._files.uses.record(path, RunUse(run.file_bytes, time.time_ns()))
        room = self._room(Evicted(True, removed))
        self._runs[run.name] = run
        self._skipped.discard(run.name)
        return room

    def _write(
        self, path: Path, buffers: Sequence[Buffer], nbytes: int, limits: DiskLimits
    ) -> Evicted:
        # Write a file, twice if `trouper cache clear` removes the directory meanwhile. Raises
        # `OSError`.
        try:
            self._disk.mkdir(self.path)
            return self._files.write(path, buffers, nbytes, limits)
        except FileNotFoundError:
            self._disk.mkdir(self.path)
            return self._files.write(path, buffers, nbytes, limits)

    def _is_there(self, path: Path, size: int) -> bool:
        try:
            if self._disk.stat(path).bytes != size:
                return False
        except FileNotFoundError:
            return False
        with suppress(OSError):
            self._disk.touch(path)
        return True

    # -- reading ---------------------------------------------------------------------------------

    def read(self, name: str, refs: Sequence[BlockRef]) -> list[BlockData]:
        """Read blocks in the order of `refs`. Raises `Damaged`, upon which the caller should
        `remove`, and `OSError`."""
        with open_run(self._disk, self.path / name, self.namespace) as run:
            return run.blocks(refs)

    def verify(self, name: str) -> RunInfo:
        """Read and verify a whole run. Raises as `read` does."""
        with open_run(self._disk, self.path / name, self.namespace) as run:
            run.everything()
            return run.header.info

    def touch(self, names: Iterable[str]) -> None:
        """Raises `OSError`."""
        for name in names:
            path = self.path / name
            with suppress(FileNotFoundError):
                self._disk.touch(path)
                self._files.uses.record_use(path, time.time_ns())

    # -- removing --------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """The run may be missing. Raises `OSError`."""
        self._files.remove(self.path / name)
        self._runs.pop(name, None)

    def skip(self, name: str) -> tuple[RunInfo, ...]:
        """Forget an unreadable run until rewritten. The file stays, counts, and may be evicted.
        Returns the run, if known."""
        self._skipped.add(name)
        run = self._runs.pop(name, None)
        return () if run is None else (run,)

    def make_room(self, bytes_needed: int, max_bytes: int, floor_bytes: int = 0) -> Room:
        """Evict the least recently used runs until `bytes_needed` fit into `max_bytes` with
        `floor_bytes` free. Raises `OSError` if the free space is unknown."""
        if not self._refreshed:
            self.refresh()
        return self._room(self._files.make_room(bytes_needed, DiskLimits(max_bytes, floor_bytes)))

    def _room(self, evicted: Evicted) -> Room:
        here = [
            self._runs.pop(path.name, None) for path in evicted.removed if path.parent == self.path
        ]
        return Room(evicted.fits, tuple(run for run in here if run is not None))
