"""The disk tier over ranks: rank 0's relay between Scheduler and CacheJanitor and every rank's
SSDWriter. A block is on disk only if every rank has its shard."""

from __future__ import annotations

import logging

import attrs
import trio

from trouper.actors.ranks.leader import Leader
from trouper.actors.runtime.channels import offer
from trouper.actors.runtime.disk_orders import DiskWriter, WriterEdges
from trouper.actors.scheduling.cache_namespace import cache_namespace
from trouper.actors.ssd_writer import directory_for, write_to_disk
from trouper.protocol.blocks import BlockData
from trouper.protocol.health import DirectoryStats
from trouper.protocol.link import Fetch, Fetched, Missing, WriteDone
from trouper.protocol.model import ModelCard
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Relayed
from trouper.protocol.work import (
    Catalogue,
    DiskNews,
    DiskOrder,
    Loaded,
    Read,
    RemovedFromDisk,
    Write,
    Written,
)


@attrs.define(eq=False)
class PendingRead:
    missing: set[int]
    blocks: tuple[BlockData, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    """Duration of the slowest rank's read."""
    shortest: int | None = None
    """Least number of blocks of a follower; None before any answer."""
    complete: trio.Event = attrs.field(factory=trio.Event)

    def answer(self, rank: int, seconds: float) -> None:
        self.missing.discard(rank)
        self.seconds = max(self.seconds, seconds)
        if not self.missing:
            self.complete.set()

    @property
    def common_blocks(self) -> tuple[BlockData, ...]:
        return () if self.missing else self.blocks[: self.shortest]


@attrs.define(eq=False)
class PendingWrite:
    """A run of which every rank writes its part."""

    missing: set[int]
    since: float
    refused: bool = False
    nbytes: int | None = None
    """Bytes of rank 0's own write; None without such an order."""


def nothing_read(ticket: int, *, must_settle: bool = False) -> Loaded:
    return Loaded(ticket=ticket, blocks=(), nbytes=0, seconds=0.0, must_settle=must_settle)


# A read, by which no rank's disk delays the engine of another:
#
# 1. Scheduler's `Read` goes to the followers as `Fetch` before rank 0's own writer. Links are in
#    order, so the `Fetch` precedes any plan with its ticket.
# 2. A follower reads and *keeps* its shards, and answers with the number of leading blocks.
# 3. After all answers, or the time limit, Scheduler gets the shortest prefix and the longest
#    duration.
# 4. Scheduler's `Load`s name ticket and block; each rank inserts its own bytes
#    (`FollowerDisk.replay`). A plan that settles the ticket frees the others.
#
# A late rank is not asked for PAUSE_S, and the tier is detached: a slow disk may cost blocks, never
# a request.

log = logging.getLogger("trouper.ssd_writer")
ANSWER_S = 10.0
"""Time limit for a rank's answer, besides the transfer."""
SLOWEST_BYTES_PER_S = 50e6  # Speed of the slowest disk that is worth a read.
PAUSE_S = 60.0
"""Time for which a silent rank is not asked again."""
WRITTEN_S = 600.0  # Time limit for the answer to a write: writers rest while rows decode.
KNOWN_S = 5.0
"""Maximum wait at the start until all directories are read."""
# Without this room followers would get a read only when that writer is idle.
WRITER_ORDERS = 64


class LeaderDisk:
    """The relay. `edges`: publishes rank 0's directory, attached only while every rank's is."""

    def __init__(
        self,
        edges: WriterEdges,
        followers: Leader,
        card: ModelCard,
        settings: Settings,
        disk_writer: DiskWriter = write_to_disk,
    ) -> None:
        self._edges, self._followers, self._card, self._settings = edges, followers, card, settings
        self._disk_writer = disk_writer
        self._writer_stats = Relayed(DirectoryStats(), self._publish)
        self._all_known = trio.Event()
        # Ranks that failed to answer a read within the last PAUSE_S.
        self._silent: list[int] = []
        # Reads by ticket.
        self._reads: dict[int, PendingRead] = {}
        # Writes by the keys of their blocks.
        self._writes: dict[tuple[bytes, ...], PendingWrite] = {}
        self._lacking = 0

    async def run(self) -> None:
        await self._give_up_all()
        writer_orders, writer_orders_in = trio.open_memory_channel[DiskOrder](WRITER_ORDERS)
        writer_news, writer_news_in = trio.open_memory_channel[DiskNews](0)
        async with trio.open_nursery() as reads:
            reads.start_soon(self._take_reports)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._relay_orders, writer_orders, reads)
                nursery.start_soon(self._relay_news, writer_news_in)
                edges = WriterEdges(
                    orders=writer_orders_in,
                    news=writer_news,
                    stats=self._writer_stats,
                    scheduler=self._edges.scheduler,
                )
                path = directory_for(self._card, self._settings)
                namespace = cache_namespace(self._card, self._settings)
                with writer_news:
                    await self._disk_writer(edges, path, namespace, self._settings)
            reads.cancel_scope.cancel(reason="nobody waits for a read any more")

    async def _give_up_all(self) -> None:
        tickets, writes = list(self._reads), list(self._writes.items())
        self._reads.clear()
        self._writes.clear()
        self._silent.clear()
        for ticket in tickets:
            await self._send(nothing_read(ticket, must_settle=True))
        for keys, write in writes:
            if write.nbytes is not None:
                await self._send(Written(keys, write.nbytes, refused=True))

    async def _send(self, news: DiskNews) -> None:
        try:
            await self._edges.news.send(news)
        except trio.BrokenResourceError:  # The scheduler has ended and needs no news.
            return

    # -- orders ----------------------------------------------------------------------------------

    async def _relay_orders(
        self, writer_orders: trio.MemorySendChannel[DiskOrder], reads: trio.Nursery
    ) -> None:
        """Pass orders to rank 0's writer: reads also to the followers, or answered as empty while a
        rank is silent; writes noted until each rank has its part."""
        with writer_orders:
            async for order in self._edges.orders:
                match order:
                    case Read() if self._silent or _is_full(writer_orders):
                        await self._send(nothing_read(order.ticket))
                        continue
                    case Read():
                        ranks = self._followers.fetch(Fetch(order.ticket, order.blocks))
                        self._reads[order.ticket] = PendingRead({0, *ranks})
                        reads.start_soon(self._answer_read, order)
                    case Write():
                        await self._give_up_old_writes()
                        self._pending_write(
                            tuple(block.key for block in order.blocks)
                        ).nbytes = order.nbytes
                    case _:
                        pass
                if not offer(writer_orders, order) and isinstance(order, Write):
                    await self._take_written(
                        0, tuple(block.key for block in order.blocks), refused=True
                    )

    async def _answer_read(self, read: Read) -> None:
        pending, limit_s = self._reads[read.ticket], self._limit_s(read)
        with trio.move_on_after(limit_s) as waiting:
            await pending.complete.wait()
        if self._reads.pop(read.ticket, None) is None:
            return
        blocks = pending.common_blocks
        self._lacking += len(pending.blocks) - len(blocks)
        silent = sorted(pending.missing)
        self._silent += silent
        self._publish()
        await self._send(
            Loaded(
                ticket=read.ticket,
                blocks=blocks,
                nbytes=pending.nbytes,
                seconds=pending.seconds,
                must_settle=True,
            )
        )
        if waiting.cancelled_caught and silent:
            log.warning("rank %d: no answer to a read within %.0f s", silent[0], limit_s)
            await trio.sleep(PAUSE_S)
            for rank in silent:
                self._silent.remove(rank)
            self._publish()

    def _limit_s(self, read: Read) -> float:
        tokens = sum(block.payload_tokens for block in read.blocks)
        snapshots = sum(block.snapshot for block in read.blocks)
        nbytes = tokens * self._card.kv.token_bytes + snapshots * self._card.kv.snapshot_bytes
        return ANSWER_S + nbytes / SLOWEST_BYTES_PER_S

    # -- answers of the ranks ---------------------------------------------------------------------

    async def _relay_news(self, writer_news: trio.MemoryReceiveChannel[DiskNews]) -> None:
        async for news in writer_news:
            match news:
                case Loaded():
                    self._take_loaded(news)
                case Written(keys=keys, refused=refused):
                    await self._take_written(0, keys, refused=refused)
                case Catalogue(complete=True):
                    with trio.move_on_after(KNOWN_S):
                        await self._all_known.wait()
                    await self._send(news)
                case _:
                    await self._send(news)

    async def _take_reports(self) -> None:
        async for rank, report in self._followers.disk_reports:
            match report:
                case Fetched():
                    self._take_fetched(rank, report)
                case WriteDone(keys=keys, refused=refused):
                    await self._take_written(rank, keys, refused=refused)
                case Missing(keys=keys):
                    await self._send(RemovedFromDisk(keys))
                case DirectoryStats():
                    self._publish()
                    if all(stats is not None for stats in self._followers.directories().values()):
                        self._all_known.set()

    def _take_loaded(self, loaded: Loaded) -> None:
        pending = self._reads.get(loaded.ticket)
        if pending is not None:
            pending.blocks, pending.nbytes = loaded.blocks, loaded.nbytes
            pending.answer(0, loaded.seconds)

    def _take_fetched(self, rank: int, fetched: Fetched) -> None:
        pending = self._reads.get(fetched.ticket)
        if pending is not None and rank in pending.missing:
            pending.shortest = (
                fetched.blocks
                if pending.shortest is None
                else min(pending.shortest, fetched.blocks)
            )
            pending.answer(rank, fetched.seconds)

    def _pending_write(self, keys: tuple[bytes, ...]) -> PendingWrite:
        # A follower's answer may precede rank 0's order, since its engine may be ahead.
        if keys not in self._writes:
            self._writes[keys] = PendingWrite(
                {0, *self._followers.directories()}, trio.current_time()
            )
        return self._writes[keys]

    async def _take_written(self, rank: int, keys: tuple[bytes, ...], *, refused: bool) -> None:
        write = self._pending_write(keys)
        write.missing.discard(rank)
        write.refused |= refused
        if not write.missing:
            del self._writes[keys]
            await self._send(Written(keys, write.nbytes or 0, write.refused))

    async def _give_up_old_writes(self) -> None:
        since = trio.current_time() - WRITTEN_S
        for keys, write in [
            (keys, write) for keys, write in self._writes.items() if write.since < since
        ]:
            del self._writes[keys]
            if write.nbytes is not None:
                await self._send(Written(keys, write.nbytes, refused=True))

    # -- statistics -------------------------------------------------------------------------------

    def _publish(self) -> None:
        stats = attrs.evolve(self._writer_stats.latest, lacking=self._lacking)
        if stats.attached and (reason := self._why_detached()):
            stats = attrs.evolve(stats, attached=False, reason=reason)
        self._edges.stats.publish(stats)

    def _why_detached(self) -> str:
        """Reason why the tier is detached although rank 0's directory is in use; "" if attached."""
        if self._silent:
            return f"rank {self._silent[0]}: its disk did not answer"
        for rank, stats in self._followers.directories().items():
            if stats is None:
                return f"rank {rank} has not looked at its directory yet"
            if not stats.attached:
                return f"rank {rank}: {stats.reason}"
        return ""


def _is_full(channel: trio.MemorySendChannel[DiskOrder]) -> bool:
    state = channel.statistics()
    return state.current_buffer_used >= state.max_buffer_size
