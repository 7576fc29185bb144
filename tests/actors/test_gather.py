"""An idle engine gathers a burst, and a lone request pays no more than the gap."""

from __future__ import annotations

from collections.abc import Sequence

import trio
from trio.testing import MockClock

from tests.fakes import FakeEngine
from trouper import Generate, Runtime, Settings, TextPrompt, run_runtime
from trouper.actors.scheduler import VAIN
from trouper.protocol.plans import Plan


async def ask(runtime: Runtime, name: str, after_s: float) -> None:
    """Prompts share nothing, or they would wait for the first."""
    await trio.sleep(after_s)
    with await runtime.submit(
        Generate(request_id=name, prompt=TextPrompt(f"{name} says"), max_tokens=3)
    ) as answer:
        async for _ in answer:
            pass


async def admitted_in_each_plan(
    arrivals_s: Sequence[float], gather_ms: float, step_s: float = 0.0
) -> list[int]:
    async def before_step(_: Plan) -> None:
        await trio.sleep(step_s)

    engine = FakeEngine(before_step=before_step)
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(
            _run, Settings(no_ssd=True, gather_ms=gather_ms), engine
        )
        async with trio.open_nursery() as clients:
            for place, after_s in enumerate(arrivals_s):
                clients.start_soon(ask, runtime, str(place), after_s)
        await runtime.drain(10)
    return [len(plan.admit) for plan in engine.plans_seen if plan.admit]


async def _run(
    settings: Settings, engine: FakeEngine, *, task_status: trio.TaskStatus[Runtime]
) -> None:
    await run_runtime(settings, engine=engine, task_status=task_status)


async def test_a_burst_begins_together(autojump_clock: MockClock) -> None:
    assert await admitted_in_each_plan([1.0, 1.002, 1.004], gather_ms=3) == [3]


async def test_one_that_comes_later_is_not_waited_for(autojump_clock: MockClock) -> None:
    assert await admitted_in_each_plan([1.0, 1.004], gather_ms=3) == [1, 1]


async def test_without_gathering_each_begins_at_once(autojump_clock: MockClock) -> None:
    assert await admitted_in_each_plan([1.0, 1.002], gather_ms=0) == [1, 1]


async def test_a_steady_trickle_is_waited_for_50_ms_at_most(autojump_clock: MockClock) -> None:
    first, *_ = await admitted_in_each_plan([1 + 0.002 * place for place in range(40)], gather_ms=3)
    assert 24 <= first <= 27


async def test_after_a_few_that_came_alone_none_is_waited_for(autojump_clock: MockClock) -> None:
    """A pair that is 2 ms apart shows whether the first of it waits."""
    alone = [float(second) for second in range(1, 1 + VAIN)]
    assert await admitted_in_each_plan([*alone, 50.0, 50.002], gather_ms=3) == [*[1] * VAIN, 1, 1]
    assert await admitted_in_each_plan([*alone[1:], 50.0, 50.002], gather_ms=3) == [
        *[1] * (VAIN - 1),
        2,
    ]


async def test_once_they_come_together_again_they_are_waited_for(autojump_clock: MockClock) -> None:
    alone = [float(second) for second in range(1, 1 + VAIN)]
    pairs = [50.0, 50.002, 60.0, 60.002]
    assert (await admitted_in_each_plan([*alone, *pairs], gather_ms=3, step_s=0.01))[-1] == 2


async def test_quick_answers_one_after_another_came_alone(autojump_clock: MockClock) -> None:
    """A client that asks for one embedding after another has each within milliseconds, and waited
    in vain for company each time."""
    alone = [1 + 0.04 * place for place in range(VAIN)]
    assert await admitted_in_each_plan([*alone, 1.2, 1.202], gather_ms=3) == [*[1] * VAIN, 1, 1]
