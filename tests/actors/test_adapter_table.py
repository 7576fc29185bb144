"""An adapter that is unloaded is refused at once, and goes when the requests that have it have ended, those without a row, too."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from trouper.actors.runtime.adapter_table import AdapterTable
from trouper.protocol.model import AdapterCard


def card(name: str) -> AdapterCard:
    return AdapterCard(name=name, directory=f"/{name}", rank=4, fingerprint=f"content of {name}")


async def test_it_goes_when_its_last_request_has_ended() -> None:
    table, removed = AdapterTable("base", [card("one"), card("two")]), trio.Event()

    async def remove() -> None:
        await table.remove("one")
        removed.set()

    assert table.begin("one") == table.begin("one") == card("one") and table.begin("two") == card("two")
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
