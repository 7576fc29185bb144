"""What the core reports of banks and of preempted sequences, and how often it asks the engine for
it."""

from __future__ import annotations

import attrs
import pytest

from tests.core.driving import STEP_S, DrivenCore
from tests.core.test_memory import PROMPT, ask, finish, preempted, run, world
from tests.core.worlds import CoreWorld
from trouper.actors.scheduling.disk_tier import Ticket
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.step_statistics import BANKS_EVERY_S, StepStatistics
from trouper.protocol.batch import RowStats
from trouper.protocol.blocks import BlockRef
from trouper.protocol.health import SchedulerStats
from trouper.protocol.kv import BankStats
from trouper.protocol.plans import Plan, RowId, Stepped

BANK = BankStats(max_tokens=512, capacity_tokens=256, rows=1, slots=1, bytes=7)


def shown(core: CoreWorld) -> dict[str, RowStats]:
    """The rows as a viewer sees them, after one more step."""
    core.watches.last_viewed_at.publish(core.now)
    run(core)
    return {row.request_id: row for row in core.watches.batch.latest.rows}


def waiting(core: CoreWorld) -> Sequence:
    [sequence] = core.core._queue
    return sequence


def test_banks_are_asked_for_once_a_second_however_many_steps_there_are() -> None:
    core, asked = DrivenCore(), 0
    answer = core._answer

    def counted(plan: Plan) -> Stepped:
        nonlocal asked
        asked += plan.report_banks
        return attrs.evolve(
            answer(plan), banks=(attrs.evolve(BANK, bytes=asked),) if plan.report_banks else None
        )

    core._answer = counted  # type: ignore[method-assign]
    core.arrive(100, max_tokens=2000)
    for _ in range(round(5 * BANKS_EVERY_S / STEP_S)):
        core.step()
    assert asked == 5
    [bank] = core.watches.stats.latest.banks
    assert bank.bytes == 5, "the last report"


def test_the_plan_that_ends_the_work_asks_whatever_the_time() -> None:
    statistics = StepStatistics.of(SchedulerStats())
    busy, last = Plan(0, decode=(RowId(0),)), Plan(1, drop=(RowId(0),))
    assert statistics.request_banks(busy, 5.0).report_banks
    assert statistics.request_banks(busy, 5.5) is busy, "no copy in a step that asks for nothing"
    assert statistics.request_banks(last, 5.5).report_banks
    assert statistics.request_banks(busy, 5.0 + BANKS_EVERY_S).report_banks


def test_when_all_rows_have_ended_no_bank_is_left() -> None:
    free = world(None)
    ask(free, 2, max_tokens=8)
    run(free, 3)
    assert [bank.rows for bank in free.watches.stats.latest.banks] == [2]
    finish(free)
    run(free)
    assert free.watches.stats.latest.banks == ()


@pytest.mark.parametrize("priority", [0, 5])
def test_a_preempted_sequence_is_shown_until_it_goes_on(priority: int) -> None:
    small = world(30, prefill_step_size=4)
    ask(small, max_tokens=14, priority=-1)
    ask(small, max_tokens=14, priority=priority)
    assert {row.state for row in shown(small).values()} == {"prefilling"}
    while not preempted(small):
        run(small)
    stats, rows = small.watches.stats.latest, shown(small)
    assert (stats.preempted_sequences, stats.queued_requests) == (1, 1)
    assert [(row.state, row.priority) for row in rows.values()] == [
        ("decoding", -1),
        ("preempted", priority),
    ]
    had = rows["1"].generated_tokens
    assert (rows["1"].restored_tokens, rows["1"].tokens_to_restore) == (0, len(PROMPT) + had)
    while (row := shown(small)["1"]).state == "preempted":
        assert row.generated_tokens == had
    assert row.state == "restoring" and row.row != rows["1"].row
    assert 0 < row.restored_tokens < row.tokens_to_restore == len(PROMPT) + had
    assert small.watches.stats.latest.preempted_sequences == 0
    while (row := shown(small)["1"]).state == "restoring":
        pass
    assert (row.state, row.restored_tokens, row.tokens_to_restore) == ("decoding", 0, 0)
    finish(small)
    assert preempted(small) == 1


def test_a_sequence_that_never_had_a_row_is_not_shown() -> None:
    small = world(30)
    ask(small, 4, max_tokens=14)
    while not preempted(small):
        run(small)
    assert set(shown(small)) == {"0", "1"}
    assert small.watches.stats.latest.queued_requests == 3


def test_what_is_read_from_disk_for_a_preempted_sequence_counts() -> None:
    small = world(30)
    ask(small, 2, max_tokens=14)
    while not preempted(small):
        run(small)
    refs = tuple(BlockRef(bytes([place]), bytes(16)) for place in range(3))
    ticket = Ticket(0, (), refs)
    ticket.read_tokens = 8
    waiting(small).wait_for_disk(ticket)
    row = shown(small)["1"]
    assert (row.state, row.restored_tokens) == ("preempted", 8)


def test_an_aborted_preempted_sequence_waits_no_more() -> None:
    small = world(30)
    [_, young] = ask(small, 2, max_tokens=14)
    while not preempted(small):
        run(small)
    young.aborted = True
    assert set(shown(small)) == {"0"}
    assert small.watches.stats.latest.preempted_sequences == 0
