"""The client's end: phases and their timeouts, withdrawal, drain. The whole graph around a fake
engine."""

from __future__ import annotations

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.bench import Opened, generate, running
from tests.fakes import ByteTokenizer, FakeEngine, card
from trouper import Answer, RequestFailed, Runtime, Settings, Timeouts
from trouper.actors.runtime.adapter_table import AdapterTable
from trouper.actors.runtime.answer import TimeLimits
from trouper.actors.runtime.channels import Channels, Watches
from trouper.actors.runtime.submission import Submission
from trouper.protocol.model import MemoryStats
from trouper.protocol.plans import Plan
from trouper.protocol.replies import Accepted, Delta, Progress, Reply


def pace(*, prefill_s: float = 0.0, decode_s: float = 0.0) -> FakeEngine:
    async def before_step(plan: Plan) -> None:
        await trio.sleep(prefill_s if plan.prefill else decode_s)

    return FakeEngine(before_step=before_step)


async def whole_text(answer: Answer) -> str:
    return "".join([delta.text async for delta in answer])


async def failure(
    runtime: Runtime, limits: Timeouts, max_tokens: int = 5, tokens: int = 3
) -> tuple[str | None, int, float]:
    """(code, status, seconds until it came) of the failure that the client meets."""
    began = trio.current_time()
    with pytest.raises(RequestFailed) as failed:  # noqa: SIM117  Submitting is part of it.
        with await runtime.submit(
            generate("late", tokens, max_tokens=max_tokens, timeouts=limits)
        ) as answer:
            await whole_text(answer)
    return failed.value.problem.code, failed.value.problem.status, trio.current_time() - began


async def rows_gone(runtime: Runtime, engine: FakeEngine, within_s: float) -> None:
    """F13: what timed out or left does not run on."""
    await trio.sleep(within_s)
    await wait_all_tasks_blocked()
    assert not engine.rows
    assert runtime.health().scheduler.active_sequences == 0


async def test_an_answer_streams_to_its_end(opened: Opened) -> None:
    async with running() as runtime:
        with await runtime.submit(generate(max_tokens=4)) as answer:
            assert answer.accepted.prompt_tokens == (1, 2, 3)
            deltas = [delta async for delta in answer]
            end = await answer.next()
            assert await answer.next() == end, "the end, again and again"
        assert [len(delta.tokens) for delta in deltas] == [1] * 4
        assert answer.completion_tokens == 4


async def test_r12_queue_timeout_before_it_was_even_accepted(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with running(pace(prefill_s=30), completion_batch_size=1) as runtime:
        with await runtime.submit(generate("first")):
            assert await failure(runtime, Timeouts(queue_s=5)) == ("queue_timeout", 503, 5)


async def test_r12_queue_timeout_in_the_queue(opened: Opened, autojump_clock: MockClock) -> None:
    async with running(pace(decode_s=1), completion_batch_size=1) as runtime:
        with await runtime.submit(generate("first", max_tokens=100)) as first:
            await first.next()
            assert await failure(runtime, Timeouts(queue_s=5)) == ("queue_timeout", 503, 5)


async def test_r12_first_token_timeout(opened: Opened, autojump_clock: MockClock) -> None:
    engine = pace(prefill_s=30)
    async with running(engine) as runtime:
        limits = Timeouts(queue_s=1, first_token_s=5, between_tokens_s=1, request_s=100)
        assert await failure(runtime, limits) == ("first_token_timeout", 504, 5)
        await rows_gone(runtime, engine, 30)


async def test_r12_a_prefill_of_ten_minutes_that_makes_progress(
    opened: Opened, autojump_clock: MockClock
) -> None:
    """No default ends it: each chunk begins the limit anew, and there is none for the whole
    request."""
    async with running(pace(prefill_s=30), prefill_step_size=1) as runtime:
        began = trio.current_time()
        with await runtime.submit(generate(tokens=20, max_tokens=3)) as answer:
            assert len(await whole_text(answer)) == 3
            assert answer.first_token_at is not None
            assert answer.first_token_at - began >= 600


async def test_r12_a_prefill_that_makes_no_progress_any_more(
    opened: Opened, autojump_clock: MockClock
) -> None:
    began = trio.current_time()

    async def before_step(_: Plan) -> None:
        await trio.sleep(30 if trio.current_time() - began < 300 else 1000)

    engine = FakeEngine(before_step=before_step)
    async with running(engine, prefill_step_size=1, stall_timeout_s=5000) as runtime:
        assert await failure(runtime, Timeouts(first_token_s=120), tokens=20) == (
            "first_token_timeout",
            504,
            420,
        )
        await rows_gone(runtime, engine, 2000)


async def test_who_waits_for_a_prefix_is_not_late_while_it_is_computed(
    opened: Opened, autojump_clock: MockClock
) -> None:
    """Choices of one prompt, and agents with the same one, wait in the queue until the first of
    them has computed it."""
    engine = pace(prefill_s=5)
    async with running(engine, prefill_step_size=1, block_size=1) as runtime:
        began = trio.current_time()
        with await runtime.submit(generate("first", 40, max_tokens=3)) as first:
            await wait_all_tasks_blocked()
            with await runtime.submit(generate("second", 40, max_tokens=3)) as second:
                texts = [await whole_text(answer) for answer in (second, first)]
                assert texts[0] == texts[1] and len(texts[0]) == 3
                assert second.admitted_at is not None
                assert second.admitted_at - began > runtime.settings.queue_timeout_s
                assert second.cached_tokens == 39


async def test_a_preempted_request_is_not_late_and_a_returned_one_may_be(
    autojump_clock: MockClock,
) -> None:
    replies, received = trio.open_memory_channel[Reply](9)
    limits = TimeLimits(
        Timeouts(queue_s=5, first_token_s=10, between_tokens_s=5), trio.current_time()
    )
    answer = Answer("r", Accepted((1,), 9), received, limits)
    with replies, received:
        replies.send_nowait(Delta("a", (97,)))
        await answer.next()
        limits.progress.publish(Progress(preempted=True))
        with trio.move_on_after(1000):
            await answer.next()
        limits.progress.publish(Progress(trio.current_time()))
        with pytest.raises(RequestFailed) as failed:
            await answer.next()
        assert (failed.value.problem.code, trio.current_time()) == ("token_timeout", 1005)


async def test_r12_token_timeout(opened: Opened, autojump_clock: MockClock) -> None:
    engine = pace(prefill_s=3, decode_s=30)
    async with running(engine) as runtime:
        limits = Timeouts(queue_s=1, first_token_s=50, between_tokens_s=5, request_s=100)
        assert (await failure(runtime, limits))[:2] == ("token_timeout", 504)
        await rows_gone(runtime, engine, 90)


async def test_r12_request_timeout_f13(opened: Opened, autojump_clock: MockClock) -> None:
    engine = pace(decode_s=1)
    async with running(engine) as runtime:
        limits = Timeouts(queue_s=5, first_token_s=5, between_tokens_s=5, request_s=7.5)
        assert await failure(runtime, limits, max_tokens=100) == ("request_timeout", 504, 7.5)
        await rows_gone(runtime, engine, 3)


async def test_f17_a_long_prefill_is_not_a_stalled_stream(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with running(pace(prefill_s=30)) as runtime:
        limits = Timeouts(queue_s=1, first_token_s=60, between_tokens_s=1)
        with await runtime.submit(generate(max_tokens=3, timeouts=limits)) as answer:
            assert len(await whole_text(answer)) == 3


async def test_what_already_came_is_not_late_for_a_slow_reader(
    opened: Opened, autojump_clock: MockClock
) -> None:
    """The limits are on the engine. A reader that dawdles longer than one of them has not been kept
    waiting."""
    async with running() as runtime:
        limits = Timeouts(queue_s=5, first_token_s=5, between_tokens_s=5)
        with await runtime.submit(generate(max_tokens=3, timeouts=limits)) as answer:
            text = ""
            for _ in range(3):
                await trio.sleep(60)
                piece = await answer.next()
                text += getattr(piece, "text", "")
            await trio.sleep(60)
            await answer.next()
        assert len(text) == 3
        assert answer.finished is not None


async def test_the_whole_request_has_its_limit_for_a_slow_reader_too(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with running() as runtime:
        with await runtime.submit(
            generate(timeouts=Timeouts(between_tokens_s=1, request_s=5))
        ) as answer:
            await trio.sleep(60)
            with pytest.raises(RequestFailed) as failed:
                await answer.next()
        assert failed.value.problem.code == "request_timeout"


@settings(max_examples=30)
@given(st.lists(st.floats(0, 0.3), max_size=30))
def test_a_cancelled_next_loses_nothing(impatience: list[float]) -> None:
    async def main() -> str:
        text = ""
        async with running(pace(prefill_s=0.2, decode_s=0.1)) as runtime:
            with await runtime.submit(generate(max_tokens=10)) as answer:
                for patience_s in impatience:
                    with trio.move_on_after(patience_s):
                        text += getattr(await answer.next(), "text", "")
                return text + await whole_text(answer)

    assert trio.run(main, clock=MockClock(autojump_threshold=0)) == "gnubipwdkr"


async def test_next_nowait_gives_what_waits_and_never_the_end(opened: Opened) -> None:
    async with running() as runtime:
        with await runtime.submit(generate(max_tokens=3)) as answer:
            await wait_all_tasks_blocked()
            assert answer.next_nowait() is None, "Started comes first, and is no Delta"
            first = await answer.next()
            more = [answer.next_nowait(), answer.next_nowait()]
            assert all(more)
            assert answer.next_nowait() is None
            assert answer.next_nowait() is None
            end = await answer.next()
            assert answer.finished is end
            assert answer.next_nowait() is None
            assert first is not end
            assert answer.completion_tokens == 3


async def test_close_is_idempotent_and_frees_the_row(
    opened: Opened, autojump_clock: MockClock
) -> None:
    engine = pace(decode_s=1)
    async with running(engine) as runtime:
        answer = await runtime.submit(generate(max_tokens=100))
        await answer.next()
        answer.close()
        answer.close()
        assert answer.next_nowait() is None
        await rows_gone(runtime, engine, 3)
        assert runtime.health().scheduler.requests_withdrawn == 1


def lonely_runtime() -> tuple[Runtime, trio.MemoryReceiveChannel[Submission]]:
    """Nobody reads its requests."""
    requests, inbox = trio.open_memory_channel[Submission](0)
    own = Settings()
    return Runtime(
        settings=own,
        model=card(),
        tokenizer=ByteTokenizer(),
        requests=requests,
        watches=Watches(own),
        channels=Channels({}),
        scope=trio.CancelScope(),
        adapters=AdapterTable("model"),
        engine=FakeEngine(),
    ), inbox


async def test_f14_cancelled_while_it_is_delivered(
    opened: Opened, autojump_clock: MockClock
) -> None:
    runtime, inbox = lonely_runtime()
    with inbox, trio.move_on_after(1) as impatient:
        await runtime.submit(generate())
    assert impatient.cancelled_caught


async def test_f14_cancelled_while_it_waits_to_be_accepted(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with running(pace(prefill_s=30)) as runtime:
        with await runtime.submit(generate("first")):
            await wait_all_tasks_blocked()
            with trio.move_on_after(1) as impatient:
                await runtime.submit(generate("second"))
            assert impatient.cancelled_caught


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Timeouts(queue_s=5, request_s=9), "preparation_timeout"),
        (Timeouts(request_s=3), "request_timeout"),
    ],
)
async def test_r12_every_limit_counts_while_it_is_delivered(
    opened: Opened, autojump_clock: MockClock, limits: Timeouts, code: str
) -> None:
    runtime, inbox = lonely_runtime()
    with inbox, trio.fail_after(100):
        assert (await failure(runtime, limits))[0] == code


async def test_r13_drain_finishes_what_runs_and_refuses_what_comes(
    opened: Opened, autojump_clock: MockClock
) -> None:
    async with running(pace(decode_s=1)) as runtime, trio.open_nursery() as nursery:
        answer = await runtime.submit(generate(max_tokens=5))
        texts: list[str] = []

        async def read() -> None:
            texts.append(await whole_text(answer))

        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        nursery.start_soon(refused, runtime)
        assert await runtime.drain(60)
        assert runtime.health().status == "draining"
        await wait_all_tasks_blocked()
        assert texts == ["gnubi"]


async def refused(runtime: Runtime) -> None:
    await wait_all_tasks_blocked()
    with pytest.raises(RequestFailed) as failed:
        await runtime.submit(generate())
    assert (failed.value.problem.status, failed.value.problem.code) == (503, "draining")


@pytest.mark.parametrize("timeout_s", [25, 0])
async def test_r13_a_drain_that_takes_too_long_ends_what_is_left(
    timeout_s: float, opened: Opened, autojump_clock: MockClock
) -> None:
    async with running(pace(decode_s=10)) as runtime:
        with await runtime.submit(generate(max_tokens=100)) as answer:
            assert not await runtime.drain(timeout_s)
            with pytest.raises(RequestFailed) as failed:
                await whole_text(answer)
        assert failed.value.problem.status == 503
        await refused(runtime)
        assert await runtime.drain(1), "draining what is drained"


async def test_r13_a_submission_in_delivery_when_the_drain_begins_is_refused(
    opened: Opened,
) -> None:
    runtime, inbox = lonely_runtime()
    runtime.finished.set()
    with inbox:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, runtime)
            await wait_all_tasks_blocked()
            await runtime.drain(1)


async def test_cached_blocks_go_while_nobody_asks_if_the_system_is_short_of_memory(
    autojump_clock: MockClock,
) -> None:
    engine = FakeEngine()
    engine.stats = MemoryStats(active_bytes=0, spare_bytes=0, limit_bytes=1000, pressure="normal")
    async with running(engine) as runtime:
        with await runtime.submit(generate("1", 60, max_tokens=3)) as answer:
            await whole_text(answer)
        await trio.sleep(20)
        assert runtime.health().scheduler.cache.bytes
        engine.stats = attrs.evolve(engine.stats, pressure="critical")
        await trio.sleep(120)
        health = runtime.health()
        assert health.scheduler.cache.bytes == 0 and health.memory.under_pressure
        assert health.ready, "short memory is no fault of the engine's"
        engine.stats = attrs.evolve(engine.stats, pressure="normal")
        await trio.sleep(3600)
        assert runtime.health().memory.pressure_bound_bytes == 0
