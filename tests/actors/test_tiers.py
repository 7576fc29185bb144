"""The scheduler's side of the disk: what it asks for, how much is on its way, and what becomes of
what did not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from math import inf

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.policy.test_prefix_cache import Played
from trouper.actors.runtime.channels import offer
from trouper.actors.scheduling.disk_tier import (
    ANSWER_S,
    BACKLOG_BYTES,
    FIRST_BYTES_PER_S,
    RUN_BYTES,
    DiskTier,
)
from trouper.actors.scheduling.prefix_cache import Found
from trouper.actors.scheduling.tree_node import token_bytes
from trouper.protocol.blocks import BlockData, Tensor, Tensors
from trouper.protocol.health import DirectoryStats
from trouper.protocol.kv import KvLayout
from trouper.protocol.plans import RowId
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.watch import Watch
from trouper.protocol.work import Announce, DiskOrder, Loaded, OrdersForgotten, Read, Write, Written

HEAVY = KvLayout(token_bytes=2**20)
TEXT = tuple(range(1, 241))
"""240 MiB of KV: more than may be on its way at a time."""


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


@attrs.define(eq=False)
class Bench:
    played: Played
    tier: DiskTier
    directory: Watch[DirectoryStats]
    orders: trio.MemoryReceiveChannel[DiskOrder]

    def ordered(self) -> list[DiskOrder]:
        found = list[DiskOrder]()
        while True:
            try:
                found.append(self.orders.receive_nowait())
            except trio.WouldBlock:
                return found

    def look(self, tokens: tuple[int, ...] = (*TEXT, 500)) -> Found:
        return self.played.cache.look(self.played.cache.chain(token_bytes(tokens), ""))


@contextmanager
def tier(capacity: int = 100, *, attached: bool = True) -> Iterator[Bench]:
    """A cache that holds TEXT, and a disk that is there or not."""
    played = Played.of(HEAVY, cache_memory=ByteSize(2**40))
    played.cache.saves = True
    played.begin(TEXT)
    played.leave(RowId(0))
    directory = Watch(DirectoryStats(attached=attached))
    orders, taken = trio.open_memory_channel[DiskOrder](capacity)
    with orders, taken:
        bench = Bench(
            played,
            DiskTier(
                partial(offer, orders), directory, lambda: None, played.cache, trio.current_time
            ),
            directory,
            taken,
        )
        assert bench.ordered() == [Announce()]
        yield bench


def payload(tokens: int) -> Tensors:
    return (Tensor("I32", (tokens,), bytes(4 * tokens)),)


def picked(bench: Bench) -> int:
    """Bytes of one run that the next plan would give back; 0: none."""
    blocks, run = bench.tier.pick()
    assert bool(blocks) == (run is not None)
    return (
        0
        if run is None
        else sum(len(piece.tokens) // 4 for piece in run.blocks) * HEAVY.token_bytes
    )


def on_disk(bench: Bench) -> None:
    """TEXT was written, and is nowhere else any more."""
    while (saving := bench.played.cache.writes.next_run(10**12)) is not None:
        bench.played.cache.saved([piece.key for piece in saving.run.blocks], refused=False)
    bench.played.cache.evict(10**12)
    assert bench.look().missing_tokens == len(TEXT)


async def test_no_more_is_on_its_way_than_the_disk_may_be_behind() -> None:
    with tier() as bench:
        runs = [picked(bench) for _ in range(8)]
        assert all(0 < size <= RUN_BYTES for size in runs[:4])
        assert sum(runs) <= BACKLOG_BYTES and runs[4:] == [0] * 4
        assert bench.tier.busy
        bench.tier.hear(Written((), runs[0]))
        assert picked(bench) > 0, "there is room again"


async def test_what_the_writer_had_no_room_for_is_not_on_its_way() -> None:
    """Nor is it taken for written: it can be asked for again."""
    with tier(capacity=1) as bench:
        bench.tier._send(Announce())
        blocks, run = bench.tier.pick()
        assert run is not None
        bench.tier.persisted(tuple(payload(4) for _ in blocks))
        assert not bench.tier.busy
        bench.played.cache.evict(10**12)
        assert bench.look().missing_tokens == 0


async def test_what_was_asked_of_the_engine_is_written() -> None:
    with tier() as bench:
        blocks, run = bench.tier.pick()
        assert run is not None
        bench.tier.persisted(tuple(payload(4) for _ in blocks))
        [order] = bench.ordered()
        assert isinstance(order, Write) and order.parent == run.parent
        assert [piece.key for piece in order.blocks] == [piece.key for piece in run.blocks]


async def test_a_disk_that_is_off_is_asked_for_nothing() -> None:
    with tier() as bench:
        on_disk(bench)
        bench.directory.publish(DirectoryStats(attached=False))
        assert bench.tier.load(bench.look(), 0.0) is None
        assert bench.tier.pick() == ((), None)
        assert bench.ordered() == []
        bench.directory.publish(DirectoryStats(attached=True))
        assert bench.tier.load(bench.look(), 0.0) is not None
        [order] = bench.ordered()
        assert isinstance(order, Read) and b"".join(
            one.tokens for one in order.blocks
        ) == token_bytes(TEXT)


@pytest.mark.parametrize("came", [0, 1, 60])
async def test_what_did_not_come_is_not_asked_for_again_and_nothing_stays_pinned(
    came: int, autojump_clock: MockClock
) -> None:
    with tier() as bench:
        on_disk(bench)
        ticket = bench.tier.load(bench.look(), 0.0)
        assert ticket is not None
        assert any(node.pins for node in ticket.pinned)
        pieces = tuple(
            BlockData(one.key, one.tokens, payload(4)) for one in ticket.requested[:came]
        )
        loads = bench.tier.hear(Loaded(ticket.number, pieces, 100, 0.1))
        assert [load.index for load in loads] == [*range(came)]
        bench.played.cache.freed()
        assert (ticket.done, ticket.read_tokens) == (True, 4 * came)
        assert not any(node.pins for node in ticket.pinned)
        found = bench.look()
        assert (found.tokens, found.missing_tokens) == (4 * came, 0)


@pytest.mark.parametrize("cuts", [(1, 60), (20, 40, 60), (0, 30), (5,)])
async def test_parts_become_blocks_one_after_another_and_the_last_ends_the_read(
    cuts: tuple[int, ...], autojump_clock: MockClock
) -> None:
    with tier() as bench:
        on_disk(bench)
        ticket = bench.tier.load(bench.look(), 0.0)
        assert ticket is not None
        pieces = tuple(BlockData(one.key, one.tokens, payload(4)) for one in ticket.requested)
        for start, end in pairwise((0, *cuts)):
            assert not ticket.done and all(node.pins for node in ticket.pinned)
            loads = bench.tier.hear(
                Loaded(ticket.number, pieces[start:end], 2**19, 0.1, complete=False)
            )
            assert (len(loads), ticket.read_tokens) == (end - start, 4 * end)
            bench.played.cache.freed()
        assert bench.tier.hear(Loaded(ticket.number, (), 2**20, 0.1)) == []
        assert (ticket.done, ticket.read_tokens) == (True, 4 * cuts[-1])
        assert not any(node.pins for node in ticket.pinned)
        found = bench.look()
        assert (found.tokens, found.missing_tokens) == (4 * cuts[-1], 0)
        bench.played.cache.evict(10**12)
        assert bench.look().missing_tokens == 4 * cuts[-1], (
            "what any part brought is still known to be on disk"
        )
        assert bench.tier._speed.bytes_per_s < FIRST_BYTES_PER_S, (
            "the parts' sizes and durations are added"
        )


async def test_a_part_behind_a_block_without_room_is_left_out(autojump_clock: MockClock) -> None:
    with tier() as bench:
        on_disk(bench)
        ticket = bench.tier.load(bench.look(), 0.0)
        assert ticket is not None
        pieces = tuple(BlockData(one.key, one.tokens, payload(4)) for one in ticket.requested)
        loads = bench.tier.hear(Loaded(ticket.number, pieces[:5], 100, 0.1, complete=False))
        loads += bench.tier.hear(Loaded(ticket.number, pieces[6:], 100, 0.1))
        assert len(loads) == 5
        assert bench.look().tokens == 20


async def test_who_left_pins_nothing(autojump_clock: MockClock) -> None:
    with tier() as bench:
        on_disk(bench)
        ticket = bench.tier.load(bench.look(), 0.0)
        assert ticket is not None
        bench.tier.forget(ticket.number)
        assert not any(node.pins for node in ticket.pinned)
        assert bench.tier.hear(Loaded(ticket.number, (), 0, 0.1)) == []
        assert bench.look().missing_tokens == len(TEXT), "it may be asked for again"


async def test_the_limit_of_a_disk_that_has_one_of_its_own_is_not_ours(
    autojump_clock: MockClock,
) -> None:
    with tier() as bench:
        on_disk(bench)
        for limit_s, given_up in ((inf, False), (ANSWER_S, True)):
            bench.tier._answer_s = limit_s
            ticket = bench.tier.load(bench.look(), 0.0)
            assert ticket is not None
            await trio.sleep(10 * ANSWER_S)
            bench.tier.give_up_silent()
            assert ticket.done == given_up
            bench.tier.forget(ticket.number)


async def test_what_a_crash_of_the_writer_forgot_is_neither_awaited_nor_lost(
    autojump_clock: MockClock,
) -> None:
    """What was sent may be written again; what a plan in flight brings still is; the catalogue
    comes again."""
    with tier() as bench:
        blocks, run = bench.tier.pick()
        assert run is not None
        bench.tier.persisted(tuple(payload(4) for _ in blocks))
        still, coming = bench.tier.pick()
        assert coming is not None
        bench.ordered()
        bench.tier.hear(OrdersForgotten())
        assert bench.ordered() == [Announce()]
        bench.tier.persisted(tuple(payload(4) for _ in still))
        [order] = bench.ordered()
        assert isinstance(order, Write)
        bench.tier.hear(Written(tuple(one.key for one in order.blocks), order.nbytes))
        assert not bench.tier.busy
        nodes = [
            node
            for node in bench.played.cache.tree.nodes()
            if node.key in {ref.key for ref in run.blocks}
        ]
        bench.played.cache.writes.add(max(nodes, key=lambda node: node.end))
        again = set[bytes]()
        while (pending := bench.played.cache.writes.next_run(10**12)) is not None:
            again |= {ref.key for ref in pending.run.blocks}
        assert {ref.key for ref in run.blocks} <= again
