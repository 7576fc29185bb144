"""The disks of several ranks: what all have counts, and no disk costs anybody more than a block
(R4, F27)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.fakes import FakeEngine, card
from tests.storage.making import ROOT, chain, same
from trouper.actors.ranks.follower_disk import FollowerDisk
from trouper.actors.ranks.leader import Leader
from trouper.actors.ranks.leader_disk import ANSWER_S, PAUSE_S, WRITER_ORDERS, LeaderDisk
from trouper.actors.ranks.rank_handshake import Invitation, shared_flags, versions
from trouper.actors.ranks.rank_link import Link
from trouper.actors.runtime.disk_orders import DiskWriter, WriterEdges
from trouper.actors.ssd_writer import write_to_disk
from trouper.protocol.blocks import BlockData, BlockRef
from trouper.protocol.health import DirectoryStats, SchedulerStats
from trouper.protocol.link import Fetch, Fetched, Heartbeat, Hello, Message, Missing, WriteDone
from trouper.protocol.plans import BlockId, Load, Plan, RowId, Stepped
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.wire import VERSION
from trouper.protocol.work import (
    DiskNews,
    DiskOrder,
    Inspect,
    Loaded,
    Read,
    RemovedFromDisk,
    Run,
    Write,
    Written,
)

PIECES = tuple(chain(4))
WANTED = tuple(BlockRef(one.key, one.tokens, payload=True, snapshot=False) for one in PIECES)
NAMES = Run(
    ROOT, tuple(BlockRef(one.key, one.tokens, True, one.snapshot is not None) for one in PIECES)
)
KEYS = tuple(one.key for one in PIECES)
PAYLOADS = tuple(part for one in PIECES for part in (one.payload, one.snapshot) if part is not None)
WELL, SICK = DirectoryStats(attached=True), DirectoryStats(reason="No space left on device")


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


# -- rank 0 --------------------------------------------------------------------------------------


@attrs.define(eq=False)
class OwnWriter:
    """In the place of rank 0's own: says what it is told to say."""

    orders: list[DiskOrder] = attrs.field(factory=list)
    edges: WriterEdges | None = None

    async def write(self, edges: WriterEdges, *_: Any) -> None:
        self.edges = edges
        edges.stats.publish(WELL)
        async for order in edges.orders:
            self.orders.append(order)

    async def say(self, news: DiskNews) -> None:
        assert self.edges is not None
        await self.edges.news.send(news)


@attrs.define(eq=False)
class Group:
    """Rank 0's disk between a scheduler and two followers that the test plays."""

    own: OwnWriter
    disk: LeaderDisk
    leader: Leader
    links: list[Link]
    orders: trio.MemorySendChannel[DiskOrder]
    news: trio.MemoryReceiveChannel[DiskNews]
    stats: Watch[DirectoryStats]

    async def tell(self, rank: int, message: Message) -> None:
        await self.links[rank - 1].send(message)

    async def beat(self, *directories: DirectoryStats) -> None:
        for rank, stats in enumerate(directories, 1):
            await self.tell(rank, Heartbeat(0, None, stats))
        await wait_all_tasks_blocked()

    async def ask(self, ticket: int) -> list[Message]:
        """What the followers hear of it."""
        await self.orders.send(Read(ticket, WANTED))
        return [await self._heard(link) for link in self.links]

    async def _heard(self, link: Link) -> Message:
        while isinstance(message := await link.receive(), Heartbeat):
            pass
        return message


class HungWriter(OwnWriter):
    """Its disk does not answer: it takes no order."""

    async def write(self, edges: WriterEdges, *_: Any) -> None:
        self.edges = edges
        edges.stats.publish(WELL)
        await trio.sleep_forever()


@asynccontextmanager
async def two_followers(own: OwnWriter | None = None) -> AsyncIterator[Group]:
    own = own or OwnWriter()
    settings = Settings(rank_timeout_s=1e6)
    leader = Leader(settings)
    invitation = Invitation.decode(leader.invite("here", 1))
    orders, orders_in = trio.open_memory_channel[DiskOrder](16)
    news, news_in = trio.open_memory_channel[DiskNews](16)
    stats = Watch(DirectoryStats())
    async with trio.open_nursery() as nursery:
        links = []
        for rank in (1, 2):
            ours, theirs = memory_stream_pair()
            nursery.start_soon(leader.attend, ours)
            link = await Link.authenticate(theirs, invitation.secret, "follower")
            await link.send(Hello(rank, 3, VERSION, shared_flags(settings), versions()))
            links.append(link)
        await leader.gather(3)
        edges = WriterEdges(orders_in, news, stats, Watch(SchedulerStats()))
        disk = LeaderDisk(edges, leader, card(), settings, own.write)
        group = Group(own, disk, leader, links, orders, news_in, stats)
        nursery.start_soon(disk.run)
        await group.beat(WELL, WELL)
        yield group
        assert not leader.lost.is_set(), leader.reason
        nursery.cancel_scope.cancel(reason="the test is over")


@pytest.mark.parametrize(("counts", "everywhere"), [((4, 4), 4), ((4, 2), 2), ((0, 3), 0)])
async def test_a_read_is_what_every_rank_has_at_the_pace_of_the_slowest(
    counts: tuple[int, int], everywhere: int, autojump_clock: MockClock
) -> None:
    async with two_followers() as group:
        assert await group.ask(7) == [Fetch(7, WANTED)] * 2
        await group.own.say(Loaded(7, PIECES, 100, 0.1))
        await group.tell(1, Fetched(7, counts[0], 0.2))
        await wait_all_tasks_blocked()
        with pytest.raises(trio.WouldBlock):
            group.news.receive_nowait()
        await group.tell(2, Fetched(7, counts[1], 0.3))
        loaded = await group.news.receive()
        assert isinstance(loaded, Loaded)
        assert (loaded.ticket, loaded.seconds, loaded.must_settle) == (7, 0.3, True)
        assert same(loaded.blocks, PIECES[:everywhere])
        assert group.stats.latest.lacking == 4 - everywhere


async def test_a_disk_that_does_not_answer_counts_as_nothing_and_is_not_asked_for_a_while(
    autojump_clock: MockClock,
) -> None:
    """F27. Its answer may come later: then nobody waits for it."""
    async with two_followers() as group:
        began = trio.current_time()
        await group.ask(7)
        await group.own.say(Loaded(7, PIECES, 100, 0.1))
        await group.tell(1, Fetched(7, 4, 0.2))
        assert_nothing(await group.news.receive(), 7, held=True)
        assert ANSWER_S <= trio.current_time() - began <= ANSWER_S + 1
        assert (group.stats.latest.attached, group.stats.latest.reason) == (
            False,
            "rank 2: its disk did not answer",
        )
        await group.orders.send(Read(8, WANTED))
        assert_nothing(await group.news.receive(), 8, held=False)
        await group.tell(2, Fetched(7, 4, 30.0))
        await trio.sleep(PAUSE_S + 1)
        assert group.stats.latest.attached
        assert await group.ask(9) == [Fetch(9, WANTED)] * 2


async def test_nobody_waits_behind_the_orders_of_a_disk_that_hangs(
    autojump_clock: MockClock,
) -> None:
    """With several ranks the scheduler has no limit of its own: the answer comes from here."""
    async with two_followers(HungWriter()) as group:
        for _ in range(WRITER_ORDERS + 1):
            await group.orders.send(Inspect())
        await wait_all_tasks_blocked()
        await group.orders.send(Read(7, WANTED))
        await group.orders.send(write := Write(ROOT, PIECES))
        with trio.fail_after(1):
            assert_nothing(await group.news.receive(), 7, held=False)
        for rank in (1, 2):
            await group.tell(rank, WriteDone(KEYS))
        with trio.fail_after(1):
            assert await group.news.receive() == Written(KEYS, write.nbytes, refused=True)


async def test_the_tier_rests_while_one_rank_s_disk_is_off(autojump_clock: MockClock) -> None:
    async with two_followers() as group:
        assert group.stats.latest.attached
        await group.beat(WELL, SICK)
        assert (group.stats.latest.attached, group.stats.latest.reason) == (
            False,
            "rank 2: No space left on device",
        )
        await group.beat(WELL, WELL)
        assert (group.stats.latest.attached, group.stats.latest.reason) == (True, "")


async def test_what_one_rank_could_not_write_is_on_no_disk(autojump_clock: MockClock) -> None:
    """Else rank 0 would read it in vain each time. A follower may be ahead of rank 0, or behind."""
    async with two_followers() as group:
        for refused in (False, True):
            await group.tell(1, WriteDone(KEYS))
            await wait_all_tasks_blocked()
            await group.orders.send(write := Write(ROOT, PIECES))
            await group.own.say(Written(KEYS, write.nbytes))
            await wait_all_tasks_blocked()
            with pytest.raises(trio.WouldBlock):
                group.news.receive_nowait()
            await group.tell(2, WriteDone(KEYS, refused))
            assert await group.news.receive() == Written(KEYS, write.nbytes, refused)
        await group.tell(1, Missing(KEYS[:1]))
        assert await group.news.receive() == RemovedFromDisk(KEYS[:1])


async def test_nobody_waits_for_what_a_crash_forgot(autojump_clock: MockClock) -> None:
    async with two_followers() as group:
        await group.ask(7)
        await group.orders.send(write := Write(ROOT, PIECES))
        await wait_all_tasks_blocked()
        group.disk._silent.append(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group.disk._give_up_all)
            assert_nothing(await group.news.receive(), 7, held=True)
            assert await group.news.receive() == Written(KEYS, write.nbytes, refused=True)
        await group.own.say(Loaded(7, PIECES, 100, 0.1))
        assert await group.ask(8) == [Fetch(8, WANTED)] * 2


def assert_nothing(news: DiskNews, ticket: int, *, held: bool) -> None:
    assert isinstance(news, Loaded)
    assert (news.ticket, news.blocks, news.must_settle) == (ticket, (), held)


# -- a follower ----------------------------------------------------------------------------------


@attrs.define(eq=False)
class Follower:
    told: trio.MemoryReceiveChannel[Message]
    tell: trio.MemorySendChannel[Message]
    disk: FollowerDisk = attrs.field(init=False)

    def post(self, message: Message) -> bool:
        self.tell.send_nowait(message)
        return True

    def plan(self, step: int, **more: Any) -> Plan:
        return self.disk.replay(Plan(step, **more))

    async def keep(self, step: int = 0) -> Message:
        """Its engine has given what a plan persists."""
        self.plan(step, persist=(BlockId(0),), persist_as=NAMES)
        self.disk.take_answer(Stepped(step, persisted=PAYLOADS))
        return await self.told.receive()


@asynccontextmanager
async def a_follower(
    path: Path, disk_writer: DiskWriter = write_to_disk, **settings: Any
) -> AsyncIterator[Follower]:
    tell, told = trio.open_memory_channel[Message](100)
    chosen = Settings(**{"ssd_cache_dir": path, "ssd_keep_free": ByteSize(0), **settings})
    follower = Follower(told, tell)
    memory = FakeEngine().memory
    follower.disk = FollowerDisk(
        card(), chosen, memory, follower.post, lambda: None, disk_writer=disk_writer
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.disk.run)
        yield follower
        follower.disk.close()
        with trio.fail_after(10):
            await follower.disk.ended.wait()


def loads(ticket: int) -> tuple[Load, ...]:
    return tuple(Load(BlockId(place), (), ticket, place) for place in range(len(PIECES)))


def shards(plan: Plan) -> list[BlockData]:
    return [
        attrs.evolve(piece, payload=load.payload)
        for piece, load in zip(PIECES, plan.load, strict=True)
    ]


async def test_it_writes_what_its_own_engine_gives_and_loads_its_own(tmp_path: Path) -> None:
    """Until the ticket is settled it keeps what it has read."""
    async with a_follower(tmp_path / "blocks") as follower:
        assert await follower.keep() == WriteDone(KEYS)
        follower.disk.fetch(Fetch(3, WANTED))
        fetched = await follower.told.receive()
        assert isinstance(fetched, Fetched)
        assert (fetched.ticket, fetched.blocks) == (3, 4)
        for step in (1, 2):
            assert same(shards(follower.plan(step, load=loads(3))), PIECES)
        assert follower.disk._read_bytes > 0
        assert same(shards(follower.plan(3, load=loads(3), settled=(3,))), PIECES)
        assert follower.disk._read_bytes == 0
        assert follower.disk.stats is not None
        assert (follower.disk.stats.attached, follower.disk.stats.read_files) == (True, 1)


async def test_its_janitor_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is supervised, so a crash of it would be in the log and nowhere else."""
    async with a_follower(tmp_path / "blocks") as follower:
        await follower.keep()
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


async def test_f9_what_was_written_for_other_weights_is_not_there(tmp_path: Path) -> None:
    async with a_follower(tmp_path / "blocks") as follower:
        await follower.keep()
    async with a_follower(tmp_path / "blocks", block_size=32) as other:
        other.disk.fetch(Fetch(3, WANTED))
        fetched = await other.told.receive()
        assert isinstance(fetched, Fetched)
        assert (fetched.ticket, fetched.blocks) == (3, 0)


async def test_it_holds_no_more_than_could_become_blocks(tmp_path: Path) -> None:
    """One piece has 64 bytes without its snapshot."""
    async with a_follower(tmp_path / "blocks", cache_memory=ByteSize(64 * 5)) as follower:
        await follower.keep()
        counts = []
        for ticket in (1, 2, 3):
            follower.disk.fetch(Fetch(ticket, WANTED))
            counts.append(await follower.told.receive())
            if ticket == 2:
                follower.plan(1, settled=(1, 2))
        assert [one.blocks for one in counts if isinstance(one, Fetched)] == [4, 1, 4]


async def test_what_is_settled_before_it_was_read_is_not_kept(tmp_path: Path) -> None:
    """Rank 0 did not wait for it."""
    async with a_follower(tmp_path / "blocks") as follower:
        await follower.keep()
        follower.disk.fetch(Fetch(1, WANTED))
        follower.plan(1, settled=(1,))
        follower.disk.fetch(Fetch(2, WANTED))
        fetched = await follower.told.receive()
        assert isinstance(fetched, Fetched)
        assert fetched.ticket == 2
        assert set(follower.disk._reads) == {2}


async def test_a_sick_disk_answers_nothing_at_once(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_text("a file where the directory should be")
    async with a_follower(path) as follower:
        follower.disk.fetch(Fetch(3, WANTED))
        assert await follower.told.receive() == Fetched(3, 0, 0.0)
        assert await follower.keep() == WriteDone(KEYS, refused=True)
        assert follower.disk.stats is not None
        assert not follower.disk.stats.attached
        assert follower.disk.stats.reason


async def test_a_writer_that_crashes_for_good_leaves_the_rank_without_a_disk(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def crash(edges: WriterEdges, *_: Any) -> None:
        await edges.orders.receive()
        raise ZeroDivisionError("a bug in the writer")

    async with a_follower(tmp_path / "blocks", crash) as follower:
        for ticket in range(6):
            follower.disk.fetch(Fetch(ticket, WANTED))
            assert await follower.told.receive() == Fetched(ticket, 0, 0.0)
        assert await follower.keep() == WriteDone(KEYS, refused=True)
        assert follower.disk.stats is not None
        assert (
            follower.disk.stats.reason
            == "its writer has crashed too often: ZeroDivisionError: a bug in the writer"
        )


async def test_writes_rest_while_rows_decode(tmp_path: Path) -> None:
    """What a follower's writer and janitor know of the scheduler follows from the plans."""
    async with a_follower(tmp_path / "blocks") as follower:
        seen = []
        for plan in (
            Plan(0),
            Plan(1, decode=(RowId(0),)),
            Plan(2, decode=(RowId(0),)),
            Plan(3, drop=(RowId(0),)),
        ):
            follower.disk.replay(plan)
            seen.append(follower.disk._scheduler.latest.active_sequences)
        assert seen == [0, 1, 1, 0]
