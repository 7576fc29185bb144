"""What the scheduler shows of its batch: once a look, nothing while nobody looks."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from tests.actors.bench import Bench, Opened, generate, running, scheduling
from tests.fakes import FakeEngine
from trouper.actors.graph import CHANNELS
from trouper.actors.scheduling.batch_view import VIEW_S
from trouper.protocol.batch import NOTHING_SHOWN, RowStats
from trouper.protocol.plans import Plan


def look(bench: Bench) -> None:
    bench.last_viewed_at.publish(trio.current_time())


async def steps(bench: Bench, count: int, seconds: float = 0.1) -> None:
    for _ in range(count):
        await trio.sleep(seconds)
        await bench.new_plans()
        await bench.answer()


async def test_nothing_is_made_while_nobody_looks(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with scheduling(opened) as bench:
        await bench.ask(max_tokens=100)
        await steps(bench, 20)
        assert bench.batch.latest is NOTHING_SHOWN
        look(bench)
        await steps(bench, 1)
        assert bench.batch.latest.rows
        assert bench.batch.latest.inter_token_latency_count == 0, (
            "gaps of which nobody heard were not counted"
        )


async def test_a_look_is_answered_once_however_many_steps_follow(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with scheduling(opened) as bench:
        await bench.ask(max_tokens=100)
        look(bench)
        await steps(bench, 1)
        shown = bench.batch.latest
        await steps(bench, 10)
        assert bench.batch.latest is shown
        look(bench)
        await steps(bench, 1)
        assert bench.batch.latest is not shown


async def test_a_look_that_is_not_repeated_is_forgotten(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with scheduling(opened) as bench:
        await bench.ask(max_tokens=100)
        look(bench)
        await steps(bench, 1)
        await steps(bench, 1, VIEW_S)
        assert bench.batch.latest is NOTHING_SHOWN


async def test_one_that_came_while_nothing_ran_is_no_look_at_what_runs_later(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with scheduling(opened) as bench:
        look(bench)
        await trio.sleep(2 * VIEW_S)
        await bench.ask(max_tokens=100)
        await steps(bench, 3)
        assert bench.batch.latest is NOTHING_SHOWN


async def test_a_row_is_shown_as_it_is(opened: Opened, autojump_clock: MockClock) -> None:
    async with scheduling(opened, prefill_step_size=8) as bench:
        await trio.sleep(1)
        await bench.ask("long", tokens=60, max_tokens=9)
        look(bench)
        await steps(bench, 1)
        [row] = bench.batch.latest.rows
        assert row == RowStats(
            row=0,
            request_id="long",
            prompt_tokens=60,
            cached_tokens=0,
            prefilled_tokens=row.prefilled_tokens,
            generated_tokens=0,
            max_tokens=9,
            since=1.0,
            first_token_at=None,
            state="prefilling",
            priority=0,
        )
        assert 8 <= row.prefilled_tokens < 60
        await steps(bench, 10)
        look(bench)
        await steps(bench, 1)
        [row] = bench.batch.latest.rows
        assert (
            row.prefilled_tokens == 60 and 0 < row.generated_tokens < 9 and row.state == "decoding"
        )
        assert row.first_token_at is not None and row.first_token_at > row.since


async def test_cached_tokens_are_shown(opened: Opened, autojump_clock: MockClock) -> None:
    async with running(FakeEngine(before_step=slowly)) as runtime:
        with await runtime.submit(generate(tokens=200, max_tokens=1)) as first:
            await first.next()
        with await runtime.submit(generate(tokens=200, max_tokens=50)) as second:
            await second.next()
            runtime.view_batch()
            await second.next()
            await second.next()
            [row] = runtime.view_batch().rows
            assert row.cached_tokens == second.cached_tokens > 100


async def test_gaps_are_those_between_tokens_of_running_streams(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with scheduling(opened) as bench:
        look(bench)
        await bench.ask(max_tokens=4)
        await steps(bench, 1)
        assert bench.batch.latest.inter_token_latencies_s == (), "a first token is not between two"
        look(bench)
        await steps(bench, 3, 0.25)
        look(bench)
        await bench.play()
        await trio.sleep(1)
        look(bench)
        await bench.ask(max_tokens=2)
        await steps(bench, 2, 0.5)
        shown = bench.batch.latest
        assert [round(gap, 3) for gap in shown.inter_token_latencies_s] == [
            0.25,
            0.25,
            0.25,
            0.5,
        ], "resting is no gap"
        assert shown.inter_token_latency_count == 4


async def test_when_the_rows_end_none_is_shown(opened: Opened, autojump_clock: MockClock) -> None:
    async with scheduling(opened) as bench:
        await bench.ask(max_tokens=3)
        look(bench)
        await bench.play()
        assert bench.batch.latest.rows == ()


async def slowly(_: Plan) -> None:
    await trio.sleep(0.01)


async def test_channels_tell_how_full_they_are(opened: Opened, autojump_clock: MockClock) -> None:
    hold = trio.Event()

    async def held(_: Plan) -> None:
        await hold.wait()

    async with running(FakeEngine(before_step=held)) as runtime:
        with await runtime.submit(generate(max_tokens=50)) as answer:
            await trio.sleep(1)
            stats = {channel.name: channel for channel in runtime.channels()}
            assert set(stats) == set(CHANNELS) - {"mirrored", "answers", "images"}, (
                "which only several ranks have, and models that take images"
            )
            assert stats["plans"].used == 1, "one plan is being answered, the next one waits"
            assert (stats["orders"].capacity, stats["orders"].policy) == (64, "sheds")
            hold.set()
            await answer.next()
        await trio.sleep(1)
        assert not any(channel.used for channel in runtime.channels())
