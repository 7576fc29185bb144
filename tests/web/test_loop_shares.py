"""Tenants share the event loop: a flood of one begins at a bounded pace beside others. Requests
take as long as the test says, by a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.fakes import FakeEngine
from tests.web.serving import STREAM, eventually, exchange, get, post, serving
from tests.web.test_key_rights import bearer, key_file
from trouper.protocol.plans import Plan
from trouper.web.http import loop_shares
from trouper.web.http.loop_shares import BURST_S, MAX_DEBT_S, SHARE, LoopShares, Meter, metered


class World:
    """Tenants whose requests have the loop for `costs_s`, and when each of them began."""

    def __init__(self, costs_s: float) -> None:
        self.shares = LoopShares()
        self.costs_s = costs_s
        self.began: dict[str, list[float]] = {}

    async def ask(self, tenant: str, *, waits: bool = True) -> None:
        meter = Meter()
        await self.shares.begin(tenant, meter, waits=waits)
        try:
            self.began.setdefault(tenant, []).append(trio.current_time())
            meter.spent_s += self.costs_s
            self.shares.close(meter)
        finally:
            self.shares.end(tenant)

    async def flood(self, tenant: str) -> None:
        while True:
            await self.ask(tenant)
            await trio.sleep(0.001)

    async def stay(self, tenant: str) -> None:
        """Have one request in progress for ever."""
        await self.shares.begin(tenant, Meter(), waits=True)
        await trio.sleep_forever()


@asynccontextmanager
async def with_others(world: World, *others: str) -> AsyncIterator[trio.Nursery]:
    """A nursery in which each of the others has one request in progress."""
    async with trio.open_nursery() as nursery:
        for other in others:
            nursery.start_soon(world.stay, other)
        await wait_all_tasks_blocked()
        yield nursery
        nursery.cancel_scope.cancel(reason="the test")


async def flooded(*others: str, costs_s: float = 0.01, seconds: float = 20.0) -> World:
    """Return a world where one tenant floods with five clients, beside others with a request."""
    world = World(costs_s)
    async with with_others(world, *others) as nursery:
        for _ in range(5):
            nursery.start_soon(world.flood, "flood")
        await trio.sleep(seconds)
    return world


async def test_a_tenant_alone_waits_for_nothing(autojump_clock: MockClock) -> None:
    world = await flooded(costs_s=1.0, seconds=0.1)
    assert len(world.began["flood"]) > 5 * 0.1 / 0.002


async def test_a_flood_takes_its_share_of_the_loop(autojump_clock: MockClock) -> None:
    world = await flooded("other")
    assert len(world.began["flood"]) * world.costs_s == pytest.approx(20 * SHARE + BURST_S, rel=0.1)


async def test_others_begin_at_once_during_a_flood(autojump_clock: MockClock) -> None:
    world = World(0.01)
    async with with_others(world, "stream") as nursery:
        for _ in range(20):
            nursery.start_soon(world.flood, "flood")
        await trio.sleep(5)
        began = trio.current_time()
        for _ in range(4):
            await world.ask("other")
        assert trio.current_time() == began


async def test_requests_of_one_tenant_begin_in_their_order(autojump_clock: MockClock) -> None:
    world, order = World(0.1), list[int]()

    async def numbered(number: int) -> None:
        await world.ask("many")
        order.append(number)

    async with with_others(world, "other") as nursery:
        for number in range(6):
            nursery.start_soon(numbered, number)
            await wait_all_tasks_blocked()
        await trio.sleep(60)
    assert order == sorted(order) and len(order) == 6


async def test_a_supervisor_never_waits(autojump_clock: MockClock) -> None:
    world = World(1.0)
    async with with_others(world, "other"):
        await world.ask("many")
        began = trio.current_time()
        await world.ask("many", waits=False)
        assert trio.current_time() == began
        await world.ask("many")
        assert trio.current_time() - began == pytest.approx((MAX_DEBT_S - BURST_S) / SHARE)


async def test_whoever_leaves_while_it_waits_is_forgotten(autojump_clock: MockClock) -> None:
    world = World(1.0)
    async with with_others(world, "other"):
        await world.ask("many")
        with trio.move_on_after(0.5):
            await world.ask("many")
        assert set(world.shares._accounts) == {"other", "many"}
        await trio.sleep(MAX_DEBT_S / SHARE)
        await world.ask("many", waits=False)
    assert world.shares._in_progress == 1  # That of "other", which never ends.


async def test_tenants_that_come_once_are_forgotten(autojump_clock: MockClock) -> None:
    """Without keys each address is a tenant."""
    world = World(0.01)
    for address in range(100):
        await world.ask(str(address))
        await trio.sleep(1)
    assert len(world.shares._accounts) == 1


async def test_a_meter_counts_the_time_on_the_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loop_shares, "perf_counter", lambda: now[0])

    async def work() -> str:
        now[0] += 1
        await trio.lowlevel.checkpoint()
        now[0] += 2
        return "done"

    async def other() -> None:
        now[0] += 100
        await trio.lowlevel.checkpoint()
        now[0] += 100

    meter = Meter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        assert await metered(work(), meter) == "done"
    assert meter.spent_s == 3
    with pytest.raises(ValueError, match="as it is"):
        await metered(_failing(), meter)


async def _failing() -> None:
    await trio.lowlevel.checkpoint()
    raise ValueError("as it is")


async def test_a_cancellation_reaches_metered_work(autojump_clock: MockClock) -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await trio.sleep_forever()
        finally:
            ended = True

    with trio.move_on_after(1) as scope:
        await metered(work(), Meter())
    assert scope.cancelled_caught and ended


async def test_errors_of_one_key_wait_during_a_request_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over real sockets, where no time at all is left to a tenant beside others."""
    still = trio.Event()

    async def before(_: Plan) -> None:
        await still.wait()

    file = key_file(tmp_path, "sk-a name=a\nsk-b name=b\n")
    monkeypatch.setattr(loop_shares, "BURST_S", 0.0)
    monkeypatch.setattr(loop_shares, "SHARE", 1e-9)
    nothing = get("/v1/none", bearer("sk-a"))
    async with serving(FakeEngine(before_step=before), api_key_file=file) as served:
        for _ in range(2):
            assert (await exchange(served, nothing))[0] == 404, "alone"
        async with await served.connect() as other:
            await other.send_all(post("/v1/completions", STREAM, bearer("sk-b")))
            await eventually(lambda: served.busy == 1)
            with trio.move_on_after(0.1) as scope:
                await exchange(served, nothing)
            assert scope.cancelled_caught
            assert (await exchange(served, get("/livez", bearer("sk-a"))))[0] == 200
            assert (await exchange(served, get("/v1/models", bearer("sk-b"))))[0] == 200
            still.set()
