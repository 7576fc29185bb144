"""A request is told once, however it ends, and its times are the scheduler's."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.bench import generate, running
from tests.fakes import EOS, FakeEngine, deadly
from trouper import Answer, Delta, RequestFailed, TextPrompt, Timeouts
from trouper.protocol.plans import Plan
from trouper.protocol.record import RequestRecord

STEP_S = 0.25
pytestmark = pytest.mark.usefixtures("opened")
Told = list[RequestRecord]


async def slow(_: Plan) -> None:
    await trio.sleep(STEP_S)


@pytest.fixture
def told() -> Told:
    return []


async def read(answer: Answer, most: int = 1000) -> None:
    for _ in range(most):
        if not isinstance(await answer.next(), Delta):
            return


async def test_a_whole_answer(autojump_clock: MockClock, told: Told) -> None:
    async with running(FakeEngine(before_step=slow), completion_batch_size=1) as runtime:
        first = await runtime.submit(generate("a", 4, max_tokens=5), told.append)
        began = trio.current_time()
        second = await runtime.submit(generate("b", 2, max_tokens=3), told.append)
        await read(first)
        assert [one.request_id for one in told] == ["a"]
        await read(second)
        second.close()
    one, other = told
    assert (one.reason, one.code, one.prompt_tokens, one.generated_tokens, one.max_tokens) == (
        "length",
        "",
        4,
        5,
        5,
    )
    assert (one.queue_s, one.decode_s, one.mean_inter_token_latency_s) == (0, 4 * STEP_S, STEP_S)
    assert one.prefill_s == one.first_token_s
    assert one.prefill_s is not None
    assert one.inference_s == one.prefill_s + 4 * STEP_S
    assert (other.arrived_at, other.reason) == (began, "length")
    assert other.queue_s
    assert other.queue_s > 4 * STEP_S, "it waited for the only row"
    assert (
        other.ended_at
        >= (other.last_token_at or 0)
        > (other.first_token_at or 0)
        > (other.admitted_at or 0)
    )


async def test_a_slow_reader_shifts_no_time(autojump_clock: MockClock, told: Told) -> None:
    async with running(FakeEngine(before_step=slow)) as runtime:
        with await runtime.submit(generate(max_tokens=4), told.append) as answer:
            await answer.next()
            await trio.sleep(100)
            await read(answer)
    [record] = told
    assert record.decode_s
    assert record.decode_s < 4 * STEP_S
    assert record.total_s > 100


async def test_who_leaves_is_an_abort_with_all_that_was_generated(
    autojump_clock: MockClock, told: Told
) -> None:
    async with running(FakeEngine(before_step=slow)) as runtime:
        with await runtime.submit(generate(max_tokens=1000), told.append) as answer:
            await answer.next()
            await trio.sleep(10.5 * STEP_S)
    [record] = told
    assert (record.reason, record.code) == ("abort", "")
    assert record.generated_tokens == 11
    assert record.decode_s == 10 * STEP_S


async def test_an_answer_that_was_there_before_its_reader_left_is_no_abort(
    autojump_clock: MockClock, told: Told
) -> None:
    async with running(FakeEngine(token_at=lambda _, place: EOS if place == 2 else 97)) as runtime:
        with await runtime.submit(generate(max_tokens=9), told.append):
            await wait_all_tasks_blocked()
    [record] = told
    assert (record.reason, record.generated_tokens) == ("stop", 3)


async def test_cancelled_for_its_client(autojump_clock: MockClock, told: Told) -> None:
    async with running(FakeEngine(before_step=slow)) as runtime:
        answer = await runtime.submit(generate(max_tokens=1000), told.append)
        await answer.next()
        answer.cancel()
        with pytest.raises(RequestFailed):
            await answer.next()
        answer.close()
    [record] = told
    assert (record.reason, record.code) == ("abort", "cancelled")


async def test_cancelled_while_it_learns_that_it_was_accepted(
    autojump_clock: MockClock, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply has arrived, and another task cancels while others run."""
    async with running(FakeEngine(before_step=slow)) as runtime:
        answer = await runtime.send(generate("a", 4, max_tokens=5), told.append)
        await wait_all_tasks_blocked()

        async def others_run() -> None:
            answer.cancel()

        with monkeypatch.context() as patched:
            patched.setattr(trio.lowlevel, "checkpoint", others_run)
            with pytest.raises(RequestFailed) as failed:
                await answer.wait_accepted()
        assert failed.value.problem.code == "cancelled"
    assert [(one.reason, one.code) for one in told] == [("abort", "cancelled")]


@pytest.mark.parametrize(
    ("limits", "code", "admitted"),
    [
        (Timeouts(queue_s=0.6), "queue_timeout", False),
        (Timeouts(first_token_s=0.1), "first_token_timeout", True),
        (Timeouts(request_s=0.6), "request_timeout", False),
    ],
)
async def test_a_limit_is_an_error_with_its_code(
    autojump_clock: MockClock, told: Told, limits: Timeouts, code: str, admitted: bool
) -> None:
    async with running(FakeEngine(before_step=slow), completion_batch_size=1) as runtime:
        others = [await runtime.submit(generate("first", max_tokens=9))] if not admitted else []
        answer = await runtime.submit(generate(max_tokens=9, timeouts=limits), told.append)
        with pytest.raises(RequestFailed):
            await read(answer)
        for other in others:
            other.close()
    [record] = told
    assert (record.reason, record.code, record.admitted_at is not None) == ("error", code, admitted)


async def test_whoever_crashes_the_engine_ends_with_an_error_and_is_refused_then(
    autojump_clock: MockClock, told: Told
) -> None:
    async with running(FakeEngine(dies=deadly)) as runtime:
        with await runtime.submit(generate(), told.append) as answer, pytest.raises(RequestFailed):
            await read(answer)
        with pytest.raises(RequestFailed) as refused:
            await runtime.submit(generate(), told.append)
        assert refused.value.problem.status == 422
    assert [(record.reason, record.code) for record in told] == [
        ("error", "request_crashes_engine"),
        ("refused", "request_crashes_engine"),
    ]


async def test_what_was_refused_is_told_too(autojump_clock: MockClock, told: Told) -> None:
    async with running(
        FakeEngine(before_step=slow), completion_batch_size=1, max_queue_size=0
    ) as runtime:
        empty = generate("empty", prompt=TextPrompt(""))
        with pytest.raises(RequestFailed):
            await runtime.submit(empty, told.append)
        with await runtime.submit(generate("first", max_tokens=100)) as answer:
            await answer.next()
            with pytest.raises(RequestFailed):
                await runtime.submit(generate("full"), told.append)
    with pytest.raises(RequestFailed):
        await runtime.submit(generate("late"), told.append)
    assert [(one.request_id, one.reason, one.code) for one in told] == [
        ("empty", "refused", "empty_prompt"),
        ("full", "refused", "queue_full"),
        ("late", "refused", "draining"),
    ]


async def test_who_leaves_before_it_was_accepted(autojump_clock: MockClock, told: Told) -> None:
    async with running() as runtime:
        with trio.CancelScope() as scope:
            scope.cancel()
            await runtime.submit(generate(), told.append)
    assert [one.reason for one in told] == ["abort"]


async def test_an_embedding_has_an_end_and_no_tokens(autojump_clock: MockClock, told: Told) -> None:
    async with running() as runtime:
        answer = await runtime.submit(generate(embed=True, max_tokens=1), told.append)
        await read(answer)
    [record] = told
    assert (record.reason, record.generated_tokens, record.first_token_s) == ("stop", 0, None)


async def test_what_was_cached(autojump_clock: MockClock, told: Told) -> None:
    async with running() as runtime:
        for name in "ab":
            await read(await runtime.submit(generate(name, 200, max_tokens=2), told.append))
    assert [(one.prompt_tokens, one.cached_tokens, one.disk_tokens) for one in told] == [
        (200, 0, 0),
        (200, 199, 0),
    ]
