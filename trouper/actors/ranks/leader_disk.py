"""Rank 0's SSDWriter, where there are others: what it reads, every rank must have, and what one lacks, none has.

Orders of Scheduler and CacheJanitor come here first and go on to a writer of the own directory. A `Read` goes to the
followers, too, as `Fetch`; it is answered once all have answered, with what every rank has. Who does not answer in time has
nothing, and is not asked again for a while: a disk may cost a block, never a request.
"""

from __future__ import annotations

import logging

import attrs
import trio

from trouper.actors.ranks.leader import Leader
from trouper.actors.scheduling.prefix_cache import cache_namespace
from trouper.actors.ssd_writer import DiskWriter, WriterEdges, directory_for, write_to_disk
from trouper.protocol.health import DirectoryStats
from trouper.protocol.link import Fetch, Fetched, Missing, WriteDone
from trouper.protocol.model import ModelCard
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Relayed
from trouper.protocol.work import Catalogue, DiskNews, DiskOrder, Gone, Loaded, Piece, Read, Write, Written

log = logging.getLogger("trouper.writer")
ANSWER_S = 10.0
"""Time limit for a rank's answer, besides the time of the transfer."""
SLOWEST_BYTES_PER_S = 50e6
"""Speed of the slowest disk that is worth a read, which limits the time of the transfer."""
PAUSE_S = 60.0
"""Time for which a rank that did not answer is not asked again."""
WRITTEN_S = 600.0
"""Time limit for a rank's answer to a write. Writers rest while rows decode."""
KNOWN_S = 5.0
"""Maximum wait at the start until all followers have read their directories."""
ORDERS = 64
"""On their way to the own writer: followers must not hear of a read only when it has done what is before that."""


@attrs.define(eq=False)
class Gathering:
    """A read that ranks are carrying out."""

    missing: set[int]
    """Ranks that have not answered."""
    pieces: tuple[Piece, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    """Duration of the slowest rank's read."""
    shortest: int | None = None
    """Number of pieces that every follower with an answer has."""
    complete: trio.Event = attrs.field(factory=trio.Event)

    def answer(self, rank: int, seconds: float) -> None:
        self.missing.discard(rank)
        self.seconds = max(self.seconds, seconds)
        if not self.missing:
            self.complete.set()

    @property
    def everywhere(self) -> tuple[Piece, ...]:
        return () if self.missing else self.pieces[: self.shortest]


@attrs.define(eq=False)
class Writing:
    """A run that ranks are writing, each its part."""

    missing: set[int]
    since: float
    refused: bool = False
    nbytes: int | None = None
    """Bytes of rank 0's own write; None if rank 0 has no such order."""


class LeaderDisk:
    """The actor's state. `edges`: their directory's facts are rank 0's own, but it is in use only while every rank's is."""

    def __init__(
        self,
        edges: WriterEdges,
        leader: Leader,
        card: ModelCard,
        settings: Settings,
        disk_writer: DiskWriter = write_to_disk,
    ) -> None:
        self._edges, self._leader, self._card, self._settings = edges, leader, card, settings
        self._disk_writer = disk_writer
        self._own = Relayed(DirectoryStats(), self._publish)
        self._all_known = trio.Event()
        self._silent: list[int] = []
        """Followers (or rank 0) that have not answered lately."""
        self._gatherings: dict[int, Gathering] = {}
        self._writings: dict[tuple[bytes, ...], Writing] = {}
        """Writes by the keys of their pieces."""
        self._lacking = 0

    async def run(self) -> None:
        """The actor. Ends when the orders end, after the last."""
        await self._give_up_all()
        own_orders, orders = trio.open_memory_channel[DiskOrder](ORDERS)
        own_news, news = trio.open_memory_channel[DiskNews](0)
        async with trio.open_nursery() as gathering:
            gathering.start_soon(self._hear_followers)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_orders, own_orders, gathering)
                nursery.start_soon(self._pass_news, news)
                edges = WriterEdges(orders, own_news, self._own, self._edges.scheduler)
                path, namespace = directory_for(self._card, self._settings), cache_namespace(self._card, self._settings)
                with own_news:
                    await self._disk_writer(edges, path, namespace, self._settings)
            gathering.cancel_scope.cancel(reason="nobody waits for a read any more")

    async def _give_up_all(self) -> None:
        """After a crash: whoever waits must not wait for what is forgotten."""
        tickets, writings = list(self._gatherings), list(self._writings.items())
        self._gatherings.clear()
        self._writings.clear()
        self._silent.clear()
        for ticket in tickets:
            await self._tell(Loaded(ticket, (), 0, 0.0, held=True))
        for keys, writing in writings:
            if writing.nbytes is not None:
                await self._tell(Written(keys, writing.nbytes, refused=True))

    async def _tell(self, news: DiskNews) -> None:
        try:
            await self._edges.news.send(news)
        except trio.BrokenResourceError:  # The scheduler has left, and needs no news.
            return

    # -- orders ----------------------------------------------------------------------------------

    async def _pass_orders(self, own_orders: trio.MemorySendChannel[DiskOrder], gathering: trio.Nursery) -> None:
        with own_orders:
            async for order in self._edges.orders:
                match order:
                    case Read() if self._silent:
                        await self._tell(Loaded(order.ticket, (), 0, 0.0))
                        continue
                    case Read():
                        ranks = self._leader.fetch(Fetch(order.ticket, order.wanted))
                        self._gatherings[order.ticket] = Gathering({0, *ranks})
                        gathering.start_soon(self._gather, order)
                    case Write():
                        await self._forget_old()
                        self._writing(tuple(piece.key for piece in order.pieces)).nbytes = order.nbytes
                    case _:
                        pass
                await own_orders.send(order)

    async def _gather(self, read: Read) -> None:
        gathering, limit_s = self._gatherings[read.ticket], self._limit_s(read)
        with trio.move_on_after(limit_s) as waiting:
            await gathering.complete.wait()
        if self._gatherings.pop(read.ticket, None) is None:
            return
        pieces = gathering.everywhere
        self._lacking += len(gathering.pieces) - len(pieces)
        silent = sorted(gathering.missing)
        self._silent += silent
        self._publish()
        await self._tell(Loaded(read.ticket, pieces, gathering.nbytes, gathering.seconds, held=True))
        if waiting.cancelled_caught and silent:
            log.warning("%s: no answer to a read within %.0f s", _named(silent[0]), limit_s)
            await trio.sleep(PAUSE_S)
            for rank in silent:
                self._silent.remove(rank)
            self._publish()

    def _limit_s(self, read: Read) -> float:
        tokens = sum(piece.payload_tokens for piece in read.wanted)
        snapshots = sum(piece.snapshot for piece in read.wanted)
        nbytes = tokens * self._card.kv.token_bytes + snapshots * self._card.kv.snapshot_bytes
        return ANSWER_S + nbytes / SLOWEST_BYTES_PER_S

    # -- what ranks say --------------------------------------------------------------------------

    async def _pass_news(self, own_news: trio.MemoryReceiveChannel[DiskNews]) -> None:
        async for news in own_news:
            match news:
                case Loaded():
                    self._take_own(news)
                case Written(keys=keys, refused=refused):
                    await self._written(0, keys, refused=refused)
                case Catalogue(whole=True):
                    with trio.move_on_after(KNOWN_S):
                        await self._all_known.wait()
                    await self._tell(news)
                case _:
                    await self._tell(news)

    def _take_own(self, loaded: Loaded) -> None:
        gathering = self._gatherings.get(loaded.ticket)
        if gathering is not None:
            gathering.pieces, gathering.nbytes = loaded.pieces, loaded.nbytes
            gathering.answer(0, loaded.seconds)

    async def _hear_followers(self) -> None:
        async for rank, report in self._leader.disks:
            match report:
                case Fetched():
                    self._take_followers(rank, report)
                case WriteDone(keys=keys, refused=refused):
                    await self._written(rank, keys, refused=refused)
                case Missing(keys=keys):
                    await self._tell(Gone(keys))
                case DirectoryStats():
                    self._publish()
                    if all(stats is not None for stats in self._leader.directories().values()):
                        self._all_known.set()

    def _take_followers(self, rank: int, fetched: Fetched) -> None:
        gathering = self._gatherings.get(fetched.ticket)
        if gathering is not None and rank in gathering.missing:
            shortest = gathering.shortest
            gathering.shortest = fetched.pieces if shortest is None else min(shortest, fetched.pieces)
            gathering.answer(rank, fetched.seconds)

    # -- what all have written ---------------------------------------------------------------------

    def _writing(self, keys: tuple[bytes, ...]) -> Writing:
        """A follower's engine may be ahead of rank 0's, so whoever comes first begins it."""
        if keys not in self._writings:
            self._writings[keys] = Writing({0, *self._leader.directories()}, trio.current_time())
        return self._writings[keys]

    async def _written(self, rank: int, keys: tuple[bytes, ...], *, refused: bool) -> None:
        """Take one rank's answer to a write. A run counts as written when every rank has written it."""
        writing = self._writing(keys)
        writing.missing.discard(rank)
        writing.refused |= refused
        if not writing.missing:
            del self._writings[keys]
            await self._tell(Written(keys, writing.nbytes or 0, writing.refused))

    async def _forget_old(self) -> None:
        """Give up writes that a rank did not answer, or that rank 0 never ordered, within WRITTEN_S."""
        since = trio.current_time() - WRITTEN_S
        for keys, writing in [(keys, one) for keys, one in self._writings.items() if one.since < since]:
            del self._writings[keys]
            if writing.nbytes is not None:
                await self._tell(Written(keys, writing.nbytes, refused=True))

    # -- facts -----------------------------------------------------------------------------------

    def _publish(self) -> None:
        stats = attrs.evolve(self._own.latest, lacking=self._lacking)
        if stats.attached and (reason := self._why_not()):
            stats = attrs.evolve(stats, attached=False, reason=reason)
        self._edges.stats.publish(stats)

    def _why_not(self) -> str:
        """Reason why the disk tier is off; "" if it is on. Rank 0 need not read what a follower cannot."""
        if self._silent:
            return f"{_named(self._silent[0])}: its disk did not answer"
        for rank, stats in self._leader.directories().items():
            if stats is None:
                return f"{_named(rank)} has not looked at its directory yet"
            if not stats.attached:
                return f"{_named(rank)}: {stats.reason}"
        return ""


def _named(rank: int) -> str:
    return f"rank {rank}"
