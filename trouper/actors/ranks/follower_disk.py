"""A follower's disk: SSDWriter and CacheJanitor of its own, for its own shard of each block.

Rank 0 says what to read, what of it becomes blocks, and what to write. So nothing here decides, and whatever goes wrong is
only that rank 0 counts on less: an answer of nothing, or a block that is computed again one day.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import trio

from trouper.actors.cache_janitor import keep_tidy
from trouper.actors.runtime.supervision import RestartLimit, supervise
from trouper.actors.scheduling.disk_tier import BACKLOG_BYTES
from trouper.actors.scheduling.prefix_cache import cache_namespace
from trouper.actors.ssd_writer import DiskWriter, WriterEdges, directory_for, write_to_disk
from trouper.protocol.health import ActorStats, DirectoryStats, MemoryStatus, SchedulerStats
from trouper.protocol.link import Fetch, Fetched, Message, Missing, WriteDone
from trouper.protocol.model import MemoryStats, ModelCard
from trouper.protocol.plans import Load, Plan, Stepped
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Relayed, Watch
from trouper.protocol.work import (
    Announce,
    Catalogue,
    DiskNews,
    DiskOrder,
    Gone,
    Loaded,
    Piece,
    Read,
    Run,
    Written,
)

ORDERS = 64
NEWS = 16
Keys = tuple[bytes, ...]
"""Keys of a run's pieces."""


class FollowerDisk:
    """The actors, what was read for rank 0, and what is on its way to the disk. `tell`: rank 0, if there is room."""

    def __init__(
        self,
        card: ModelCard,
        settings: Settings,
        look: Callable[[], MemoryStats],
        tell: Callable[[Message], bool],
        changed: Callable[[], None],
        *,
        disk_writer: DiskWriter = write_to_disk,
    ) -> None:
        """`changed` is called when `facts` are others."""
        self.directory = Relayed(DirectoryStats(), changed)
        self._card, self._settings, self._look, self._tell = card, settings, look, tell
        self._disk_writer = disk_writer
        self._orders, self._orders_in = trio.open_memory_channel[DiskOrder](ORDERS)
        self._news, self._news_in = trio.open_memory_channel[DiskNews](NEWS)
        self._scheduler = Watch(SchedulerStats())
        self._tidying = trio.CancelScope()
        self.ended = trio.Event()
        """Set when the last order was carried out."""
        self._runs: dict[int, Run] = {}
        """Runs whose bytes the engine returns, by the step that requests them."""
        self._underway: dict[Keys, int] = {}
        """Bytes of runs that wait to be written."""
        self._shed = 0
        self._held: dict[int, tuple[Piece, ...] | None] = {}
        """Pieces that were read, by ticket, until a plan settles it; None while they are being read."""
        self._held_bytes = 0
        self._room = card.cache_bytes if settings.cache_memory is None else settings.cache_memory
        """More could not become blocks at the same time."""

    @property
    def stats(self) -> DirectoryStats | None:
        """Statistics of the directory; None until it has been read."""
        stats = self.directory.latest
        if not (stats.attached or stats.reason):
            return None
        return attrs.evolve(stats, shed_writes=stats.shed_writes + self._shed)

    async def run(self) -> None:
        """Until `close`, and then for what was ordered before. Without its disk the rank goes on: this never raises."""
        self._order(Announce())
        async with trio.open_nursery() as beside:
            beside.start_soon(self._hear)
            beside.start_soon(self._tidy)
            writer = Watch(ActorStats(name="SSDWriter"))
            await supervise(self._write, writer, RestartLimit(), needed=False)
            self._orders_in.close()
            if writer.latest.state == "degraded":
                reason = f"its writer has crashed too often: {writer.latest.last_error}"
                self.directory.publish(attrs.evolve(self.directory.latest, attached=False, reason=reason))
            self._give_up()
            self.ended.set()
            beside.cancel_scope.cancel(reason="the last order was carried out")

    def close(self) -> None:
        """Stop after the orders so far: no more plans arrive."""
        self._tidying.cancel(reason="no plan comes any more")
        self._orders.close()

    async def _tidy(self) -> None:
        janitor = partial(keep_tidy, self._orders, self._look, Watch(MemoryStatus()), self._scheduler, self._settings)
        with self._tidying:
            await supervise(janitor, Watch(ActorStats(name="CacheJanitor")), RestartLimit(), needed=False)

    async def _write(self) -> None:
        edges = WriterEdges(self._orders_in, self._news, self.directory, self._scheduler)
        path = directory_for(self._card, self._settings)
        try:
            await self._disk_writer(edges, path, cache_namespace(self._card, self._settings), self._settings)
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """After a crash, or at the end: rank 0 must not wait for what may be forgotten."""
        for keys in list(self._underway):
            self._written(keys, refused=True)
        for ticket in list(self._held):
            self._keep(Loaded(ticket, (), 0, 0.0))

    def _order(self, order: DiskOrder) -> bool:
        try:
            self._orders.send_nowait(order)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    # -- what rank 0 says ------------------------------------------------------------------------

    def fetch(self, fetch: Fetch) -> None:
        """Read pieces for rank 0. The answer is `Fetched`, unless rank 0 settles the ticket before."""
        self._held[fetch.ticket] = None
        if not self._order(Read(fetch.ticket, fetch.wanted)):
            self._keep(Loaded(fetch.ticket, (), 0, 0.0))

    def replay(self, plan: Plan) -> Plan:
        """The plan of rank 0 with this rank's bytes."""
        if plan.load:
            plan = attrs.evolve(plan, load=tuple(map(self._own, plan.load)))
        for ticket in plan.settled:
            self._held_bytes -= sum(piece.nbytes for piece in self._held.pop(ticket, None) or ())
        if plan.persist_as is not None:
            self._runs[plan.step] = plan.persist_as
        if plan.has_work != bool(
            self._scheduler.latest.active_sequences
        ):  # Then writes rest, and nothing is inspected.
            self._scheduler.publish(SchedulerStats(active_sequences=int(plan.has_work)))
        return plan

    def _own(self, load: Load) -> Load:
        pieces = self._held[load.ticket]
        assert pieces is not None, "rank 0 loads what it was not told that we have"
        piece = pieces[load.index]
        payload = piece.snapshot if load.snapshot else piece.payload
        assert payload is not None, "the snapshot was read, or rank 0 was not told that we have it"
        return attrs.evolve(load, payload=payload)

    def answered(self, stepped: Stepped) -> None:
        """The engine has done this step; perhaps it gives something for the disk."""
        run = self._runs.pop(stepped.step, None)
        if run is None:
            return
        write = run.filled(stepped.persisted)
        keys = tuple(piece.key for piece in write.pieces)
        if sum(self._underway.values()) + write.nbytes <= BACKLOG_BYTES and self._order(write):
            self._underway[keys] = write.nbytes
            return
        self._shed += 1
        self._tell(WriteDone(keys, refused=True))

    def _written(self, keys: Keys, *, refused: bool) -> None:
        if self._underway.pop(keys, None) is not None:
            self._tell(WriteDone(keys, refused))

    # -- what the disk says ----------------------------------------------------------------------

    async def _hear(self) -> None:
        async for news in self._news_in:
            match news:
                case Loaded():
                    self._keep(news)
                case Gone(keys=keys):
                    self._tell(Missing(keys))
                case Written(keys=keys, refused=refused):
                    self._written(keys, refused=refused)
                case Catalogue():  # What there is rank 0 knows by its own.
                    pass

    def _keep(self, loaded: Loaded) -> None:
        """Hold as many pieces as there is room for, and report their number."""
        if self._held.get(loaded.ticket, ()) is not None:  # Settled meanwhile, since rank 0 did not wait; or given up.
            return
        kept: list[Piece] = []
        for piece in loaded.pieces:
            if self._held_bytes + piece.nbytes > self._room:
                break
            self._held_bytes += piece.nbytes
            kept.append(piece)
        self._held[loaded.ticket] = tuple(kept)
        self._tell(Fetched(loaded.ticket, len(kept), loaded.seconds))
