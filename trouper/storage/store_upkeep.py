"""Upkeep of a run store for SSDWriter: opening, sweeping, writing, inspecting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import attrs

from trouper.protocol.blocks import BlockData
from trouper.storage import cache_directory
from trouper.storage.cache_directory import DiskLimits
from trouper.storage.runs import RunStore
from trouper.storage.stored_blocks import RunInfo

# Maximum files of one inspection.
INSPECTED_AT_ONCE = 4
HOUR_S = 3600.0


@attrs.define
class WriteBudget:
    """The hourly write budget (--ssd-write-budget), against wear. `now` is a monotonic time in
    seconds."""

    bytes_per_hour: int
    _hour_began: float
    # Bytes in the current hour.
    _written_bytes: int = 0

    def allows(self, nbytes: int, now: float) -> bool:
        if now - self._hour_began >= HOUR_S:
            self._hour_began, self._written_bytes = now, 0
        return self._written_bytes + nbytes <= self.bytes_per_hour

    def spend(self, nbytes: int) -> None:
        self._written_bytes += nbytes


@attrs.frozen
class Swept:
    usage: cache_directory.DirectoryUsage
    removed: tuple[RunInfo, ...]
    appeared: tuple[RunInfo, ...]


def open_store(store: RunStore) -> None:
    """Create the directory if necessary, and list runs. Raises `OSError`."""
    cache_directory.prepare(store.directory)
    store.refresh()


def sweep_store(store: RunStore, ttl_s: float, limits: DiskLimits) -> Swept:
    """Remove files unused for `ttl_s`, detect changes, and enforce the limits. Raises
    `OSError`."""
    cache_directory.prepare(store.directory)
    usage = cache_directory.sweep(store.directory, ttl_s)
    changes = store.refresh()
    room = store.make_room(0, limits.max_bytes, limits.keep_free_bytes)
    return Swept(usage, (*changes.vanished, *room.removed), changes.appeared)


def write_run(
    store: RunStore, parent: bytes, blocks: Sequence[BlockData], limits: DiskLimits
) -> tuple[RunInfo | None, tuple[RunInfo, ...]]:
    """Write a run. Returns the run (None without room) and evicted runs. Raises `OSError`."""
    sealed = store.seal(parent, blocks)
    room = store.put(sealed, limits)
    return (sealed.info if room.fits else None), room.removed


class InspectionRound:
    """Each file is inspected once before any is inspected again."""

    def __init__(self) -> None:
        self._inspected: set[str] = set()

    def next_names(self, runs: Iterable[RunInfo]) -> Iterator[str]:
        """Files to inspect next; none when a round is complete. A taken name counts as
        inspected."""
        names = list(
            islice((run.name for run in runs if run.name not in self._inspected), INSPECTED_AT_ONCE)
        )
        if not names:
            self._inspected.clear()
        for name in names:
            self._inspected.add(name)
            yield name
