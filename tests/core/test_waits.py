"""Why a sequence waits, as the core notes it while the wait lasts."""

from __future__ import annotations

from tests.core.driving import DrivenCore
from tests.core.test_memory import PROMPT, ask, finish, preempted, run, world
from tests.core.worlds import CoreWorld, RecordingClient
from trouper.actors.scheduling.disk_tier import Ticket
from trouper.actors.scheduling.preemption import PATIENCE_S
from trouper.protocol.requests import BATCH_PRIORITY
from trouper.protocol.waits import KEPT, RequestState, WaitReason

STEP_S = 0.01


def standing(client: RecordingClient) -> tuple[RequestState, WaitReason]:
    latest = client.history.latest
    assert latest is not None
    return latest.state, latest.reason


def states(client: RecordingClient) -> list[tuple[RequestState, WaitReason]]:
    return [(one.state, one.reason) for one in client.history.transitions]


def test_a_request_that_waits_for_nothing() -> None:
    alone = world(None)
    [client] = ask(alone)
    finish(alone)
    assert states(client) == [("prefilling", ""), ("decoding", "")]


def test_a_row_decodes_from_its_first_token_on() -> None:
    """The step that computes the last chunk also samples: its time is prefill."""
    core = DrivenCore(disk=False)
    client = core.arrive(100)
    client.history.clock = lambda: core.now
    seen = []
    while not client.tokens:
        core.step()
        [row] = core.watches.batch.latest.rows
        seen.append(row.state)
    core.step()
    [row] = core.watches.batch.latest.rows
    assert {*seen} == {"prefilling"} and row.state == "decoding"
    assert states(client) == [("prefilling", ""), ("decoding", "")]
    assert client.history.transitions[-1].at == row.first_token_at


def test_a_row() -> None:
    full = world(None, completion_batch_size=1)
    [first, second, third] = ask(full, 3)
    run(full, 2)
    assert standing(first) == ("decoding", "")
    assert standing(second) == standing(third) == ("queued", "rows")
    finish(full)
    assert states(second) == [("queued", "rows"), ("prefilling", ""), ("decoding", "")]


def test_a_row_that_may_prefill() -> None:
    prefilling = world(None, prefill_batch_size=1, prefill_step_size=4)
    [_, second] = ask(prefilling, 2)
    run(prefilling)
    assert standing(second) == ("queued", "rows")
    finish(prefilling)


def test_memory() -> None:
    small = world(20)
    [_, second] = ask(small, 2, max_tokens=8)
    run(small, 2)
    assert standing(second) == ("queued", "memory")
    finish(small)


def test_the_share_of_its_key() -> None:
    shared = world(None)
    [*_, last] = ask(shared, 5, max_tokens=100, tenant="a")
    ask(shared, 4, max_tokens=100, tenant="b")
    run(shared, 3)
    assert standing(last) == ("queued", "share")
    finish(shared)


def test_others_of_a_higher_priority() -> None:
    shared = world(None)
    ask(shared, 1, max_tokens=60)
    [_, second] = ask(shared, 2, priority=BATCH_PRIORITY)
    run(shared, 3)
    assert standing(second) == ("queued", "priority")
    finish(shared)


def test_preempted_by_a_higher_priority() -> None:
    shared = world(None)
    batch = ask(shared, 3, max_tokens=60, priority=BATCH_PRIORITY)
    run(shared, 3)
    ask(shared, 1, max_tokens=60)
    run(shared)
    assert [standing(client) for client in batch] == [
        ("decoding", ""),
        ("preempted", "priority"),
        ("preempted", "priority"),
    ]
    finish(shared)


def test_preempted_for_want_of_memory() -> None:
    small = world(30)
    [_, young] = ask(small, 2, max_tokens=14)
    while not preempted(small):
        run(small)
    assert standing(young) == ("preempted", "memory")
    finish(small)
    assert states(young)[-2:] == [("prefilling", ""), ("decoding", "")]


def test_preempted_beyond_the_share_of_its_key() -> None:
    shared = world(None)
    [*_, young] = ask(shared, 7, max_tokens=600, tenant="a")
    run(shared, 3)
    ask(shared, 1, max_tokens=500, tenant="b")
    run(shared, int(PATIENCE_S / STEP_S) + 10)
    assert standing(young) == ("preempted", "share")
    finish(shared)


def shares_prefix(crowded: CoreWorld) -> tuple[RecordingClient, RecordingClient]:
    prefix = tuple(range(1, 60))
    first, second = (crowded.ask((*prefix, last), 4) for last in (70, 71))
    return first, second


def test_a_prefix_that_another_request_computes() -> None:
    crowded = world(None, cache_memory=10**6, prefill_step_size=4, block_size=4)
    first, second = shares_prefix(crowded)
    run(crowded, 2)
    assert standing(first) == ("prefilling", "")
    assert standing(second) == ("queued", "prefix")
    latest = second.history.latest
    assert latest is not None and "(request 0)" in latest.waits_for
    finish(crowded)


def test_blocks_that_are_read_from_disk() -> None:
    full = world(None, completion_batch_size=1)
    [_, second] = ask(full, 2)
    run(full, 2)
    [queued] = full.core._queue
    ticket = Ticket(0, (), ())
    queued.wait_for_disk(ticket)
    run(full)
    assert standing(second) == ("queued", "disk")
    ticket.done = True
    run(full)
    assert standing(second) == ("queued", "rows")
    finish(full)


def test_a_request_that_runs_alone_since_it_may_have_crashed_the_engine() -> None:
    tried = world(None)
    [_, second] = ask(tried, 2)
    [first, _] = tried.core._queue
    first.standing.suspect = True
    run(tried)
    assert standing(second) == ("queued", "trial")
    finish(tried)


def test_the_engine_that_begins_again_after_a_crash() -> None:
    crashed = world(None, completion_batch_size=1)
    clients = ask(crashed, 2)
    run(crashed, 2)
    for sequence in (*crashed.core._batch.rows.values(), *crashed.core._queue):
        sequence.carry_over()
    assert [standing(client) for client in clients] == [("preempted", "crash"), ("queued", "crash")]


def test_how_much_of_a_prompt_is_prefilled() -> None:
    core = DrivenCore(disk=False, prefill_step_size=512)
    client = core.arrive(9 * 512, 4)
    while not client.progress or client.progress[-1].prefilled_tokens < 3 * 512:
        core.step()
    assert client.progress[-1].tokens_to_prefill == 9 * 512
    assert client.progress[-1].prefilled_tokens < 9 * 512
    assert standing(client) == ("prefilling", "")


def test_the_last_transitions_are_kept() -> None:
    crowded = world(None)
    client = crowded.ask(PROMPT, 400)
    run(crowded, 3)
    for _ in range(KEPT):
        [row] = crowded.core._batch.rows.values()
        crowded.core._preemption.preempt(row, crowded.now, "memory")
        run(crowded, 4)
    assert len(client.history.transitions) == KEPT
    finish(crowded)
