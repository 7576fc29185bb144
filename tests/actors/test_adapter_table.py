"""An adapter that is unloaded is refused at once, and goes when the requests that have it have
ended, those without a row, too."""

from __future__ import annotations

import attrs
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.bench import Opened, generate, running
from tests.fakes import FakeEngine
from trouper.actors.runtime.adapter_table import MAX_UNLOADED, AdapterTable
from trouper.protocol.model import AdapterCard
from trouper.protocol.plans import Plan


def card(name: str) -> AdapterCard:
    return AdapterCard(name=name, directory=f"/{name}", rank=4, fingerprint=f"content of {name}")


async def test_it_goes_when_its_last_request_has_ended() -> None:
    table, removed = AdapterTable("base", [card("one"), card("two")]), trio.Event()

    async def remove() -> None:
        await table.remove("one")
        removed.set()

    assert table.begin("one") == table.begin("one") == card("one") and table.begin("two") == card(
        "two"
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(remove)
        await wait_all_tasks_blocked()
        assert table.begin("one") is None and table.cards == (card("two"),)
        assert "it has 'two'" in table.refusal("one").problem.message
        table.end("two")
        table.end("one")
        await wait_all_tasks_blocked()
        assert not removed.is_set()
        table.end("one")
    assert removed.is_set() and table.begin("two") == card("two")


async def test_one_that_nobody_has_goes_at_once_and_may_come_again() -> None:
    table = AdapterTable("base", [card("one")])
    await table.remove("one")
    assert table.cards == () and table.begin("") is None
    table.add(card("one"))
    assert table.begin("one") == card("one")


async def test_the_names_of_those_that_were_unloaded_are_remembered_within_a_bound() -> None:
    table = AdapterTable("base")
    for number in (*range(MAX_UNLOADED + 1), 5):
        await table.remove(str(number))
    assert len(table.unloaded) == MAX_UNLOADED == len(set(table.unloaded))
    assert table.unloaded[0] == "1" and table.unloaded[-1] == "5"


@attrs.define(eq=False)
class Noting(FakeEngine):
    """Notes when an adapter is taken away."""

    unloaded_at: float = 0.0

    async def unload_adapter(self, name: str) -> int:
        self.unloaded_at = trio.current_time()
        return await super().unload_adapter(name)


async def test_it_goes_after_the_plans_that_admit_a_row_with_it(
    opened: Opened, autojump_clock: MockClock
) -> None:
    """Its client has left, but the plan is on its way: the row's KV would be computed without the
    adapter, and be kept as if with it."""
    admitted_at = list[float]()

    async def slow(plan: Plan) -> None:
        await trio.sleep(1)
        admitted_at.extend(trio.current_time() for admit in plan.admit if admit.adapter)

    engine = Noting(before_step=slow)
    async with running(engine) as runtime:
        await runtime.load_adapter("one", "/one")
        with await runtime.submit(generate("beside", max_tokens=9)) as beside:
            await beside.next()
            answer = await runtime.submit(generate("with", adapter="one", max_tokens=9))
            answer.close()
            await runtime.unload_adapter("one")
            async for _ in beside:
                pass
    assert admitted_at and admitted_at[0] < engine.unloaded_at
