"""Who enters, who leaves and who goes first when memory or rows are short: the core with an engine
that answers at once."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.worlds import CoreWorld, RecordingClient
from tests.fakes import card
from trouper.actors.scheduling.allocation_failures import AllocationFailures
from trouper.actors.scheduling.kv_memory import (
    ACTIVATION_BYTES,
    MemoryBudget,
    step_bytes,
    too_long,
)
from trouper.protocol.health import NO_ADAPTERS, AdapterStats, MemoryStatus
from trouper.protocol.kv import KvLayout
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Failed
from trouper.protocol.requests import BATCH_PRIORITY, Generate, TokenPrompt
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import Settings

KV = KvLayout(token_bytes=100, capacity_step=1, first_bank=0)
"""Rows count as many tokens as they hold, up to 8."""
PROMPT = tuple(range(1, 9))


def world(tokens: int | None, **settings: Any) -> CoreWorld:
    """Memory for so many tokens, no cache, eight rows."""
    usual = {
        "kv_memory": None if tokens is None else ByteSize(100 * tokens),
        "completion_batch_size": 8,
        "no_ssd": True,
        "prefill_batch_size": 8,
        "prefill_step_size": 64,
        "max_queue_size": 50,
        "priority_max_wait_s": 60.0,
        "cache_memory": ByteSize(0),
        "speculation": "off",
        "batch_min_rows": 1,
    }
    return CoreWorld(1, **({"kv": KV} | usual | settings))


def ask(
    asked: CoreWorld, count: int = 1, max_tokens: int = 8, **more: Any
) -> list[RecordingClient]:
    """Prompts of eight tokens, all different."""
    first = len(asked.clients)
    return [
        asked.ask((first + place + 1, *PROMPT[1:]), max_tokens, **more) for place in range(count)
    ]


def run(asked: CoreWorld, steps: int = 1) -> None:
    for _ in range(steps):
        asked.step()


def finish(asked: CoreWorld) -> None:
    asked.core.close()
    while asked.step():
        pass
    asked.check_end()


def running(asked: CoreWorld) -> list[str]:
    return sorted(row.request.request_id for row in asked.core._batch.rows.values())


def problem_of(client: RecordingClient) -> Problem | None:
    end = client.terminal[0] if client.terminal else None
    return end.problem if isinstance(end, Failed) else None


def pauses(client: RecordingClient) -> list[bool]:
    return [progress.preempted for progress in client.progress]


def preempted(asked: CoreWorld) -> int:
    return asked.watches.stats.latest.preemptions


def test_admission_asks_for_the_prompt_and_not_for_the_longest_answer() -> None:
    three = world(34)
    ask(three, 4, max_tokens=24)
    run(three)
    assert running(three) == ["0", "1", "2"]
    finish(three)
    assert [len(client.tokens) for client in three.clients] == [24] * 4
    assert preempted(three) > 0


def test_rows_leave_room_for_a_step_of_the_encoder_or_of_prefill() -> None:
    """One of them runs at a time."""
    settings = Settings(prefill_step_size=64)
    plain, small, large = (
        step_bytes(attrs.evolve(card(), encoder_step_bytes=nbytes), settings)
        for nbytes in (0, 10**6, 10**9)
    )
    assert plain == small
    assert large == plain + 10**9 - 64 * ACTIVATION_BYTES


def test_without_a_limit_everybody_enters() -> None:
    free = world(None)
    ask(free, 8, max_tokens=40)
    run(free)
    assert len(running(free)) == 8
    finish(free)
    assert (preempted(free), free.watches.stats.latest.kv_limit_bytes) == (0, 0)


def test_the_youngest_leaves_and_returns_before_those_that_wait() -> None:
    small = world(30)
    old, young, waits = ask(small, 3, max_tokens=14)
    while not preempted(small):
        run(small)
    assert running(small) == ["0"]
    assert [sequence.request.request_id for sequence in small.core._queue] == ["1", "2"]
    assert pauses(young)[-1]
    finish(small)
    assert pauses(young).count(True) == 1
    assert not pauses(young)[-1]
    assert not any(pauses(old))
    assert old.tokens and waits.tokens


def test_of_the_lowest_priority_one_leaves_first() -> None:
    small = world(30)
    ask(small, priority=5, max_tokens=20)
    ask(small, 2, max_tokens=20)
    while not preempted(small):
        run(small)
    assert "0" not in running(small)
    finish(small)


def test_a_row_alone_is_never_preempted() -> None:
    small = world(40)
    ask(small, max_tokens=32)
    finish(small)
    assert (preempted(small), len(small.clients[0].tokens)) == (0, 32)


def test_a_prompt_that_never_fits_is_refused_and_others_are_shortened() -> None:
    small = world(16)
    refused = small.ask(tuple(range(1, 17)), 1)
    told = problem_of(refused)
    assert told is not None
    assert (told.status, told.param, told.code) == (400, "prompt", "context_length_exceeded")
    message = told.message
    assert "maximum context length is 16 tokens (all that --kv-memory" in message
    assert "requested 17 tokens (16 in the prompt, 1 in the completion)" in message
    [shortened] = ask(small, max_tokens=20)
    assert shortened.max_tokens == 8
    finish(small)
    assert len(shortened.tokens) == 8


@pytest.mark.parametrize("tokens", [0, 1])
def test_where_no_prompt_fits_it_is_the_limit_that_has_to_change(tokens: int) -> None:
    """`tokens`: of one row in all. The remedy was "shorten the prompt to 0 tokens"."""
    request = Generate(request_id="r", prompt=TokenPrompt((1, 2, 3)))
    assert too_long(request, 3, tokens).message.endswith("No request fits: raise the limit.")
    assert too_long(request, 3, 2).message.endswith(
        "reduce the length of the prompt or completion."
    )


def test_a_higher_priority_gets_the_memory_of_a_lower_one() -> None:
    small = world(30)
    ask(small, 2, max_tokens=12, priority=1)
    run(small, 2)
    assert running(small) == ["0", "1"]
    ask(small, max_tokens=4, priority=0)
    run(small)
    assert running(small) == ["0", "2"]
    finish(small)
    assert preempted(small) >= 1


def test_nobody_leaves_for_a_request_that_cannot_enter_even_then() -> None:
    small = world(40)
    ask(small, max_tokens=6, priority=0)
    ask(small, max_tokens=6, priority=1)
    run(small, 2)
    small.ask(tuple(range(1, 32)), 1, priority=0)
    run(small)
    assert running(small) == ["0", "1"]
    finish(small)
    assert preempted(small) <= 1


def test_an_equal_priority_waits() -> None:
    small = world(30)
    ask(small, 2, max_tokens=3)
    run(small, 1)
    ask(small, max_tokens=4)
    run(small)
    assert running(small) == ["0", "1"]
    finish(small)
    assert preempted(small) == 0


def test_a_long_prompt_that_does_not_fit_is_not_overtaken() -> None:
    small = world(30)
    ask(small, max_tokens=12)
    run(small, 2)
    small.ask(tuple(range(1, 26)), 2)
    ask(small, 1, max_tokens=2)
    run(small)
    assert running(small) == ["0"]
    finish(small)


def test_a_preempted_one_needs_more_room_to_return() -> None:
    """Else it would be preempted again by the next token."""
    small = world(64, completion_batch_size=2)
    ask(small, 2, max_tokens=50)
    finish(small)
    assert 1 <= preempted(small) <= 3


@pytest.mark.parametrize(("step_s", "retry_s"), [(0.01, 1), (1.0, 12), (9.0, 60)])
def test_a_full_queue_is_tried_again_when_half_of_it_has_entered(
    step_s: float, retry_s: int
) -> None:
    """One row, of about ten steps a request, and four that wait."""
    full = world(None, completion_batch_size=1, max_queue_size=4)
    ask(full, 4)
    while len(full.core._queue) > 1:
        run(full)
        full.now += step_s
    *_, late = ask(full, 4)
    problem = problem_of(late)
    assert problem is not None and problem.code == "queue_full"
    assert problem.retry_after_s == pytest.approx(retry_s, rel=0.3)
    assert f"in {problem.retry_after_s} s" in problem.message
    finish(full)


@given(st.integers(1, 30), st.integers(0, 8))
def test_no_priority_waits_for_ever(wait_steps: int, distance: int) -> None:
    """A request of a higher priority arrives with each step. The bound: --priority-max-wait-s, and
    the answer that runs then."""
    busy = world(None, completion_batch_size=1, priority_max_wait_s=wait_steps / 100)
    ask(busy, max_tokens=2)
    [low] = ask(busy, max_tokens=2, priority=distance + 1)
    steps = 0
    while not low.tokens:
        ask(busy, max_tokens=2, priority=0)
        run(busy)
        steps += 1
        assert steps < wait_steps + 12
    assert steps >= wait_steps
    for client in busy.clients:
        client.aborted = True
    finish(busy)


def test_without_the_bound_the_lower_one_waits() -> None:
    busy = world(None, completion_batch_size=1, priority_max_wait_s=0.0)
    ask(busy, max_tokens=2)
    [low] = ask(busy, max_tokens=2, priority=1)
    for _ in range(40):
        ask(busy, max_tokens=2, priority=0)
        run(busy)
    assert not low.tokens
    for client in busy.clients:
        client.aborted = True
    finish(busy)


def test_requests_of_batches_take_no_room_in_the_queue_and_are_not_refused() -> None:
    full = world(None, completion_batch_size=1, max_queue_size=2)
    ask(full)
    run(full)
    batches = ask(full, 3, priority=BATCH_PRIORITY)
    clients = ask(full, 3)
    late = ask(full, 1, priority=BATCH_PRIORITY)
    assert [client.terminal == [] for client in (*batches, *clients, *late)] == [True] * 5 + [
        False,
        True,
    ]
    assert (problem := problem_of(clients[-1])) is not None and problem.code == "queue_full"
    finish(full)


@pytest.mark.parametrize("streams", [0, 3])
def test_a_short_prompt_does_not_wait_for_a_long_prefill(streams: int) -> None:
    """It gets its share of the first step that is composed after it arrived, beside decode or not,
    and the long one gets on."""
    shared = world(None)
    ask(shared, streams, max_tokens=200)
    run(shared, 2)
    long = shared.ask(tuple(1 + place % 80 for place in range(5000)), 2)
    run(shared, 4)
    [short] = ask(shared, max_tokens=2)
    run(shared, 4)
    assert short.tokens and not long.tokens
    [row] = [row for row in shared.core._batch.rows.values() if row.client is long]
    before = row.num_computed_tokens
    for _ in range(10):
        ask(shared, max_tokens=1)
        run(shared)
    assert row.num_computed_tokens - before >= 10 * 8, "short prompts take their shares and no more"
    finish(shared)


def limit_of(memory: MemoryStatus, **settings: Any) -> int | None:
    asked = world(None, memory_fraction=0.5, **settings)
    asked.watches.memory.publish(memory)
    return asked.core._budget.limit_bytes


def test_the_limit_is_what_the_device_leaves() -> None:
    asked = world(None)
    margin = asked.core._budget.margin_bytes
    assert margin > 64 * 2**17
    assert limit_of(MemoryStatus(limit_bytes=0)) is None, "nothing is known"
    assert limit_of(MemoryStatus(limit_bytes=10 * margin)) == 4 * margin
    assert limit_of(MemoryStatus(limit_bytes=10 * margin, fixed_bytes=margin)) == 3 * margin
    assert limit_of(MemoryStatus(limit_bytes=margin)) is None, (
        "an estimate that leaves nothing is of no use"
    )
    assert limit_of(MemoryStatus(limit_bytes=10 * margin), kv_memory=ByteSize(7)) == 7
    assert (
        limit_of(MemoryStatus(limit_bytes=10 * margin), kv_memory=ByteSize(5 * margin))
        == 4 * margin
    )


def test_adapters_that_come_and_go_are_taken_from_rows() -> None:
    asked = world(None, memory_fraction=0.5)
    margin = asked.core._budget.margin_bytes
    for fixed, left in ((0, 4), (margin, 3)):
        asked.watches.memory.publish(MemoryStatus(limit_bytes=10 * margin, fixed_bytes=fixed))
        for adapters in (
            AdapterStats(held_bytes=10),
            AdapterStats(held_bytes=4, reserved_bytes=6),
            NO_ADAPTERS,
        ):
            asked.watches.adapters.publish(adapters)
            assert asked.core._budget.limit_bytes == left * margin - adapters.nbytes


def test_models_of_one_process_share_the_device_equally() -> None:
    def limit(sharers: int) -> int:
        watches = world(None).watches
        watches.memory.publish(MemoryStatus(limit_bytes=2**40))
        shared = attrs.evolve(card(kv=KV), memory_sharers=sharers)
        budget = MemoryBudget.of(
            shared, Settings(memory_fraction=0.5), watches, AllocationFailures()
        )
        assert budget.limit_bytes is not None
        return budget.limit_bytes

    assert [limit(sharers) for sharers in (2, 3)] == [limit(1) // 2, limit(1) // 3]


@pytest.mark.parametrize(("speculation", "enter"), [("off", 4), ("ngram", 2)])
def test_states_of_before_count_where_rows_may_draft(speculation: str, enter: int) -> None:
    """Each row has 8 tokens to 100 bytes, and may keep states of 800 bytes."""
    kv = attrs.evolve(KV, draft_state_bytes=800)
    asked = world(44, speculation=speculation, kv=kv)
    ask(asked, 4, max_tokens=3)
    run(asked)
    assert len(running(asked)) == enter
    finish(asked)


def test_rows_of_which_nothing_is_cached_are_bounded() -> None:
    short = world(44, kv=attrs.evolve(KV, cached=False))
    ask(short, 4, max_tokens=20)
    run(short, 9)
    assert (len(running(short)), preempted(short)) == (2, 2)
    finish(short)


def test_what_a_model_keeps_may_be_unknown() -> None:
    asked = CoreWorld(1, kv=KvLayout(cached=False), kv_memory=ByteSize(1000))
    assert asked.core._budget.limit_bytes is None


@pytest.mark.parametrize(
    ("tokens", "stay", "in_all"),
    [(30, ["0", "1"], 5), (1, ["0"], 3)],
    ids=["room for two", "room for none"],
)
def test_memory_that_shrinks_makes_rows_leave_but_for_the_last_one(
    tokens: int, stay: list[str], in_all: int
) -> None:
    """Where there is room for none, the others run one after another, and leave no second time."""
    asked = world(None)
    margin = asked.core._budget.margin_bytes
    asked.watches.memory.publish(MemoryStatus(limit_bytes=10 * margin))
    ask(asked, 4, max_tokens=20)
    run(asked, 3)
    fixed = 8 * margin - KV.token_bytes * tokens
    asked.watches.memory.publish(MemoryStatus(limit_bytes=10 * margin, fixed_bytes=fixed))
    run(asked, 2)
    assert (running(asked), preempted(asked)) == (stay, 4 - len(stay))
    finish(asked)
    assert preempted(asked) == in_all


def order(asked: CoreWorld, now: float) -> Ordered[str]:
    return [sequence.request.request_id for sequence in asked.core._queue.ordered(now)]


@given(st.lists(st.tuples(st.integers(-2, 2), st.floats(0, 10)), max_size=8), st.floats(0.1, 5))
def test_the_order_of_the_queue(arrivals: list[tuple[int, float]], bound: float) -> None:
    """Overdue ones by arrival; then the others by priority, and by arrival."""
    asked = world(None, priority_max_wait_s=bound)
    arrivals.sort(key=lambda arrival: arrival[1])
    for priority, at in arrivals:
        asked.now = at
        ask(asked, priority=priority)
    numbered = [(place, priority, at) for place, (priority, at) in enumerate(arrivals)]
    several = len({priority for priority, _ in arrivals}) > 1
    late = [
        place
        for place, _, at in sorted(numbered, key=lambda one: (one[2], one[1]))
        if several and 10 - at > bound
    ]
    others = [
        place for place, _, _ in sorted(numbered, key=lambda one: one[1]) if place not in late
    ]
    assert order(asked, 10.0) == [str(place) for place in (*late, *others)]
    for client in asked.clients:
        client.aborted = True
    finish(asked)


def test_rows_leave_for_the_systems_memory_pressure_and_return_after_it() -> None:
    asked = world(None)
    clients = ask(asked, 4, max_tokens=8)
    run(asked, 2)
    assert len(running(asked)) == 4
    asked.watches.memory.publish(
        MemoryStatus(limit_bytes=2**40, pressure="critical", pressure_bound_bytes=3500)
    )
    run(asked)
    assert 1 < len(running(asked)) < 4
    asked.watches.memory.publish(
        MemoryStatus(limit_bytes=2**40, pressure="critical", pressure_bound_bytes=1)
    )
    run(asked)
    assert len(running(asked)) == 1, "the last one goes on"
    asked.watches.memory.publish(MemoryStatus(limit_bytes=2**40, pressure="normal"))
    run(asked, 2)
    assert len(running(asked)) == 4
    finish(asked)
    assert all(problem_of(client) is None for client in clients) and preempted(asked) == 3
