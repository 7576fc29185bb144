"""Rows of a lower priority make way where memory is short: for rows that grow and for rows of one
size, beside others and alone."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_memory import KV, ask, finish, preempted, run, running, world
from tests.core.worlds import CoreWorld, RecordingClient
from trouper.protocol.health import MemoryStatus
from trouper.protocol.kv import KvLayout

RECURRENT = KvLayout(snapshot_bytes=800, draft_state_bytes=2400, capacity_step=1, first_bank=0)
"""A row takes as much as eight tokens of `KV`, whatever its length, and four times that while rows
draft."""
STEPS = 4
"""Two plans are in flight when a request comes; the third prefills it, and the fourth step reads
its token."""


def steps_to(client: RecordingClient, among: CoreWorld) -> int:
    """Number of steps until a client has its first token."""
    steps = 0
    while not client.tokens:
        assert not client.terminal, client.terminal
        run(among)
        steps += 1
    return steps


def test_a_lower_row_leaves_for_a_prompt_that_fits_only_alone() -> None:
    """Its row takes all of the memory, and to enter beside another it would leave a 64th free. It
    waited for the lower row's last token."""
    small = world(192)
    [low] = ask(small, max_tokens=100, priority=1)
    run(small, 3)
    high = small.ask(tuple(1 + place % 80 for place in range(190)), 1, priority=0)
    assert steps_to(high, small) <= STEPS + 190 // 64
    assert preempted(small) == 1
    finish(small)
    assert len(low.tokens) == 100


@pytest.mark.parametrize("kv", [KV, RECURRENT], ids=["rows that grow", "rows of one size"])
def test_a_lower_row_leaves_where_memory_holds_no_row(kv: KvLayout) -> None:
    """The system's memory was short: rows run one at a time, whatever their priority."""
    pressed = world(None, kv=kv)
    pressed.watches.memory.publish(MemoryStatus(limit_bytes=2**40, pressure_bound_bytes=1))
    [low] = ask(pressed, max_tokens=100, priority=1)
    run(pressed, 3)
    [high] = ask(pressed, max_tokens=8, priority=0)
    [equal] = ask(pressed, max_tokens=1, priority=0)
    assert steps_to(high, pressed) <= STEPS
    assert preempted(pressed) == 1
    finish(pressed)
    assert preempted(pressed) == 1, "an equal one waits"
    assert len(low.tokens) == 100 and equal.tokens


@given(
    kv=st.sampled_from(
        [KV, RECURRENT, attrs.evolve(KV, snapshot_bytes=300, draft_state_bytes=500)]
    ),
    bound=st.integers(1, 15_000),
    speculation=st.sampled_from(["off", "ngram"]),
    priorities=st.lists(st.integers(1, 3), min_size=1, max_size=7),
    begun=st.integers(1, 12),
)
def test_rows_of_lower_priorities_are_never_waited_for(
    kv: KvLayout, bound: int, speculation: str, priorities: list[int], begun: int
) -> None:
    """However many rows memory holds, none among them (a bound that lasts minutes refuses no
    request)."""
    small = world(None, kv=kv, speculation=speculation)
    small.watches.memory.publish(MemoryStatus(limit_bytes=2**40, pressure_bound_bytes=bound))
    for priority in priorities:
        ask(small, max_tokens=60, priority=priority)
    run(small, begun)
    [high] = ask(small, max_tokens=1, priority=0)
    assert steps_to(high, small) <= STEPS
    for client in small.clients:
        client.aborted = True
    finish(small)


def test_nobody_leaves_for_a_request_whose_drafts_have_no_room() -> None:
    """It would fit beside the equal row if neither kept the states that drafts need. A lower row
    left for it, and it waited all the same."""
    small = world(60, kv=RECURRENT)
    [equal] = ask(small, max_tokens=20, priority=0)
    ask(small, 6, max_tokens=20, priority=1)
    run(small, 2)
    assert len(running(small)) == 7
    [high] = ask(small, max_tokens=2, priority=0, speculation="ngram")
    run(small, 3)
    assert (len(running(small)), preempted(small)) == (7, 0)
    finish(small)
    assert equal.tokens and high.tokens


@pytest.mark.parametrize("bound", [0, 4200, 6000])
def test_where_the_device_is_nearly_full_lower_rows_leave_all_or_none(bound: int) -> None:
    """Then only an empty batch takes a request. A row or two left, and it waited until the others
    had ended."""
    full = world(100)
    ask(full, 4, max_tokens=60, priority=1)
    run(full, 3)
    full.watches.memory.publish(
        MemoryStatus(
            limit_bytes=2**40, pressure="warning", under_pressure=True, pressure_bound_bytes=bound
        )
    )
    run(full)
    rows, left = len(running(full)), preempted(full)
    [high] = ask(full, max_tokens=40, priority=0)
    assert steps_to(high, full) <= STEPS
    assert (running(full), preempted(full)) == (["4"], left + rows)
    ask(full, max_tokens=40, priority=1)
    [higher] = ask(full, max_tokens=1, priority=-1)
    assert steps_to(higher, full) <= STEPS
    full.watches.memory.publish(MemoryStatus(limit_bytes=2**40))
    finish(full)


def test_where_the_device_is_nearly_full_nobody_leaves_for_a_request_beside_an_equal_one() -> None:
    full = world(100)
    [equal] = ask(full, max_tokens=20, priority=0)
    ask(full, 3, max_tokens=60, priority=1)
    run(full, 3)
    full.watches.memory.publish(
        MemoryStatus(limit_bytes=2**40, under_pressure=True, pressure_bound_bytes=5200)
    )
    [high] = ask(full, max_tokens=4, priority=0)
    run(full)
    assert (len(running(full)), preempted(full)) == (4, 0)
    steps_to(high, full)
    assert equal.terminal
    full.watches.memory.publish(MemoryStatus(limit_bytes=2**40))
    finish(full)
