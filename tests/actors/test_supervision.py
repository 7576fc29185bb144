"""Restarts: how often, how fast, and what is said of them. Of one actor, and of the whole graph."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors.bench import Opened, generate, running
from tests.fakes import FakeEngine
from trouper import Answer, RequestFailed, Settings, run_runtime
from trouper.actors.runtime.supervision import CrashCount, RestartLimit, innermost, supervise
from trouper.actors.scheduling.crash_attribution import UNEXPLAINED, Content, Verdict
from trouper.protocol.health import ActorStats
from trouper.protocol.model import MemoryStats
from trouper.protocol.plans import Plan
from trouper.protocol.problems import ActorFailed
from trouper.protocol.watch import Watch


class Crash(Exception):
    """Simulated."""


@attrs.define(eq=False)
class Fragile:
    """Crashes at the given moments after it was started; then it lives."""

    crashes_after_s: list[float]
    starts: list[float] = attrs.field(factory=list)

    async def run(self) -> None:
        self.starts.append(trio.current_time())
        if len(self.starts) <= len(self.crashes_after_s):
            await trio.sleep(self.crashes_after_s[len(self.starts) - 1])
            raise Crash("boom")


async def test_what_ends_by_itself_is_not_started_again(autojump_clock: MockClock) -> None:
    actor, stats = Fragile([]), Watch(ActorStats(name="it"))
    await supervise(actor.run, stats, RestartLimit(), needed=True)
    assert (len(actor.starts), stats.latest.state, stats.latest.restarts) == (1, "stopped", 0)


async def test_each_restart_waits_twice_as_long(autojump_clock: MockClock) -> None:
    actor, stats = Fragile([0, 0, 0]), Watch(ActorStats(name="it"))
    await supervise(actor.run, stats, RestartLimit(max_crashes=3, pause_s=1), needed=True)
    assert actor.starts == [0, 1, 3, 7]
    assert (stats.latest.restarts, stats.latest.last_error) == (3, "Crash: boom")


async def test_a_fourth_crash_within_a_minute_goes_up(autojump_clock: MockClock) -> None:
    actor, stats = Fragile([0] * 9), Watch(ActorStats(name="it"))
    with pytest.raises(
        ActorFailed, match="it crashed 4 times within 60 s, at last with Crash: boom"
    ):
        await supervise(actor.run, stats, RestartLimit(), needed=True)
    assert (len(actor.starts), stats.latest.state) == (4, "failed")


async def test_what_the_server_can_do_without_ends_degraded_and_says_so(
    autojump_clock: MockClock,
) -> None:
    actor, stats = Fragile([0] * 9), Watch(ActorStats(name="it"))
    await supervise(actor.run, stats, RestartLimit(), needed=False)
    assert (len(actor.starts), stats.latest.state, stats.latest.last_error) == (
        4,
        "degraded",
        "Crash: boom",
    )


async def test_crashes_far_apart_are_forgiven(autojump_clock: MockClock) -> None:
    actor, stats = Fragile([30] * 9), Watch(ActorStats(name="it"))
    await supervise(actor.run, stats, RestartLimit(), needed=True)
    assert (len(actor.starts), stats.latest.state) == (10, "stopped")


async def test_a_cancel_is_not_a_crash(autojump_clock: MockClock) -> None:
    stats = Watch(ActorStats(name="it"))
    with trio.move_on_after(1):
        await supervise(trio.sleep_forever, stats, RestartLimit(), needed=True)
    assert (stats.latest.state, stats.latest.restarts) == ("running", 0)


def test_the_innermost_error_names_the_cause() -> None:
    cause = Crash("why")
    nested = ExceptionGroup("", [trio.EndOfChannel(), ExceptionGroup("", [cause, ValueError()])])
    assert innermost(nested) is cause, "how the others of the group hear of it is none"
    ends = trio.EndOfChannel()
    assert innermost(ExceptionGroup("", [ends])) is ends


def test_a_crash_that_was_explained_does_not_count_any_more() -> None:
    one, other = Content(b"one"), Content(b"other")
    count = CrashCount(RestartLimit(max_crashes=1))
    for at in range(10):
        count.add(Verdict(suspects=frozenset({one, other})), at)
        assert not count.too_many
        count.add(Verdict(counts=False, convicted=one), at)
        assert len(count) == 0
    count.add(Verdict(suspects=frozenset({other})), 20)
    count.add(Verdict(counts=False, convicted=one), 21)
    assert len(count) == 1, "somebody else's"
    count.add(UNEXPLAINED, 22)
    assert count.too_many
    count.add(UNEXPLAINED, 90)
    assert not count.too_many, "crashes far apart are forgiven"


async def test_a_crash_is_not_kept_while_the_next_one_runs(autojump_clock: MockClock) -> None:
    """Its traceback holds the engine's frames, and with them all the rows' KV."""
    crashes = list[weakref.ref[Crash]]()
    kept = list[object]()

    async def run() -> None:
        await trio.sleep(1)
        gc.collect()
        kept.extend(crash() for crash in crashes)
        if not crashes:
            crash = Crash("boom")
            crashes.append(weakref.ref(crash))
            try:
                raise crash
            finally:
                del crash

    logging.disable(logging.CRITICAL)  # What pytest captures keeps it, too.
    try:
        await supervise(run, Watch(ActorStats(name="it")), RestartLimit(), needed=True)
    finally:
        logging.disable(logging.NOTSET)
    assert kept == [None]


async def test_whoever_judges_decides_what_counts(autojump_clock: MockClock) -> None:
    actor, stats = Fragile([0] * 9), Watch(ActorStats(name="it"))
    judged: list[BaseException] = []

    def judge(crash: BaseException) -> Verdict:
        judged.append(crash)
        return Verdict(counts=False)

    await supervise(actor.run, stats, RestartLimit(pause_s=1), needed=True, judge=judge)
    assert actor.starts == list(range(10)), "and the pause does not grow"
    assert [str(crash) for crash in judged] == ["boom"] * 9


# -- in the graph --------------------------------------------------------------------------------


async def tokens_of(answer: Answer) -> list[int]:
    with answer:
        return [token async for delta in answer for token in delta.tokens]


def crashing_engine(*steps: int) -> FakeEngine:
    """The device dies at these steps with work, counted over its whole life."""
    count = iter(range(10**9))

    async def before_step(_: Plan) -> None:
        await trio.sleep(0.01)
        if next(count) in steps:
            raise Crash("the device died")

    return FakeEngine(before_step=before_step)


async def test_r13_after_a_crash_every_answer_goes_on(
    opened: Opened, autojump_clock: MockClock
) -> None:
    """Each with the tokens that it would have had; readiness is 503 for the pause alone."""
    async with running(FakeEngine()) as runtime:
        wanted = [
            await tokens_of(await runtime.submit(generate(str(n), tokens=n + 1, max_tokens=90)))
            for n in range(8)
        ]
    async with running(crashing_engine(40)) as runtime:
        answers = [
            await runtime.submit(generate(str(n), tokens=n + 1, max_tokens=90)) for n in range(8)
        ]
        statuses = set[str]()

        async def watch() -> None:
            while True:
                statuses.add(runtime.health().status)
                await trio.sleep(0.01)

        async with trio.open_nursery() as watching:
            watching.start_soon(watch)
            assert [await tokens_of(answer) for answer in answers] == wanted
            watching.cancel_scope.cancel()
        assert statuses == {"ok", "restarting"}
        assert runtime.health().ready
        stats = runtime.health().scheduler
        assert (stats.recovery.crashes, stats.recovery.resumed, stats.recovery.convicted) == (
            1,
            8,
            0,
        )
        assert (stats.requests_completed, stats.requests_errored) == (8, 0)
        assert runtime.health().actors[1].restarts == 1


async def test_a_device_that_is_gone_ends_the_runtime_and_blames_nobody(
    opened: Opened, autojump_clock: MockClock
) -> None:
    """The engine fails to prove itself before anybody is tried."""
    engine = crashing_engine(*range(2, 100))
    problems = []
    with pytest.raises(ExceptionGroup) as up:  # noqa: PT012
        async with trio.open_nursery() as nursery:
            start = partial(run_runtime, Settings(no_ssd=True), engine=engine)
            runtime = await nursery.start(start)
            with trio.CancelScope(shield=True):
                answers = [await runtime.submit(generate(str(n))) for n in range(4)]
                for answer in answers:
                    with answer, pytest.raises(RequestFailed) as failed:
                        await tokens_of(answer)
                    problems.append(failed.value.problem.code)
                with pytest.raises(RequestFailed) as failed:
                    await runtime.submit(generate())
                problems.append(failed.value.problem.code)
    assert up.group_contains(
        ActorFailed, match="crashed 4 times within 60 s, at last with Crash: the device died"
    )
    assert problems == ["engine_stopped"] * 4 + ["draining"]
    stats = runtime.health().scheduler
    assert (stats.recovery.convicted, stats.requests_errored) == (0, 4)


async def test_a_janitor_that_crashed_is_back_and_the_writer_still_hears_it(
    opened: Opened, autojump_clock: MockClock
) -> None:
    """Its channel to the writer must outlive it."""
    looks = iter(range(10**9))

    class Engine(FakeEngine):
        def memory(self) -> MemoryStats:
            if next(looks) == 3:
                raise Crash("no memory facts today")
            return super().memory()

    async with running(Engine(), janitor_interval_s=1) as runtime:
        await trio.sleep(100)
        _, _, janitor, writer = runtime.health().actors
        assert (janitor.state, janitor.restarts) == ("running", 1)
        assert (writer.state, writer.restarts) == ("running", 0)


async def test_without_its_janitor_the_server_goes_on(
    opened: Opened, autojump_clock: MockClock
) -> None:
    class Engine(FakeEngine):
        def memory(self) -> MemoryStats:
            raise Crash("never")

    async with running(Engine()) as runtime:
        await trio.sleep(100)
        assert runtime.health().actors[2].state == "degraded"
        assert runtime.health().ready
        with await runtime.submit(generate(max_tokens=2)) as answer:
            assert len([delta async for delta in answer]) == 2
