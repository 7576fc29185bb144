"""The SSDWriter actor. It waits on orders, and owns the cache directory: no other actor writes, removes or measures there.

Reads precede writes, since requests wait for them. Writes yield to decoding: after each write the actor rests so long that
writes take a small part of the machine. A faulty disk detaches the tier and is tried again at the next sweep or inspection;
it never costs a token.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from trouper.protocol.blocks import BlockData, BlockRef
from trouper.protocol.health import DirectoryStats, SchedulerStats
from trouper.protocol.model import ModelCard
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.work import (
    Announce,
    Catalogue,
    DiskNews,
    DiskOrder,
    Inspect,
    Loaded,
    Read,
    RemovedFromDisk,
    Run,
    Sweep,
    Write,
    Written,
)
from trouper.storage import cache_directory as disk
from trouper.storage.runs import BlockEntry, Damaged, RunInfo, RunStore
from trouper.storage.stored_pieces import parents_first

log = logging.getLogger("trouper.writer")
T = TypeVar("T")

REST = 30.0
"""Rest between two writes while rows decode, as a multiple of the last write's duration: about 3 % of one core."""
BLOCKS_A_MESSAGE = 1000
"""Number of blocks after which a `Catalogue` is sent and the next one begun."""
INSPECTED_AT_ONCE = 4
"""Maximum number of files that one `Inspect` verifies."""
HOUR_S = 3600.0


@attrs.frozen(eq=False)
class WriterEdges:
    """Channels and watches of the writer. They outlive a crash, so the graph closes them."""

    orders: trio.MemoryReceiveChannel[DiskOrder]
    news: trio.MemorySendChannel[DiskNews]
    stats: Watch[DirectoryStats]
    scheduler: Watch[SchedulerStats]


async def write_to_disk(edges: WriterEdges, path: Path | None, namespace: str, settings: Settings) -> None:
    """Run the actor. `path` None: there is no SSD tier, and orders are refused. The actor ends after the last order."""
    if path is None:
        edges.stats.publish(DirectoryStats(reason="--no-ssd"))
    await SSDWriter(edges, path, namespace, settings).run()


def directory_for(card: ModelCard, settings: Settings) -> Path | None:
    """Cache directory of this model's blocks; None: they are not stored on disk."""
    kept = card.fingerprint and card.kv.cached and settings.cache_memory != 0
    return settings.blocks_dir if kept else None


class SSDWriter:
    """The actor's state."""

    def __init__(self, edges: WriterEdges, path: Path | None, namespace: str, settings: Settings) -> None:
        self._edges, self._settings = edges, settings
        self._path, self._namespace = path, namespace
        self._store: RunStore | None = None
        self._locations: dict[bytes, tuple[str, BlockEntry]] = {}
        """The run that has a block, and the block's entry in it, by key."""
        self._orders: deque[DiskOrder] = deque()
        self._open = True
        self._rests_until = 0.0
        self._hour_began, self._hour_bytes = trio.current_time(), 0
        self._inspected: set[str] = set()

    async def run(self) -> None:
        while True:
            self._take_orders()
            order = self._next()
            if order is not None:
                await self._carry_out(order)
            elif self._open:
                await self._wait()
            elif not self._orders:
                await self._finish()
                return

    # -- orders ----------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        while self._open:
            try:
                self._orders.append(self._edges.orders.receive_nowait())
            except trio.WouldBlock:
                return
            except trio.EndOfChannel:
                self._open = False

    def _next(self) -> DiskOrder | None:
        """Next order: reads first, then the oldest order, unless that is a write and the writer rests."""
        resting = self._open and trio.current_time() < self._rests_until
        for index, order in enumerate(self._orders):
            if isinstance(order, Read):
                del self._orders[index]
                return order
        if not self._orders or (resting and isinstance(self._orders[0], Write)):
            return None
        return self._orders.popleft()

    async def _wait(self) -> None:
        deadline = self._rests_until if self._orders else float("inf")
        with trio.move_on_at(deadline):
            try:
                self._orders.append(await self._edges.orders.receive())
            except trio.EndOfChannel:
                self._open = False

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
                case Announce():
                    await self._announce(parents_first(store.runs), whole=True)
                case Write():
                    await self._write(store, order)
                case Read():
                    await self._read(store, order)
        except OSError as sick:
            await self._refuse(order, sick)

    async def _refuse(self, order: DiskOrder, sick: OSError) -> None:
        """Answer an order that the disk failed, since neither a request nor a block may wait for a faulty disk."""
        if self._path is not None:
            self._detach(self._path, sick)
        match order:
            case Write():
                await self._refused(order)
            case Read(ticket=ticket):
                await self._tell(Loaded(ticket, (), 0, 0.0))
            case Announce():
                await self._tell(Catalogue(()))

    # -- the directory ---------------------------------------------------------------------------

    async def _attached(self, path: Path, *, again: bool) -> RunStore:
        """The store, opened if necessary. After a fault only the janitor's orders try the disk again; then the catalogue is announced
        to the scheduler again."""
        if self._store is not None:
            return self._store
        sick = self._edges.stats.latest.reason
        if sick and not again:
            raise OSError(errno.ENODEV, sick)
        store = RunStore(path, self._namespace)
        await _in_thread(lambda: _look(store))
        self._store = store
        self._locations.clear()
        for run in store.runs:
            self._note(run)
        self._publish(path=str(path), attached=True, reason="", damaged=sum(store.damaged.values()))
        if sick:
            log.warning("the cache directory %s is in use again", path)
            await self._announce(parents_first(store.runs), whole=True)
        return store

    def _detach(self, path: Path, sick: OSError) -> None:
        stats = self._edges.stats.latest
        if stats.attached or not stats.reason:
            log.warning("the cache directory %s is not usable (%s); going on without it", path, sick)
        self._store = None
        self._edges.stats.publish(attrs.evolve(stats, path=str(path), attached=False, reason=str(sick)))

    def _note(self, run: RunInfo) -> None:
        """Record the locations of a run's blocks. A block may be in several runs; the one with its snapshot is preferred."""
        for entry in run.pieces:
            known = self._locations.get(entry.key)
            if entry.snapshot_bytes is not None or known is None or known[1].snapshot_bytes is None:
                self._locations[entry.key] = run.name, entry

    def _publish(self, **more: Any) -> None:
        stats = self._edges.stats.latest
        if self._store is not None:
            stats = attrs.evolve(
                stats, files=len(self._store.runs), blocks=len(self._locations), bytes=self._store.total_bytes
            )
        self._edges.stats.publish(attrs.evolve(stats, **more))

    def _count(self, **more: int) -> None:
        stats = self._edges.stats.latest
        self._publish(**{name: getattr(stats, name) + n for name, n in more.items()})

    async def _sweep(self, store: RunStore, ttl_s: float) -> None:
        assert self._path is not None
        path, settings = self._path, self._settings

        def work() -> tuple[disk.DirectoryUsage, list[RunInfo], Sequence[RunInfo], int]:
            disk.prepare(path)
            measured = disk.sweep(path, ttl_s)
            changes = store.refresh()
            room = store.make_room(0, settings.ssd_max_bytes, settings.ssd_keep_free)
            store.save_catalogue()
            return measured, [*changes.vanished, *room.removed], changes.appeared, sum(store.damaged.values())

        measured, removed_runs, appeared, damaged = await _in_thread(work)
        swept = self._edges.stats.latest.swept_files + measured.swept_files
        await self._lost(removed_runs)
        await self._announce(appeared)
        self._publish(free_disk_bytes=measured.free_disk_bytes, swept_files=swept, damaged=damaged)

    async def _inspect(self, store: RunStore) -> None:
        """Verify a few files. Each file is verified once before any is verified again."""
        names = list(islice((run.name for run in store.runs if run.name not in self._inspected), INSPECTED_AT_ONCE))
        if not names:
            self._inspected.clear()
        for name in names:
            self._inspected.add(name)
            try:
                await _in_thread(partial(store.verify, name))
            except Damaged as damaged:
                await self._discard(store, damaged)
            self._count(inspected=1)

    # -- news for the scheduler -------------------------------------------------------------------

    async def _tell(self, news: DiskNews) -> None:
        try:
            await self._edges.news.send(news)
        except trio.BrokenResourceError:  # The scheduler has ended and needs no news.
            return

    async def _announce(self, runs: Sequence[RunInfo], *, whole: bool = False) -> None:
        """Announce runs, each after the one that it continues. `whole`: the runs are the complete catalogue."""
        for run in runs:
            self._note(run)
        for batch in _batches(runs):
            await self._tell(Catalogue(batch, complete=False))
        if whole:
            await self._tell(Catalogue((), complete=True))
        self._publish()

    async def _lost(self, runs: Iterable[RunInfo]) -> None:
        keys = tuple(
            piece.key
            for run in runs
            for piece in run.pieces
            if (location := self._locations.get(piece.key)) is not None and location[0] == run.name
        )
        for key in keys:
            del self._locations[key]
        if keys:
            await self._tell(RemovedFromDisk(keys))

    async def _discard(self, store: RunStore, damaged: Damaged) -> None:
        """Remove a damaged file and count a miss: damage never leads to wrong text or a crash."""
        if damaged.reason != "vanished":
            log.warning("removed a damaged file of the cache: %s", damaged)
        self._count(damaged=1)
        await self._lost([run for run in store.runs if run.name == damaged.name])
        await _in_thread(partial(store.remove, damaged.name))

    # -- writing ---------------------------------------------------------------------------------

    async def _write(self, store: RunStore, order: Write) -> None:
        if not self._within_budget(order.nbytes):
            await self._refused(order)
            return
        settings = self._settings
        began = trio.current_time()

        def work() -> tuple[RunInfo | None, Sequence[RunInfo]]:
            sealed = store.seal(order.parent, order.blocks)
            room = store.make_room(sealed.info.file_bytes, settings.ssd_max_bytes, settings.ssd_keep_free)
            return (store.put(sealed) if room.fits else None), room.removed

        run, removed = await _in_thread(work)
        await self._lost(removed)
        if run is None:
            await self._refused(order)
            return
        self._note(run)
        self._hour_bytes += run.file_bytes
        self._count(written_files=1, written_bytes=run.file_bytes)
        if self._edges.scheduler.latest.active_sequences:
            self._rests_until = trio.current_time() + REST * (trio.current_time() - began)
        await self._tell(Written(tuple(piece.key for piece in order.blocks), order.nbytes))

    def _within_budget(self, nbytes: int) -> bool:
        """Whether a write fits the budget of the current hour, which limits the wear of the disk."""
        now = trio.current_time()
        if now - self._hour_began >= HOUR_S:
            self._hour_began, self._hour_bytes = now, 0
        return self._hour_bytes + nbytes <= self._settings.ssd_write_budget

    async def _refused(self, order: Write) -> None:
        self._count(shed_writes=1)
        await self._tell(Written(tuple(piece.key for piece in order.blocks), order.nbytes, refused=True))

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self, store: RunStore, order: Read) -> None:
        began = trio.current_time()
        blocks: list[BlockData] = []
        for name, refs in self._by_run(order.blocks):
            try:
                blocks += await _in_thread(partial(store.read, name, refs))
            except Damaged as damaged:
                await self._discard(store, damaged)
                break
        nbytes = sum(block.nbytes for block in blocks)
        await self._tell(Loaded(order.ticket, tuple(blocks), nbytes, trio.current_time() - began))
        self._count(read_files=1, read_bytes=nbytes)
        names = {self._locations[block.key][0] for block in blocks if block.key in self._locations}
        await _in_thread(partial(store.touch, names))

    def _by_run(self, refs: Sequence[BlockRef]) -> list[tuple[str, list[BlockRef]]]:
        """Group blocks by run, in order, up to the first that is in none."""
        groups: list[tuple[str, list[BlockRef]]] = []
        for ref in refs:
            name, entry = self._locations.get(ref.key, ("", None))
            if entry is None or (ref.snapshot and entry.snapshot_bytes is None):
                break
            if not groups or groups[-1][0] != name:
                groups.append((name, []))
            groups[-1][1].append(ref)
        return groups

    async def _finish(self) -> None:
        """Save the catalogue, so that the next start need not open every file."""
        if self._store is not None:
            try:
                await _in_thread(self._store.save_catalogue)
            except OSError as sick:
                log.warning("the catalogue of the cache was not saved: %s", sick)


def _batches(runs: Iterable[RunInfo]) -> Iterator[tuple[Run, ...]]:
    """Group runs for messages of about `BLOCKS_A_MESSAGE` blocks."""
    batch, size = list[Run](), 0
    for run in runs:
        blocks = tuple(
            BlockRef(piece.key, piece.tokens, piece.payload_bytes > 0, piece.snapshot_bytes is not None)
            for piece in run.pieces
        )
        batch.append(Run(run.parent, blocks))
        size += len(blocks)
        if size >= BLOCKS_A_MESSAGE:
            yield tuple(batch)
            batch, size = [], 0
    if batch:
        yield tuple(batch)


def _look(store: RunStore) -> None:
    disk.prepare(store.directory)
    store.refresh()


async def _in_thread(work: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(work)
