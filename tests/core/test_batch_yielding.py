"""Requests of batches yield their rows to others, and go on all the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.test_memory import ask, finish, run, running, world
from tests.core.worlds import CoreWorld, RecordingClient
from trouper.actors.scheduling.preemption import RESUME_S
from trouper.protocol.requests import BATCH_PRIORITY, MAX_PRIORITY
from trouper.protocol.setting_fields import ByteSize

STEP_S = 0.01


def batches(
    asked: CoreWorld, count: int, max_tokens: int = 60, **more: Any
) -> list[RecordingClient]:
    return ask(asked, count, max_tokens, priority=BATCH_PRIORITY, **more)


def names(clients: list[RecordingClient]) -> set[str]:
    return {client.request.request_id for client in clients}


@pytest.mark.parametrize("kept", [1, 3])
def test_another_request_preempts_the_youngest_rows_of_batches_in_the_step_that_it_enters(
    kept: int,
) -> None:
    shared = world(None, batch_min_rows=kept)
    asked = batches(shared, 6)
    run(shared, 4)
    assert {*running(shared)} == names(asked)
    [online] = ask(shared, max_tokens=20)
    run(shared)
    assert {*running(shared)} == names(asked[:kept]) | {online.request.request_id}
    assert [client.progress[-1].preempted for client in asked] == [False] * kept + [True] * (
        6 - kept
    )
    finish(shared)


def test_rows_of_batches_return_when_nobody_was_there_for_a_while() -> None:
    shared = world(None)
    asked = batches(shared, 4, max_tokens=400)
    run(shared, 3)
    [online] = ask(shared, max_tokens=10)
    while not online.closed:
        run(shared)
        assert len({*running(shared)} & names(asked)) <= 1
    for _ in range(int(RESUME_S / STEP_S) - 2):
        run(shared)
        assert {*running(shared)} == {"0"}, (
            "a client that asks again at once preempts nothing again"
        )
    run(shared, 3)
    assert {*running(shared)} == names(asked)
    finish(shared)


def test_a_batch_goes_on_beside_a_stream_that_never_ends() -> None:
    """One row after another, in every step."""
    shared = world(None)
    ask(shared, max_tokens=600)
    asked = batches(shared, 8, max_tokens=60)
    run(shared, 560)
    assert [len(client.terminal) for client in asked] == [1] * 8
    finish(shared)


def test_a_request_need_not_wait_for_a_row_of_a_batch() -> None:
    """Where others need all rows, batches keep none."""
    full = world(None, completion_batch_size=2)
    asked = batches(full, 3)
    run(full, 3)
    assert len(running(full)) == 2
    online = ask(full, 2, max_tokens=10)
    run(full, 2)
    assert {*running(full)} == names(online)
    assert not any(client.terminal for client in asked)
    finish(full)


@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_batches_progress_where_others_need_all_rows(patience: float) -> None:
    """A request of a batch begins each --priority-max-wait-s, and keeps its row to its end; 0: none
    does."""
    full = world(None, completion_batch_size=1, priority_max_wait_s=patience)
    asked = batches(full, 3, max_tokens=5)
    begun: dict[str, float] = {}
    for _ in range(300):
        ask(full, max_tokens=2, priority=MAX_PRIORITY)
        run(full)
        for name in {*running(full)} & names(asked):
            begun.setdefault(name, full.now)
    if patience:
        first, second, third = begun.values()
        assert [*begun] == ["0", "1", "2"]
        assert second - first > patience and third - second > patience
        assert all(client.terminal for client in asked)
    else:
        assert not any(client.terminal for client in asked)
    for client in full.clients[3:]:
        client.aborted = True
    finish(full)


def test_a_prompt_that_would_begin_anew_keeps_its_row() -> None:
    """Nothing of an embedding is cached."""
    shared = world(None)
    [old] = batches(shared, 1)
    long = shared.ask(
        tuple(1 + place % 80 for place in range(300)), 1, priority=BATCH_PRIORITY, embed=True
    )
    run(shared, 2)
    ask(shared, max_tokens=20)
    run(shared)
    assert {*running(shared)} == {"1", "2"}
    assert old.progress[-1].preempted and not long.progress[-1].preempted


def test_without_overdue_requests_a_batch_keeps_no_row() -> None:
    full = world(None, completion_batch_size=1, priority_max_wait_s=0.0)
    [online] = ask(full, max_tokens=5)
    [asked] = batches(full, 1)
    while not online.closed:
        run(full)
    run(full, 3)
    assert {*running(full)} == {asked.request.request_id}
    [late] = ask(full)
    run(full)
    assert {*running(full)} == {late.request.request_id}
    finish(full)


def test_a_batch_keeps_its_row_while_another_request_waits_for_a_prefix() -> None:
    """That one would not take the row: preempted, the batch would be back in the same plan, in each
    step, and never get a token."""
    full = world(
        None,
        completion_batch_size=2,
        prefill_step_size=4,
        cache_memory=ByteSize(10**6),
        block_size=4,
    )
    [asked] = batches(full, 1)
    run(full, 3)
    text = tuple(1 + (at * at + at // 3) % 80 for at in range(200))
    full.ask(text, 4)
    run(full, 3)
    assert len(running(full)) == 2
    before = len(asked.tokens)
    late = full.ask((*text[:150], 5, 6, 7), 4)
    run(full, 20)
    assert [sequence.request.request_id for sequence in full.core._queue] == [
        late.request.request_id
    ]
    assert len(asked.tokens) > before + 15
    assert [progress.preempted for progress in asked.progress].count(True) <= 1
    finish(full)


def test_rows_of_batches_take_no_room_in_the_queue() -> None:
    """Another request has the row of one in the next step, so it does not wait for a row."""
    full = world(None, completion_batch_size=2, max_queue_size=0)
    batches(full, 2)
    run(full, 3)
    taken, other, refused = ask(full, 3)
    assert [len(client.terminal) for client in (taken, other, refused)] == [0, 0, 1]
    finish(full)


def test_a_row_that_leaves_is_free() -> None:
    small = world(None, completion_batch_size=1, max_queue_size=0)
    ask(small, max_tokens=3)
    while not small.core._batch.rows or small.core._batch.num_rows:
        run(small)
    assert running(small) == ["0"]
    [taken] = ask(small)
    assert not taken.terminal
    finish(small)
