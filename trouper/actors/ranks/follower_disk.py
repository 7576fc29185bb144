"""A follower's disk: an SSDWriter and a CacheJanitor for this rank's shard of each block. Rank 0
decides on reads, loads and writes (`leader_disk`). A failure here costs blocks, which are computed
again, and never ends the rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import trio

from trouper.actors.cache_janitor import keep_tidy
from trouper.actors.ranks.leader_disk import nothing_read
from trouper.actors.runtime.disk_orders import DiskWriter, WriterEdges
from trouper.actors.runtime.supervision import RestartLimit, supervise
from trouper.actors.scheduling.cache_namespace import cache_namespace
from trouper.actors.scheduling.disk_tier import BACKLOG_BYTES
from trouper.actors.ssd_writer import directory_for, write_to_disk
from trouper.protocol.blocks import BlockData
from trouper.protocol.health import (
    ActorStats,
    AdapterStats,
    DirectoryStats,
    MemoryStatus,
    SchedulerStats,
)
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
    Loaded,
    Read,
    RemovedFromDisk,
    Run,
    Written,
)

ORDERS = 64
NEWS = 16
Keys = tuple[bytes, ...]


class FollowerDisk:
    def __init__(
        self,
        card: ModelCard,
        settings: Settings,
        read_memory: Callable[[], MemoryStats],
        report: Callable[[Message], bool],
        directory_changed: Callable[[], None],
        *,
        disk_writer: DiskWriter = write_to_disk,
    ) -> None:
        """`report` sends a message to rank 0, or drops it. `directory_changed` is called when
        `stats` may have changed."""
        self.directory = Relayed(DirectoryStats(), directory_changed)
        self.ended = trio.Event()
        self._disk_writer = disk_writer
        self._card = card
        self._settings = settings
        self._read_memory = read_memory
        self._report = report
        self._orders, self._orders_in = trio.open_memory_channel[DiskOrder](ORDERS)
        self._news, self._news_in = trio.open_memory_channel[DiskNews](NEWS)
        self._scheduler = Watch(SchedulerStats())
        self._tidying = trio.CancelScope()
        # Runs whose bytes the engine returns, by step.
        self._runs: dict[int, Run] = {}
        # Bytes of runs that wait to be written.
        self._underway: dict[Keys, int] = {}
        self._shed = 0
        # Blocks that were read, by ticket, until settled; None while being read.
        self._reads: dict[int, tuple[BlockData, ...] | None] = {}
        self._read_bytes = 0
        # Limit of `_read_bytes`: more could not become blocks at the same time.
        self._capacity_bytes = (
            card.cache_bytes if settings.cache_memory is None else settings.cache_memory
        )

    @property
    def stats(self) -> DirectoryStats | None:
        stats = self.directory.latest
        if not (stats.attached or stats.reason):
            return None
        return attrs.evolve(stats, shed_writes=stats.shed_writes + self._shed)

    async def run(self) -> None:
        """Run until `close`, then carry out the orders before. Never raises."""
        self._order(Announce())
        async with trio.open_nursery() as background:
            background.start_soon(self._take_news)
            background.start_soon(self._tidy)
            writer = Watch(ActorStats(name="SSDWriter"))
            await supervise(self._write, writer, RestartLimit(), needed=False)
            self._orders_in.close()
            if writer.latest.state == "degraded":
                reason = f"its writer has crashed too often: {writer.latest.last_error}"
                self.directory.publish(
                    attrs.evolve(self.directory.latest, attached=False, reason=reason)
                )
            self._give_up()
            self.ended.set()
            background.cancel_scope.cancel(reason="the last order was carried out")

    def close(self) -> None:
        self._tidying.cancel(reason="no plan comes any more")
        self._orders.close()

    async def _tidy(self) -> None:
        janitor = partial(
            keep_tidy,
            self._orders,
            self._read_memory,
            memory=Watch(MemoryStatus()),
            scheduler=self._scheduler,
            adapters=Watch(AdapterStats(held_bytes=self._card.adapter_bytes)),
            settings=self._settings,
        )
        with self._tidying:
            await supervise(
                janitor, Watch(ActorStats(name="CacheJanitor")), RestartLimit(), needed=False
            )

    async def _write(self) -> None:
        edges = WriterEdges(
            orders=self._orders_in, news=self._news, stats=self.directory, scheduler=self._scheduler
        )
        path = directory_for(self._card, self._settings)
        try:
            await self._disk_writer(
                edges, path, cache_namespace(self._card, self._settings), self._settings
            )
        finally:
            self._give_up()

    def _give_up(self) -> None:
        for keys in list(self._underway):
            self._report_written(keys, refused=True)
        for ticket in list(self._reads):
            self._keep(nothing_read(ticket))

    def _order(self, order: DiskOrder) -> bool:
        try:
            self._orders.send_nowait(order)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    # -- what rank 0 orders -----------------------------------------------------------------------

    def fetch(self, fetch: Fetch) -> None:
        """Read blocks for rank 0. The answer is `Fetched`, unless the ticket is settled before."""
        self._reads[fetch.ticket] = None
        if not self._order(Read(fetch.ticket, fetch.blocks)):
            self._keep(nothing_read(fetch.ticket))

    def replay(self, plan: Plan) -> Plan:
        """Rank 0's plan with the bytes of this rank's shard; disk orders are taken from the
        plan."""
        if plan.load:
            plan = attrs.evolve(plan, load=tuple(map(self._with_payload, plan.load)))
        for ticket in plan.settled:
            self._read_bytes -= sum(block.nbytes for block in self._reads.pop(ticket, None) or ())
        if plan.persist_as is not None:
            self._runs[plan.step] = plan.persist_as
        # While it is, writes rest, and nothing is inspected.
        busy = bool(self._scheduler.latest.active_sequences)
        if plan.has_work != busy:
            self._scheduler.publish(SchedulerStats(active_sequences=int(plan.has_work)))
        return plan

    def _with_payload(self, load: Load) -> Load:
        blocks = self._reads[load.ticket]
        assert blocks is not None, "rank 0 loads blocks that this rank has not reported"
        block = blocks[load.index]
        payload = block.snapshot if load.snapshot else block.payload
        assert payload is not None, "rank 0 loads a snapshot that this rank has not read"
        return attrs.evolve(load, payload=payload)

    def take_answer(self, stepped: Stepped) -> None:
        run = self._runs.pop(stepped.step, None)
        if run is None:
            return
        write = run.filled(stepped.persisted)
        keys = tuple(block.key for block in write.blocks)
        if sum(self._underway.values()) + write.nbytes <= BACKLOG_BYTES and self._order(write):
            self._underway[keys] = write.nbytes
            return
        self._shed += 1
        self._report(WriteDone(keys, refused=True))

    def _report_written(self, keys: Keys, *, refused: bool) -> None:
        if self._underway.pop(keys, None) is not None:
            self._report(WriteDone(keys, refused))

    # -- what the writer reports ------------------------------------------------------------------

    async def _take_news(self) -> None:
        async for news in self._news_in:
            match news:
                case Loaded():
                    self._keep(news)
                case RemovedFromDisk(keys=keys):
                    self._report(Missing(keys))
                case Written(keys=keys, refused=refused):
                    self._report_written(keys, refused=refused)
                case Catalogue():  # Rank 0 goes by its own.
                    pass

    def _keep(self, loaded: Loaded) -> None:
        # Settled meanwhile, since rank 0 did not wait; or given up.
        if self._reads.get(loaded.ticket, ()) is not None:
            return
        kept: list[BlockData] = []
        for block in loaded.blocks:
            if self._read_bytes + block.nbytes > self._capacity_bytes:
                break
            self._read_bytes += block.nbytes
            kept.append(block)
        self._reads[loaded.ticket] = tuple(kept)
        self._report(Fetched(loaded.ticket, len(kept), loaded.seconds))
