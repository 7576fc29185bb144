"""The SSDWriter actor. Waits on orders, and on a clock for other servers' files; owns the cache
directory: no other actor writes, removes or measures there."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from trouper.actors.runtime.disk_orders import POLL_EVERY_S, DiskOrders, WriterEdges
from trouper.actors.runtime.worker_threads import DiskThread
from trouper.protocol.blocks import BlockData
from trouper.protocol.health import DirectoryStats
from trouper.protocol.model import ModelCard
from trouper.protocol.problems import is_shortage
from trouper.protocol.settings import Settings
from trouper.protocol.work import (
    Announce,
    Catalogue,
    DiskNews,
    DiskOrder,
    Inspect,
    Loaded,
    Poll,
    Read,
    RemovedFromDisk,
    Sweep,
    Write,
    Written,
)
from trouper.storage.cache_directory import DiskLimits
from trouper.storage.file_operations import Disk
from trouper.storage.runs import RunStore
from trouper.storage.store_upkeep import (
    InspectionRound,
    WriteBudget,
    open_store,
    sweep_store,
    write_run,
)
from trouper.storage.stored_blocks import (
    BlockLocations,
    Damaged,
    RunInfo,
    catalogue_batches,
    parents_first,
)

# Reads precede writes, since requests wait. Writes yield to decoding by rests. An unreadable file
# is set aside; a faulty disk detaches the tier and is tried again at the next sweep or inspection.
# Neither costs a token.

log = logging.getLogger("trouper.ssd_writer")
T = TypeVar("T")
# Rest between two writes while rows decode, as a multiple of the last write's duration: writes
# then take 3 % of one core.
REST = 30.0
BLOCKS_A_MESSAGE = 1000
MAX_IN_A_ROW = 2  # Number of consecutive files that are set aside before the disk counts as faulty.


async def write_to_disk(
    edges: WriterEdges,
    path: Path | None,
    namespace: str,
    settings: Settings,
    *,
    disk: Disk | None = None,
    thread: DiskThread | None = None,
    poll_every_s: float = POLL_EVERY_S,
) -> None:
    """Run the actor, which ends after the last order. `path` None: there is no SSD tier, and orders
    are refused. `disk`: the file operations of runs. `thread`: runs these operations.
    `poll_every_s`: how often other servers' files are looked for."""
    if path is None:
        edges.stats.publish(DirectoryStats(reason="--no-ssd"))
    await SSDWriter(
        edges,
        path,
        namespace,
        settings,
        disk=disk or Disk(),
        thread=thread or DiskThread(),
        poll_every_s=poll_every_s,
    ).run()


def directory_for(card: ModelCard, settings: Settings) -> Path | None:
    """Cache directory of this model's blocks; None: blocks are not stored on disk."""
    kept = card.fingerprint and card.kv.cached and settings.cache_memory != 0
    return settings.blocks_dir if kept else None


class SSDWriter:
    def __init__(
        self,
        edges: WriterEdges,
        path: Path | None,
        namespace: str,
        settings: Settings,
        *,
        disk: Disk,
        thread: DiskThread,
        poll_every_s: float,
    ) -> None:
        self._edges, self._path, self._namespace = edges, path, namespace
        self._disk, self._in_thread = disk, thread.run
        self._limits = DiskLimits(settings.ssd_max_bytes, settings.ssd_keep_free)
        self._budget = WriteBudget(settings.ssd_write_budget, trio.current_time())
        self._orders = DiskOrders(edges.orders, inf if path is None else poll_every_s)
        self._store: RunStore | None = None
        self._locations = BlockLocations()
        self._inspection, self._unreadable = InspectionRound(), UnreadableFiles()
        self._damaged_before = 0

    async def run(self) -> None:
        while (order := await self._orders.next()) is not None:
            await self._carry_out(order)

    async def _carry_out(self, order: DiskOrder) -> None:
        try:
            if self._path is None:
                raise OSError(errno.ENODEV, "no SSD tier")
            store = await self._attached(self._path, again=isinstance(order, Sweep | Inspect))
            match order:
                case Sweep(ttl_s=ttl_s):
                    await self._sweep(store, ttl_s)
                case Inspect():
                    await self._inspect(store)
                case Poll():
                    await self._poll(store)
                case Announce():
                    await self._announce(parents_first(store.runs), complete=True)
                case Write():
                    await self._write(store, order)
                case Read():
                    await self._read(store, order)
        except OSError as error:
            await self._refuse(order, error)

    async def _refuse(self, order: DiskOrder, error: OSError) -> None:
        if self._path is not None:
            self._detach(self._path, error)
        match order:
            case Write():
                await self._refuse_write(order)
            case Read(ticket=ticket):
                await self._send(Loaded(ticket, (), 0, 0.0))
            case Announce():
                await self._send(Catalogue(()))

    # -- the directory ---------------------------------------------------------------------------

    async def _attached(self, path: Path, *, again: bool) -> RunStore:
        """The store, opened if necessary. After a fault only the janitor's orders try again and
        announce the catalogue."""
        if self._store is not None:
            return self._store
        fault = self._edges.stats.latest.reason
        if fault and not again:
            raise OSError(errno.ENODEV, fault)
        store = RunStore(path, self._namespace, self._disk)
        await self._in_thread(partial(open_store, store))
        self._store = store
        self._locations = BlockLocations(store.runs)
        self._damaged_before = self._edges.stats.latest.damaged
        self._publish(path=str(path), attached=True, reason="", damaged=self._damaged(store))
        if fault:
            log.warning("the cache directory %s is in use again", path)
            await self._announce(parents_first(store.runs), complete=True)
        return store

    def _detach(self, path: Path, error: OSError) -> None:
        stats = self._edges.stats.latest
        if stats.attached or not stats.reason:
            log.warning(
                "the cache directory %s is not usable (%s); going on without it", path, error
            )
        self._store = None
        reason = error.strerror or str(error)  # `_attached` raises it again for each order.
        detached = attrs.evolve(stats, path=str(path), attached=False, reason=reason)
        self._edges.stats.publish(detached)

    def _publish(self, **changes: Any) -> None:
        stats = self._edges.stats.latest
        if self._store is not None:
            stats = attrs.evolve(
                stats,
                files=len(self._store.runs),
                blocks=len(self._locations),
                bytes=self._store.total_bytes,
            )
        self._edges.stats.publish(attrs.evolve(stats, **changes))

    def _count(self, **increments: int) -> None:
        stats = self._edges.stats.latest
        self._publish(**{name: getattr(stats, name) + n for name, n in increments.items()})

    def _damaged(self, store: RunStore) -> int:
        return self._damaged_before + sum(store.damaged.values())

    async def _sweep(self, store: RunStore, ttl_s: float) -> None:
        swept = await self._in_thread(partial(sweep_store, store, ttl_s, self._limits))
        await self._forget(swept.removed)
        await self._announce(swept.appeared)
        self._publish(free_disk_bytes=swept.usage.free_disk_bytes, damaged=self._damaged(store))
        self._count(swept_files=swept.usage.swept_files)

    async def _poll(self, store: RunStore) -> None:
        changes = await self._in_thread(store.poll)
        await self._forget(changes.vanished)
        if changes.appeared:
            await self._announce(changes.appeared)

    async def _inspect(self, store: RunStore) -> None:
        for name in self._inspection.next_names(store.runs):
            await self._tried(store, name, partial(store.verify, name))
            self._count(inspected=1)

    # -- news for the scheduler -------------------------------------------------------------------

    async def _send(self, news: DiskNews) -> None:
        with suppress(trio.BrokenResourceError):  # The scheduler has ended and needs no news.
            await self._edges.news.send(news)

    async def _announce(self, runs: Sequence[RunInfo], *, complete: bool = False) -> None:
        """Announce runs, each after its predecessor. `complete`: the runs are the entire
        catalogue."""
        self._locations.add(*runs)
        for batch in catalogue_batches(runs, BLOCKS_A_MESSAGE):
            await self._send(Catalogue(batch, complete=False))
        if complete:
            await self._send(Catalogue((), complete=True))
        self._publish()

    async def _forget(self, removed: Iterable[RunInfo]) -> None:
        keys = self._locations.remove(removed)
        if keys:
            await self._send(RemovedFromDisk(keys))

    async def _discard(self, store: RunStore, damaged: Damaged) -> None:
        # A vanished file is a miss alone: another server of the directory may have removed it.
        if damaged.reason != "vanished":
            log.warning("removed a damaged file of the cache: %s", damaged)
            store.damaged[damaged.reason] += 1
            self._publish(damaged=self._damaged(store))
        await self._forget([run for run in store.runs if run.name == damaged.name])
        try:
            await self._in_thread(partial(store.remove, damaged.name))
        except OSError as error:
            await self._skip(store, damaged.name, error)

    async def _skip(self, store: RunStore, name: str, error: OSError) -> None:
        """Forget a file that cannot be read or removed. Raises the error if the disk is at
        fault."""
        self._unreadable.note_or_raise(name, error)
        await self._forget(store.skip(name))

    async def _tried(self, store: RunStore, name: str, work: Callable[[], T]) -> T | None:
        """Read a file. None: damaged or unreadable. Raises `OSError` if the disk is at fault."""
        try:
            found = await self._in_thread(work)
        except Damaged as damaged:
            await self._discard(store, damaged)
        except OSError as error:
            await self._skip(store, name, error)
        else:
            self._unreadable.was_read()
            return found
        return None

    # -- writing and reading ---------------------------------------------------------------------

    async def _write(self, store: RunStore, order: Write) -> None:
        began = trio.current_time()
        if not self._budget.allows(order.nbytes, began):
            await self._refuse_write(order)
            return
        run, removed = await self._in_thread(
            partial(write_run, store, order.parent, order.blocks, self._limits)
        )
        await self._forget(removed)
        if run is None:
            await self._refuse_write(order)
            return
        self._locations.add(run)
        self._budget.spend(run.file_bytes)
        self._count(written_files=1, written_bytes=run.file_bytes)
        if self._edges.scheduler.latest.active_sequences:
            self._orders.rest_writes(REST * (trio.current_time() - began))
        await self._send(Written(tuple(block.key for block in order.blocks), order.nbytes))

    async def _refuse_write(self, order: Write) -> None:
        self._count(shed_writes=1)
        await self._send(
            Written(tuple(block.key for block in order.blocks), order.nbytes, refused=True)
        )

    async def _read(self, store: RunStore, order: Read) -> None:
        blocks, names, began = list[BlockData](), set[str](), trio.current_time()
        for name, refs in self._locations.by_run(order.blocks):
            if (found := await self._tried(store, name, partial(store.read, name, refs))) is None:
                break
            blocks += found
            names.add(name)
            self._count(read_files=1)
            if self._edges.reads_in_parts:
                await self._answer_read(order, blocks, began, complete=False)
                blocks, began = [], trio.current_time()
        await self._answer_read(order, blocks, began, complete=True)
        with suppress(OSError):  # Then they are evicted earlier.
            await self._in_thread(partial(store.touch, names))

    async def _answer_read(
        self, order: Read, blocks: list[BlockData], began: float, *, complete: bool
    ) -> None:
        nbytes, seconds = sum(block.nbytes for block in blocks), trio.current_time() - began
        self._count(read_bytes=nbytes)
        await self._send(Loaded(order.ticket, tuple(blocks), nbytes, seconds, complete=complete))


class UnreadableFiles:
    def __init__(self) -> None:
        self._in_a_row = 0
        self._named: set[str] = set()

    def note_or_raise(self, name: str, error: OSError) -> None:
        """Note an unreadable file, logged once. Raises the error if the disk is at fault."""
        self._in_a_row += 1
        if is_shortage(error) or self._in_a_row > MAX_IN_A_ROW:
            self._in_a_row = 0
            raise error
        if name not in self._named:
            self._named.add(name)
            log.warning(
                "the file %s of the cache cannot be used (%s); going on without it",
                name,
                error.strerror or error,
            )

    def was_read(self) -> None:
        self._in_a_row = 0
