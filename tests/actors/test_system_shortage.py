"""The whole graph around a fake engine whose process is short of descriptors: no crash counts, and
no request is to blame."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from trio.testing import MockClock

from tests.actors.bench import generate, running
from tests.actors.test_recovery import problem_of, recovery_of, slow, tokens_of
from tests.fakes import FakeEngine, FakeRow
from trouper import RequestFailed, TokenPrompt
from trouper.actors.scheduling.allocation_failures import AGAIN_S, SystemShortages
from trouper.actors.scheduling.crash_attribution import Content, Involved, Standing
from trouper.protocol.problems import SystemShortage

pytestmark = pytest.mark.usefixtures("opened")
EASY = TokenPrompt((1, 2))
NEEDY = 200
"""First token of a prompt whose step needs a new kernel."""


def needs_kernel(rows: Sequence[FakeRow]) -> bool:
    return any(row.prompt[0] == NEEDY for row in rows)


async def test_a_request_for_which_there_is_no_descriptor_is_answered_503(
    autojump_clock: MockClock,
) -> None:
    """Ten times four crashes would end the process. A request beside it has all of its tokens."""
    engine = FakeEngine(before_step=slow, dies=needs_kernel, death=SystemShortage)
    async with running(engine, speculation="off") as runtime:
        for _ in range(10):
            other = await runtime.submit(generate("other", prompt=EASY, max_tokens=20))
            needy = await runtime.submit(generate("needy", prompt=TokenPrompt((NEEDY, 2))))
            with pytest.raises(RequestFailed) as failed:
                await tokens_of(needy)
            problem = failed.value.problem
            assert (problem.status, problem.code) == (503, "system_shortage")
            assert "descriptors" in problem.message and "ulimit -n" in problem.message
            assert len(await tokens_of(other)) == 20
        stats = recovery_of(runtime)
        assert (stats.crashes, stats.convicted, stats.quarantined, stats.apart) == (20, 0, 0, False)
        assert runtime.health().ready
        engine.death = EOFError
        assert await problem_of(await runtime.submit(generate(prompt=TokenPrompt((NEEDY, 2))))) == (
            "request_crashes_engine"
        ), "an error of another kind is one"


async def test_a_moment_without_descriptors_costs_no_request(autojump_clock: MockClock) -> None:
    moments = iter([True])
    engine = FakeEngine(before_step=slow, dies=lambda _: next(moments, False), death=SystemShortage)
    async with running(engine, speculation="off") as runtime:
        assert len(await tokens_of(await runtime.submit(generate(max_tokens=9)))) == 9
        assert recovery_of(runtime).crashes == 1


def row(name: str, *, fresh: bool) -> Involved:
    standing = Standing(Content(name.encode()), b"")
    return Involved(standing, fresh=fresh, output_tokens=0, planned_tokens=1)


def test_who_had_new_work_is_tried_alone_and_ends_if_that_fails() -> None:
    old, new, newer = row("old", fresh=False), row("new", fresh=True), row("newer", fresh=True)
    shortages = SystemShortages()
    shortages.failed([old, new, newer], now=0)
    assert [one.standing.suspect for one in (old, new, newer)] == [False, True, True]
    assert not shortages.refuses(new.standing)
    new.standing.suspect = False  # It has passed.
    shortages.failed([newer], now=1)
    assert [shortages.refuses(one.standing) for one in (old, new, newer)] == [False, False, True]
    for now, ends in ((2, False), (3, True)):
        shortages.failed([old], now)
        assert shortages.refuses(old.standing) == ends, "else it would go on for ever"


def test_a_shortage_a_minute_later_is_another_one() -> None:
    one, shortages = row("one", fresh=True), SystemShortages()
    for now in (0, AGAIN_S, 2 * AGAIN_S):
        shortages.failed([one], now)
        assert not shortages.refuses(one.standing)


async def test_an_engine_without_descriptors_for_its_own_test_is_tried_again(
    autojump_clock: MockClock,
) -> None:
    """Nobody's plan fails more often than crashes may, and then requests go on."""
    moments = iter([True] * 12)
    engine = FakeEngine(before_step=slow, dies=lambda _: next(moments, False), death=SystemShortage)
    async with running(engine, speculation="off") as runtime:
        first = await runtime.submit(generate(max_tokens=9))
        assert len(await tokens_of(first)) == 9
        assert recovery_of(runtime).crashes == 12
