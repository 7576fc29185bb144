"""Scheduler alone: the protocol of plans, admission, withdrawal. The test plays the engine."""

from __future__ import annotations

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.bench import Bench, Opened, code, ends, heard, scheduling
from tests.fakes import EOS, card
from trouper.protocol.grammar import Grammar
from trouper.protocol.health import MemoryStatus
from trouper.protocol.plans import NOT_A_NUMBER, RowFault, Stepped
from trouper.protocol.replies import Accepted, Delta, Failed, Finished, Started


async def test_one_request_from_admission_to_its_end(opened: Opened) -> None:
    async with scheduling(opened) as bench:
        answer = await bench.ask(max_tokens=2)
        plans = await bench.play()
        replies = heard(answer)
        assert replies[:2] == [Accepted((1, 2, 3), 2), Started(0)]
        deltas = [reply for reply in replies if isinstance(reply, Delta)]
        assert [(delta.text, delta.tokens) for delta in deltas] == 2 * [("a", (97,))]
        assert replies[2:] == [*deltas, Finished("length", 2)]
        assert [len(plan.admit) for plan in plans] == [1, 0, 0]
        assert [plan.has_work for plan in plans] == [True, True, False], (
            "the third flushes the second"
        )
        assert [bool(plan.drop) for plan in plans] == [False, False, True], (
            "and drops the row whose last token it was"
        )


@pytest.mark.parametrize(
    ("speculation", "by_default", "drafts"),
    [("auto", True, True), ("auto", False, False), ("ngram", False, True), ("off", True, False)],
)
async def test_who_drafts_if_the_request_does_not_say(
    opened: Opened, speculation: str, *, by_default: bool, drafts: bool
) -> None:
    told = attrs.evolve(card(), drafts_by_default=by_default)
    async with scheduling(opened, told=told, speculation=speculation) as bench:
        await bench.ask()
        assert (await bench.new_plans())[0].admit[0].drafts == drafts


async def test_two_plans_in_flight_and_the_last_is_flushed(opened: Opened) -> None:
    async with scheduling(opened) as bench:
        answer = await bench.ask(max_tokens=2)
        first, second = await bench.new_plans()
        assert (len(first.prefill), second.decode) == (1, (first.admit[0].row,))
        await bench.answer()
        [flush] = await bench.new_plans()
        assert not flush.has_work
        assert flush.drop == (first.admit[0].row,)
        await bench.answer()
        await bench.answer()
        assert await bench.new_plans() == []
        assert len(ends(heard(answer))) == 1


async def test_a_wrong_order_of_answers_is_a_bug_and_everyone_is_told(opened: Opened) -> None:
    with pytest.raises(ExceptionGroup) as crash:  # noqa: PT012
        async with scheduling(opened) as bench:
            answer = await bench.ask()
            [first, _] = await bench.new_plans()
            bench.results.send_nowait(Stepped(first.step + 1))
            await wait_all_tasks_blocked()
    assert crash.group_contains(AssertionError)
    assert code(heard(answer)) == "engine_stopped"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
async def test_no_row_is_planned_beyond_max_tokens(opened: Opened, max_tokens: int) -> None:
    async with scheduling(opened, completion_batch_size=3) as bench:
        answers = [await bench.ask(str(n), tokens=n + 1, max_tokens=max_tokens) for n in range(5)]
        plans = await bench.play()
        for answer in answers:
            assert heard(answer)[-1] == Finished("length", max_tokens)
        rows = {admit.row for plan in plans for admit in plan.admit}
        assert len(rows) == len(answers)
        for row in rows:
            assert sum(row in plan.decode for plan in plans) == max_tokens - 1


async def test_r1_a_finished_rows_place_is_taken_at_the_next_step(opened: Opened) -> None:
    async with scheduling(opened, completion_batch_size=1) as bench:
        for name in "ab":
            await bench.ask(name, max_tokens=3)
        plans = await bench.play()
        [[first], [second]] = [plan.admit for plan in plans if plan.admit]
        [into] = [plan for plan in plans if second in plan.admit]
        assert into.drop == (first.row,)


async def test_r1_a_long_prompt_prefills_in_chunks_beside_decode(opened: Opened) -> None:
    async with scheduling(opened, prefill_step_size=8) as bench:
        await bench.ask("short", tokens=1, max_tokens=200)
        await bench.new_plans()
        await bench.answer()
        await bench.ask("long", tokens=100, max_tokens=1)
        plans = await bench.play()
        chunks = [plan for plan in plans if plan.prefill]
        assert len(chunks) >= 100 // 8
        assert all(plan.decode for plan in chunks), "the running stream decodes in every step"
        assert all(chunk.tokens <= 8 for plan in chunks for chunk in plan.prefill)


async def test_d4_a_withdrawn_row_is_dropped_with_the_next_plan(opened: Opened) -> None:
    async with scheduling(opened) as bench:
        leaves = await bench.ask("leaves", max_tokens=100)
        stays = await bench.ask("stays", max_tokens=4)
        [first, second] = await bench.new_plans()
        row = first.admit[0].row
        leaves.close()
        await bench.answer()
        [third] = await bench.new_plans()
        assert third.drop == (row,)
        assert row not in third.decode
        assert row in second.decode, "the step in flight still has it; its token goes nowhere"
        await bench.play()
        assert heard(stays)[-1] == Finished("length", 4)
        assert bench.stats.latest.requests_withdrawn == 1


async def test_d4_a_queued_request_that_leaves_never_reaches_the_engine(opened: Opened) -> None:
    async with scheduling(opened, completion_batch_size=1) as bench:
        await bench.ask("runs")
        queued = await bench.ask("queued")
        queued.close()
        plans = await bench.play()
        assert sum(len(plan.admit) for plan in plans) == 1
        assert bench.stats.latest.requests_withdrawn == 1


async def test_r11_a_full_queue_is_429_with_retry_after(opened: Opened) -> None:
    async with scheduling(opened, completion_batch_size=2, max_queue_size=3) as bench:
        answers = [await bench.ask(str(n)) for n in range(7)]
        await bench.new_plans()
        await bench.answer()
        said = [heard(answer)[0] for answer in answers]
        assert [type(first) for first in said] == [Accepted] * 5 + [Failed] * 2
        assert isinstance(said[-1], Failed)
        assert (said[-1].problem.status, said[-1].problem.code) == (429, "queue_full")
        assert said[-1].problem.retry_after_s
        assert (bench.stats.latest.active_sequences, bench.stats.latest.queued_requests) == (2, 3)
        await bench.play()
        stats = bench.stats.latest
        assert (stats.total_requests, stats.requests_completed, stats.requests_errored) == (7, 5, 2)


async def test_a_queue_of_nobody_still_fills_the_batch(opened: Opened) -> None:
    async with scheduling(opened, completion_batch_size=2, max_queue_size=0) as bench:
        answers = [await bench.ask(str(n)) for n in range(3)]
        await bench.play()
        assert [type(heard(answer)[-1]) for answer in answers] == [Finished, Finished, Failed]


async def test_r14_memory_pressure_lets_one_in_at_a_time(opened: Opened) -> None:
    async with scheduling(opened) as bench:
        bench.memory.publish(MemoryStatus(under_pressure=True))
        answers = [await bench.ask(str(n)) for n in range(3)]
        held: set[int] = set()
        for plan in await bench.play():
            held = (held - set(plan.drop)) | {admit.row for admit in plan.admit}
            assert len(held) <= 1
        assert [type(heard(answer)[-1]) for answer in answers] == [Finished] * 3


async def test_r14_memory_is_released_once_for_each_time_that_it_was_asked(opened: Opened) -> None:
    async with scheduling(opened) as bench:
        bench.memory.publish(MemoryStatus(releases=3))
        await bench.ask(max_tokens=20)
        plans = await bench.play()
        assert [plan.release_memory for plan in plans] == [True] + [False] * (len(plans) - 1)


async def test_r14_memory_is_released_also_while_nobody_asks(
    opened: Opened, autojump_clock: trio.abc.Clock
) -> None:
    """A burst whose last row had ended kept what it had freed until the next request came."""
    async with scheduling(opened, janitor_interval_s=5) as bench:
        await bench.ask(max_tokens=1)
        await bench.play()
        bench.memory.publish(MemoryStatus(releases=1))
        await trio.sleep(6)
        assert [plan.release_memory for plan in await bench.play()] == [True]


async def test_f16_eos_ends_the_row_and_the_token_in_flight_goes_nowhere(opened: Opened) -> None:
    async with scheduling(opened) as bench:
        answer = await bench.ask(max_tokens=50)
        await bench.play(token=EOS)
        delta, finished = heard(answer)[2:]
        assert isinstance(delta, Delta) and (delta.text, delta.tokens) == ("", (EOS,))
        assert finished == Finished("stop", 1)
        assert bench.stats.latest.tokens_generated == 1


async def test_d11_f27_a_late_step_is_published_and_taken_back(
    opened: Opened, autojump_clock: trio.abc.Clock
) -> None:
    async with scheduling(opened, stall_timeout_s=5) as bench:
        await bench.ask()
        began = trio.current_time()
        await trio.sleep(5.1)
        assert bench.stats.latest.stalled_since == began
        await bench.play()
        assert bench.stats.latest.stalled_since is None


async def test_an_answer_is_late_by_its_own_time(
    opened: Opened, autojump_clock: trio.abc.Clock
) -> None:
    """However long the steps before it took together."""
    async with scheduling(opened, stall_timeout_s=5) as bench:
        await bench.ask(max_tokens=50)
        for _ in range(9):
            await bench.new_plans()
            await trio.sleep(0.3)
            await bench.answer()
        began = trio.current_time()
        found = list[float | None]()
        for pause_s in (4.99, 0.02):
            await trio.sleep(pause_s)
            found.append(bench.stats.latest.stalled_since)
        assert found == [None, began]
        await bench.play()
        assert bench.stats.latest.stalled_since is None


async def test_a_process_that_was_paused_has_no_stuck_device(
    opened: Opened, mock_clock: MockClock
) -> None:
    """The clock says that a step took an hour, but the device had none of it."""

    async def pass_time(seconds: float) -> None:
        mock_clock.jump(seconds)
        await wait_all_tasks_blocked()

    async with scheduling(opened, stall_timeout_s=5) as bench:
        answer, found = await bench.ask(), list[float | None]()
        await pass_time(3600)
        found.append(bench.stats.latest.stalled_since)
        for _ in range(9):
            await pass_time(0.6)
        found.append(bench.stats.latest.stalled_since)
        assert found[0] is None and (found[1] or 0) >= trio.current_time() - 10, (
            "no clock may say that it was an hour"
        )
        await pass_time(3600)
        await bench.play()
        assert isinstance(heard(answer)[-1], Finished) and bench.stats.latest.stalled_since is None


async def test_f18_a_stuck_device_fails_everyone_and_forgets_no_row(
    opened: Opened, autojump_clock: trio.abc.Clock
) -> None:
    """Should it come back after all, its rows are dropped before anything else is done."""
    async with scheduling(opened, stall_timeout_s=1) as bench:
        answer = await bench.ask()
        [first, _] = await bench.new_plans()
        await trio.sleep(10.1)
        assert code(heard(answer)) == "device_stuck"
        later = await bench.ask("later")
        plans = await bench.play()
        assert next(plan.drop for plan in plans if plan.drop) == (first.admit[0].row,)
        assert [row for plan in plans for row in plan.drop] == [
            first.admit[0].row,
            first.admit[0].row + 1,
        ]
        assert isinstance(heard(later)[-1], Finished)


async def test_a_cancelled_scheduler_ends_every_answer_once(opened: Opened) -> None:
    async with scheduling(opened, completion_batch_size=1) as bench:
        answers = [await bench.ask(str(n)) for n in range(3)]
        await bench.new_plans()
        await bench.answer()
    assert [code(heard(answer)) for answer in answers] == ["engine_stopped"] * 3
    stats = bench.stats.latest
    assert (stats.active_sequences, stats.queued_requests, stats.requests_errored) == (0, 0, 3)


@pytest.mark.parametrize(("leaving", "status"), [(False, 500), (True, 503)])
async def test_who_is_left_hears_whether_the_engine_crashed_or_the_server_leaves(
    opened: Opened, leaving: bool, status: int
) -> None:
    """A client may come back to a server that leaves: to another one, soon."""
    async with scheduling(opened) as bench:
        answer = await bench.ask()
        await bench.new_plans()
        if leaving:
            bench.admitted.close()
        await bench.answer()
    [end] = ends(heard(answer))
    assert isinstance(end, Failed)
    assert (end.problem.status, end.problem.retry_after_s is not None) == (status, leaving)


async def test_a_row_whose_grammar_gave_up_is_told_and_dropped(opened: Opened) -> None:
    async with scheduling(opened) as bench:
        answer = await bench.ask("one", grammar=Grammar("lark", "start: /a+/"))
        beside = await bench.ask("two")
        [first, _] = await bench.new_plans()
        row = first.admit[0].row
        bench.unanswered.pop(0)
        bench.results.send_nowait(
            Stepped(first.step, failed=((row, RowFault("grammar", "too many items")),))
        )
        [following] = await bench.new_plans()
        assert following.drop == (row,)
        assert code(heard(answer)) == "grammar_failed"
        assert not ends(heard(beside))
        await bench.play()
        assert isinstance(heard(beside)[-1], Finished)
        assert bench.stats.latest.requests_errored == 1


async def test_a_row_of_which_the_model_computes_no_numbers_is_told_and_nothing_of_it_is_kept(
    opened: Opened,
) -> None:
    async with scheduling(opened) as bench:
        answer = await bench.ask(tokens=10)
        [first, _] = await bench.new_plans()
        row = first.admit[0].row
        bench.unanswered.pop(0)
        bench.results.send_nowait(Stepped(first.step, failed=((row, NOT_A_NUMBER),)))
        [following] = await bench.new_plans()
        assert (following.drop, following.store) == ((row,), ())
        assert code(heard(answer)) == "not_a_number"
        await bench.play()


@pytest.mark.parametrize(("least", "ends"), [(3, {98, EOS}), (0, set[int]())])
async def test_the_engine_hears_what_would_end_an_answer_if_it_may_not_end_yet(
    opened: Opened, least: int, ends: set[int]
) -> None:
    async with scheduling(opened) as bench:
        await bench.ask(min_tokens=least, stop_token_ids=(98,))
        [admit] = (await bench.new_plans())[0].admit
        assert (admit.min_tokens, {*admit.ends}) == (least, ends)


async def test_shutdown_flows_through_as_the_end_of_the_channel(opened: Opened) -> None:
    async with scheduling(opened) as bench:
        answer = await bench.ask()
        bench.admitted.close()
        assert not bench.ended.is_set(), "what was admitted is finished first"
        last = (await bench.play())[-1]
        assert last.drop, "the engine ends with no row"
        assert bench.ended.is_set()
        assert isinstance(heard(answer)[-1], Finished)
        await wait_for_end_of(bench)


async def wait_for_end_of(bench: Bench) -> None:
    with pytest.raises(trio.EndOfChannel):
        await bench.plans.receive()


async def test_counters_survive_a_restart_but_not_the_stall(
    opened: Opened, autojump_clock: trio.abc.Clock
) -> None:
    """A restarted group is ready again at once: readiness must not wait for the next request, which
    it would keep away."""
    async with scheduling(opened, stall_timeout_s=1) as crashed:
        answer = await crashed.ask()
        await trio.sleep(2)
        assert crashed.stats.latest.stalled_since is not None
    assert code(heard(answer)) == "engine_stopped"
    async with scheduling(opened, stats=crashed.stats) as restarted:
        assert restarted.stats.latest.stalled_since is None
        assert restarted.stats.latest.requests_errored == 1


async def test_a_plan_for_a_stepper_that_has_ended_is_no_crash(opened: Opened) -> None:
    """When all end, the stepper may be the first: the plan that the scheduler sends then was taken
    for a crash, once in CI."""
    async with scheduling(opened) as bench:
        bench.plans.close()
        await bench.ask()
        await wait_all_tasks_blocked()
        assert not bench.ended.is_set()


async def test_an_idle_engine_gets_its_first_plan_before_the_second_is_composed(
    opened: Opened,
) -> None:
    """Who passes plans on to the engine's thread runs, and that thread gets Python's lock, before
    more is planned."""
    async with scheduling(opened) as bench, trio.open_nursery() as nursery:
        waiting: list[int] = []

        async def pass_on() -> None:
            await bench.plans.receive()
            waiting.append(bench.plans.statistics().current_buffer_used)

        nursery.start_soon(pass_on)
        await bench.ask(max_tokens=3)
        assert (waiting, bench.plans.statistics().current_buffer_used) == ([0], 1)
