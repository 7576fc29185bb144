"""The whole graph around a fake engine that crashes: what goes on, what is refused, and what a row
that leaves comes back with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from tests.actors.bench import Opened, code, generate, heard, running, scheduling
from tests.fakes import PROOF, UNCUTTABLE, Dies, FakeEngine, FakeRow
from trouper import Answer, RequestFailed, Runtime, Settings, TokenPrompt, run_runtime
from trouper.protocol.health import RecoveryStats
from trouper.protocol.kv import KvLayout
from trouper.protocol.plans import Plan

pytestmark = pytest.mark.usefixtures("opened")
BAD = (7, 7, 7)


async def slow(_: Plan) -> None:
    await trio.sleep(0.01)


async def tokens_of(answer: Answer) -> list[int]:
    with answer:
        return [token async for delta in answer for token in delta.tokens]


async def problem_of(answer: Answer) -> str | None:
    with pytest.raises(RequestFailed) as failed:
        await tokens_of(answer)
    return failed.value.problem.code


def has_long_row(rows: Sequence[FakeRow], *, embed: bool) -> bool:
    return any(row.embed == embed and len(row.kv) > 30 for row in rows)


def once(at: Callable[[Sequence[FakeRow]], bool]) -> Dies:
    """The first time alone."""
    left = [True]

    def dies(rows: Sequence[FakeRow]) -> bool:
        if left and at(rows):
            left.clear()
            return True
        return False

    return dies


def bad(rows: Sequence[FakeRow]) -> bool:
    return any(row.prompt[:3] == BAD for row in rows)


def recovery_of(runtime: Runtime) -> RecoveryStats:
    return runtime.health().scheduler.recovery


async def test_the_rest_goes_on_and_the_same_content_never_reaches_the_engine_again(
    autojump_clock: MockClock,
) -> None:
    async with running(FakeEngine(before_step=slow, dies=bad)) as runtime:
        streams = [
            await runtime.submit(generate(str(n), tokens=n + 4, max_tokens=60)) for n in range(5)
        ]
        for stream in streams:
            await stream.next()
        for _ in range(3):
            with pytest.raises(RequestFailed) as failed:
                await tokens_of(await runtime.submit(generate(prompt=TokenPrompt((*BAD, 1)))))
            assert (failed.value.problem.status, failed.value.problem.code) == (
                422,
                "request_crashes_engine",
            )
        assert [len(await tokens_of(stream)) for stream in streams] == [59] * 5
        stats = recovery_of(runtime)
        assert (stats.crashes, stats.convicted, stats.quarantined, stats.refused) == (2, 1, 1, 3)
        assert runtime.health().scheduler.requests_errored == 3


async def test_another_prompt_of_the_same_kind_is_refused_only_when_it_has_shown_itself(
    autojump_clock: MockClock,
) -> None:
    async with running(FakeEngine(dies=bad)) as runtime:
        for n in range(12):
            assert await problem_of(
                await runtime.submit(generate(prompt=TokenPrompt((*BAD, n))))
            ) == ("request_crashes_engine")
        assert runtime.health().ready, "however many there are: each was explained"
        assert recovery_of(runtime).convicted == 12


async def test_a_client_that_leaves_before_its_trial_is_tried_all_the_same(
    autojump_clock: MockClock,
) -> None:
    async with running(FakeEngine(before_step=slow, dies=bad)) as runtime:
        for n in range(8):
            with trio.move_on_after(0.2):  # It crashes at once, and the restart takes longer.
                await tokens_of(await runtime.submit(generate(prompt=TokenPrompt((*BAD, n)))))
            await trio.sleep(2)
        assert runtime.health().ready
        assert recovery_of(runtime).convicted == 8
        assert runtime.health().scheduler.active_sequences == 0


@pytest.mark.parametrize("position", [0, 1, 4])
async def test_tokens_stops_and_logprobs_go_on_exactly(
    position: int, autojump_clock: MockClock
) -> None:
    """A stop string over the place of the crash, half of a character, log-probabilities, an answer
    that ends there."""
    said = "añb the end".encode()

    def token_at(_: int, place: int) -> int:
        return said[place % len(said)]

    wishes = [
        generate("stop", stop=("b the",), max_tokens=30, logprobs=2),
        generate("length", max_tokens=position + 2),
        generate("ends", stop_token_ids=(said[position + 1],), max_tokens=30),
        generate("late", stop=("ñ",), min_tokens=9, max_tokens=20),
    ]
    async with running(FakeEngine(before_step=slow, token_at=token_at)) as runtime:
        wanted = [await whole(await runtime.submit(wish)) for wish in wishes]
    dies = once(
        lambda rows: len(rows) > 1 and any(row.position == position and row.begun for row in rows)
    )
    async with running(FakeEngine(before_step=slow, token_at=token_at, dies=dies)) as runtime:
        got: dict[int, object] = {}

        async def one(place: int) -> None:
            got[place] = await whole(await runtime.submit(wishes[place]))

        async with trio.open_nursery() as nursery:
            for place in range(len(wishes)):
                nursery.start_soon(one, place)
        assert [got[place] for place in range(len(wishes))] == wanted
        assert recovery_of(runtime).crashes == (position > 0)


async def whole(answer: Answer) -> object:
    with answer:
        deltas = [delta async for delta in answer]
    return (
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
        [at for delta in deltas for at in delta.logprobs],
        answer.finished,
        answer.prompt_logprobs,
        answer.embedding,
    )


async def test_embeddings_and_scores_start_again(autojump_clock: MockClock) -> None:
    wishes = [
        generate("embed", tokens=40, embed=True, max_tokens=1),
        generate("scores", tokens=40, prompt_logprobs=1, max_tokens=5),
    ]
    async with running(FakeEngine(before_step=slow), prefill_step_size=8) as runtime:
        wanted = [await whole(await runtime.submit(wish)) for wish in wishes]
    for kind in ("embed", "scores"):
        dies = once(partial(has_long_row, embed=kind == "embed"))
        async with running(FakeEngine(before_step=slow, dies=dies), prefill_step_size=8) as runtime:
            answers = [await runtime.submit(wish) for wish in wishes]
            assert [await whole(answer) for answer in answers] == wanted
            assert recovery_of(runtime).crashes == 1


async def test_scores_that_were_delivered_are_not_computed_again(autojump_clock: MockClock) -> None:
    wish = generate("scores", tokens=40, prompt_logprobs=1, max_tokens=9)
    dies = once(lambda rows: any(row.position == 4 for row in rows))
    async with running(FakeEngine(before_step=slow, dies=dies)) as runtime:
        answer = await runtime.submit(wish)
        assert len(await tokens_of(answer)) == 9
        assert len(answer.prompt_logprobs) == 39
        assert recovery_of(runtime).crashes == 1


@pytest.mark.parametrize("kv", [FakeEngine().kv, UNCUTTABLE])
async def test_a_row_that_makes_room_for_a_trial_resumes_from_its_own_blocks(
    kv: KvLayout, autojump_clock: MockClock
) -> None:
    """Both rows were in the crash: the first leaves the engine after its trial, and comes back with
    what it has."""
    engine = FakeEngine(
        before_step=slow,
        kv=kv,
        dies=once(lambda rows: sum(row.position > 20 for row in rows) > 1),
    )
    async with running(engine, block_size=4) as runtime:
        answers = [
            await runtime.submit(generate(str(n), prompt=TokenPrompt((n + 1,) * 50), max_tokens=60))
            for n in range(2)
        ]
        assert [len(await tokens_of(answer)) for answer in answers] == [60, 60]
        assert recovery_of(runtime).resumed == 2
    after = [
        plan for plan in engine.plans_seen if any(admit.num_output_tokens for admit in plan.admit)
    ]
    entries = [admit for plan in after for admit in plan.admit]
    assert len(entries) == 3, "each is tried, and one of them comes back"
    again = entries[-1]
    assert again.restore is not None
    assert again.restore.tokens >= len(again.prompt) // 4 - 4, (
        "all but its last token, or its last block"
    )


async def test_two_that_cannot_run_together_run_one_after_another(
    autojump_clock: MockClock,
) -> None:
    engine = FakeEngine(before_step=slow, dies=lambda rows: len(rows) > 1)
    async with running(engine) as runtime:
        answers = [
            await runtime.submit(generate(str(n), tokens=n + 2, max_tokens=30)) for n in range(6)
        ]
        assert [len(await tokens_of(answer)) for answer in answers] == [30] * 6
        stats = recovery_of(runtime)
        assert stats.apart
        assert (stats.convicted, stats.refused) == (0, 0)
        assert runtime.health().ready


async def test_one_that_bears_no_company_runs_alone_and_the_others_together(
    autojump_clock: MockClock,
) -> None:
    """A prompt of one token that joins others crashes some models."""
    engine = FakeEngine(
        before_step=slow,
        dies=lambda rows: len(rows) > 1 and any(row.prompt[0] == 9 for row in rows),
    )
    async with running(engine) as runtime:
        others = [
            await runtime.submit(generate(str(n), tokens=n + 2, max_tokens=80)) for n in range(3)
        ]
        for other in others:
            await other.next()
        odd = await runtime.submit(generate("odd", prompt=TokenPrompt((9, 9)), max_tokens=5))
        assert [len(await tokens_of(answer)) for answer in (odd, *others)] == [5, 79, 79, 79]
        stats = recovery_of(runtime)
        assert (stats.crashes, stats.convicted, stats.apart) == (2, 0, False)
        again = await runtime.submit(generate("odd", prompt=TokenPrompt((9, 9)), max_tokens=5))
        other = await runtime.submit(generate(max_tokens=5))
        assert len(await tokens_of(again)) == len(await tokens_of(other)) == 5
        assert recovery_of(runtime).crashes == 2, "it is known"


async def test_a_drain_that_meets_a_crash_still_ends(autojump_clock: MockClock) -> None:
    """The scheduler that follows is told that no request comes any more."""
    dies = once(lambda rows: any(row.position == 10 for row in rows))
    async with trio.open_nursery() as nursery:
        engine = FakeEngine(before_step=slow, dies=dies)
        runtime: Runtime = await nursery.start(
            partial(run_runtime, Settings(no_ssd=True), engine=engine)
        )
        answer = await runtime.submit(generate(max_tokens=30))
        nursery.start_soon(runtime.drain, 60)
        assert len(await tokens_of(answer)) == 30
        began = trio.current_time()
        await runtime.finished.wait()
        assert trio.current_time() - began < 10
        assert recovery_of(runtime).crashes == 1


async def test_a_drain_that_runs_out_while_there_is_no_scheduler_answers_everybody(
    autojump_clock: MockClock,
) -> None:
    dies = once(lambda rows: any(row.position == 10 for row in rows))
    async with trio.open_nursery() as nursery:
        engine = FakeEngine(before_step=slow, dies=dies)
        runtime: Runtime = await nursery.start(
            partial(run_runtime, Settings(no_ssd=True), engine=engine)
        )
        answer = await runtime.submit(generate(max_tokens=3000))
        while not recovery_of(runtime).crashes:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert runtime.health().status == "restarting"
        assert not await runtime.drain(0.01)
        assert await problem_of(answer) == "engine_stopped"
        stats = runtime.health().scheduler
        assert (stats.total_requests, stats.requests_errored, stats.active_sequences) == (1, 1, 0)


async def test_the_engine_is_tried_before_any_request_is(autojump_clock: MockClock) -> None:
    engine = FakeEngine(
        before_step=slow, dies=once(lambda rows: any(row.position == 4 for row in rows))
    )
    async with running(engine) as runtime:
        assert len(await tokens_of(await runtime.submit(generate(max_tokens=9)))) == 9
    restart = next(
        place for place, plan in enumerate(engine.plans_seen) if place and plan.step == 0
    )
    first = engine.plans_seen[restart].admit[0]
    assert first.prompt == b"".join(token.to_bytes(4, "little") for token in PROOF)
    assert engine.plans_seen[restart + 1].drop == (first.row,)


async def test_a_scheduler_alone_without_recovery_ends_its_requests(
    opened: Opened, autojump_clock: MockClock
) -> None:
    """As with several ranks."""
    async with scheduling(opened) as bench:
        answer = await bench.ask()
        await bench.new_plans()
    assert code(heard(answer)) == "engine_stopped"
