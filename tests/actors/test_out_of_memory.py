"""The whole graph around a fake engine that has too little memory: no request is to blame, and all
have their answers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import trio
from trio.testing import MockClock

from tests.actors.bench import Opened, generate, running
from tests.actors.test_recovery import problem_of, recovery_of, slow, tokens_of
from tests.fakes import FakeEngine, FakeRow, immortal
from tests.sim.seeded import run_seeded
from trouper import Answer, RequestFailed, Runtime, TokenPrompt
from trouper.actors.scheduling.allocation_failures import BOUND_S, AllocationFailures
from trouper.actors.scheduling.crash_attribution import Content, Involved, Standing
from trouper.protocol.problems import OutOfDeviceMemory
from trouper.protocol.setting_fields import ByteSize

pytestmark = pytest.mark.usefixtures("opened")
HUGE = tuple(range(200))
FITTING = 100
"""Tokens of all rows for which the engine has memory."""


def holds_little(rows: Sequence[FakeRow]) -> bool:
    return sum(len(row.kv) + 1 for row in rows) > FITTING


def little() -> FakeEngine:
    return FakeEngine(before_step=slow, dies=holds_little, death=OutOfDeviceMemory)


async def all_of(runtime: Runtime, count: int) -> list[list[int]]:
    """Answers of prompts of eight tokens, asked at once."""
    answers = [
        await runtime.submit(
            generate(str(place), prompt=TokenPrompt((place, *range(1, 8))), max_tokens=20)
        )
        for place in range(count)
    ]
    found: dict[int, list[int]] = {}

    async def one(place: int, answer: Answer) -> None:
        found[place] = await tokens_of(answer)

    async with trio.open_nursery() as nursery:
        for place, answer in enumerate(answers):
            nursery.start_soon(one, place, answer)
    return [found[place] for place in range(count)]


async def test_rows_that_outgrow_the_device_all_have_their_answers(
    autojump_clock: MockClock,
) -> None:
    async with running(FakeEngine(before_step=slow), speculation="off") as runtime:
        wanted = await all_of(runtime, 12)
    async with running(little(), speculation="off", kv_memory=ByteSize(10**6)) as runtime:
        assert await all_of(runtime, 12) == wanted
        stats = recovery_of(runtime)
        assert 1 <= stats.crashes == stats.allocation_failures <= 4
        assert (stats.convicted, stats.quarantined, stats.refused, stats.apart) == (0, 0, 0, False)
        assert 0 < stats.bound_bytes == runtime.health().scheduler.kv_limit_bytes < 10**6


async def test_a_row_that_finds_no_memory_alone_is_answered_503_and_costs_the_others_nothing(
    autojump_clock: MockClock,
) -> None:
    async with running(little(), speculation="off", kv_memory=ByteSize(10**6)) as runtime:
        for _ in range(5):
            answer = await runtime.submit(generate(prompt=TokenPrompt(HUGE), max_tokens=2))
            with pytest.raises(RequestFailed) as failed:
                await tokens_of(answer)
            problem = failed.value.problem
            assert (problem.status, problem.code) == (503, "out_of_memory")
            assert "200 tokens" in problem.message
            assert "--prefill-step-size" in problem.message
            assert len((await all_of(runtime, 1))[0]) == 20
        stats = recovery_of(runtime)
        assert (stats.crashes, stats.allocation_failures, stats.quarantined, stats.bound_bytes) == (
            6,
            6,
            0,
            0,
        )
        assert runtime.health().ready


async def test_a_row_without_memory_ends_beside_rows_that_are_about_to_end(
    autojump_clock: MockClock,
) -> None:
    """It entered while the last token of another row was computed. Its step failed, that token was
    lost, and both began again, for ever."""

    def too_long(rows: Sequence[FakeRow]) -> bool:
        return any(len(row.prompt) > FITTING for row in rows)

    engine = FakeEngine(before_step=slow, dies=too_long, death=OutOfDeviceMemory)
    async with running(engine, speculation="off", kv_memory=ByteSize(10**6)) as runtime:
        short = await runtime.submit(
            generate("short", prompt=TokenPrompt((*range(8),)), max_tokens=3)
        )
        huge = await runtime.submit(generate("huge", prompt=TokenPrompt(HUGE), max_tokens=3))
        with trio.fail_after(BOUND_S / 2):
            assert len(await tokens_of(short)) == 3
            assert await problem_of(huge) == "out_of_memory"
        assert recovery_of(runtime).crashes <= 4


ROWS, REQUESTS, TIMES = 8, 24, 3


@pytest.mark.parametrize("seed", range(6))
def test_a_request_without_memory_beside_seven_others_costs_few_restarts(
    opened: Opened, seed: int
) -> None:
    """As a batch sends it: three times. At first the bound is halved until it runs alone; then it
    runs alone at once, so that the others lose nothing, and fails once."""
    random, steps = Random(seed), list[int]()
    heavy = random.randrange(REQUESTS)
    lengths = [200 if place == heavy else random.randint(20, 90) for place in range(REQUESTS)]
    prompts = [tuple(random.randrange(250) for _ in range(length)) for length in lengths]
    limits = [random.randint(2, 16) for _ in prompts]
    delays = [random.random() * random.choice([0, 0.1, 1]) for _ in prompts]

    def too_large(rows: Sequence[FakeRow]) -> bool:
        if fails := any(len(row.prompt) > 150 for row in rows):
            steps.append(len(rows))
        return fails

    async def answers(engine: FakeEngine) -> dict[int, object]:
        found = dict[int, object]()

        async def one(runtime: Runtime, place: int) -> None:
            await trio.sleep(delays[place])
            for time in range(TIMES):
                request = generate(
                    f"{place}, {time}",
                    prompt=TokenPrompt(prompts[place]),
                    max_tokens=limits[place],
                    ignore_eos=True,
                )
                try:
                    found[place] = await tokens_of(await runtime.submit(request))
                except RequestFailed as failed:
                    found[place] = failed.problem.code, time + 1
                    await trio.sleep(1)
                else:
                    return

        async with running(
            engine, speculation="off", kv_memory=ByteSize(10**6), completion_batch_size=ROWS
        ) as runtime:
            async with trio.open_nursery() as nursery:
                for place in range(REQUESTS):
                    nursery.start_soon(one, runtime, place)
            assert recovery_of(runtime).crashes == len(steps)
        return found

    wanted = run_seeded(seed, answers, FakeEngine(before_step=slow))
    found = run_seeded(
        seed, answers, FakeEngine(before_step=slow, dies=too_large, death=OutOfDeviceMemory)
    )
    assert found == {**wanted, heavy: ("out_of_memory", TIMES)}
    assert len(steps) <= ROWS and steps[1 - TIMES :] == [1] * (TIMES - 1), steps


async def test_the_bound_ends_with_its_time(autojump_clock: MockClock) -> None:
    async with running(little(), speculation="off", kv_memory=ByteSize(10**6)) as runtime:
        await all_of(runtime, 12)
        assert recovery_of(runtime).bound_bytes
        await trio.sleep(BOUND_S)
        await all_of(runtime, 1)
        assert recovery_of(runtime).bound_bytes == 0
        assert runtime.health().scheduler.kv_limit_bytes == 10**6


async def test_a_prompt_beyond_the_bound_is_answered_whole(autojump_clock: MockClock) -> None:
    """The bound ends in minutes; an answer that the context has no room for would be refused for
    good."""
    engine = little()
    async with running(engine, speculation="off", kv_memory=ByteSize(10**6)) as runtime:
        await all_of(runtime, 12)
        engine.dies = immortal
        bound = recovery_of(runtime).bound_bytes
        prompt = tuple(place % 250 for place in range(3000))
        assert 0 < bound < 100 * len(prompt)
        answer = await runtime.submit(generate(prompt=TokenPrompt(prompt), max_tokens=30))
        assert len(await tokens_of(answer)) == 30
        assert recovery_of(runtime).bound_bytes == bound


async def test_an_engine_without_memory_for_anything_ends(autojump_clock: MockClock) -> None:
    engine = FakeEngine(dies=bool, death=OutOfDeviceMemory)
    with pytest.RaisesGroup(
        pytest.RaisesExc(Exception, match="OutOfDeviceMemory"), flatten_subgroups=True
    ):
        async with running(engine) as runtime:
            assert await problem_of(await runtime.submit(generate())) == "engine_stopped"


def rows(*names: str) -> list[Involved]:
    return [
        Involved(
            Standing(Content(name.encode()), b""), fresh=True, output_tokens=0, planned_tokens=1
        )
        for name in names
    ]


def test_each_failure_halves_what_there_was_until_a_row_is_alone() -> None:
    failures, company, alone = AllocationFailures(), rows("a", "b"), rows("a")
    assert not failures.failed((), 1000, now=0), "nobody's: the engine is broken"
    assert failures.failed(company, 1000, now=0)
    assert failures.bound_bytes == 500
    assert failures.failed(company, 900, now=1), (
        "rows may have had less than the bound, but not more"
    )
    assert failures.bound_bytes == 250
    assert failures.failed(company, 100, now=2)
    assert failures.bound_bytes == 50
    assert failures.look(2 + BOUND_S - 1) == 50
    assert failures.failed(alone, 40, now=3)
    assert not failures.refuses(alone[0].standing), (
        "it may have come when another process had the memory"
    )
    assert failures.failed(alone, 40, now=4)
    assert failures.look(5) == 0, "it said nothing about the others"
    assert [failures.refuses(row.standing) for row in (*company, *alone, *alone)] == [
        False,
        False,
        True,
        False,
    ]


def test_a_content_without_memory_is_remembered_for_a_time() -> None:
    failures, company, [alone], [again] = AllocationFailures(), rows("b", "c"), rows("a"), rows("a")
    for now in (0.0, 1.0):
        assert not failures.runs_alone(alone.standing, now)
        failures.failed([alone], 1000, now)
    assert failures.refuses(alone.standing) and failures.bound_bytes is None
    assert failures.runs_alone(again.standing, BOUND_S) and not failures.runs_alone(
        company[0].standing, 2
    )
    failures.failed(company, 1000, now=2)
    failures.failed([again], 100, now=3)
    assert failures.refuses(again.standing), "at once"
    assert failures.look(3) == 500, "that of others stays"
    assert not failures.runs_alone(again.standing, 3 + BOUND_S)


def test_two_rows_that_fail_alone_one_after_the_other_are_not_refused() -> None:
    failures = AllocationFailures()
    for row in (*rows("a"), *rows("b"), *rows("a")):
        failures.failed([row], 10, now=0)
        assert not failures.refuses(row.standing)
