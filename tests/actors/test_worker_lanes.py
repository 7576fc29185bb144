"""Lanes of worker threads: clients take turns, and a full lane refuses those who fill it. Work
sleeps, by a virtual clock."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trouper import RequestFailed
from trouper.actors.runtime.worker_threads import (
    GRAMMAR_SHARE,
    DiskThread,
    FairLane,
    Lanes,
    LaneSize,
)
from trouper.protocol.problems import grammars_full, is_shortage
from trouper.web.batches.stored_files import on_disk

SLOW_S = 10.0
"""Time limit of a grammar."""
QUICK_S = 0.1
TEXTS = LaneSize(2)
GRAMMARS = LaneSize(2, of_client=1)


class World:
    """Clients of one lane, and what became of their work."""

    def __init__(self, size: LaneSize, max_waiting: int = 1000, share: float = inf) -> None:
        self.lane = FairLane(
            size, max_waiting, share, lambda: grammars_full(int(share), GRAMMAR_SHARE)
        )
        self.done: dict[str, list[float]] = {}
        """Times of each client's ends."""
        self.refused: dict[str, list[str | None]] = {}
        self.most_at_work = 0

    async def work(self, client: str, seconds: float) -> None:
        try:
            async with self.lane.turn(client):
                self.most_at_work = max(self.most_at_work, self.lane._at_work.total())
                await trio.sleep(seconds)
            self.done.setdefault(client, []).append(trio.current_time())
        except RequestFailed as failed:
            assert failed.problem.status == 429  # noqa: PT017
            self.refused.setdefault(client, []).append(failed.problem.code)

    async def send(self, nursery: trio.Nursery, client: str, count: int, seconds: float) -> None:
        for _ in range(count):
            nursery.start_soon(self.work, client, seconds)
            await wait_all_tasks_blocked()


async def test_a_grammar_does_not_wait_for_slow_ones_of_another_client(
    autojump_clock: MockClock,
) -> None:
    world, began = World(GRAMMARS), trio.current_time()
    async with trio.open_nursery() as nursery:
        await world.send(nursery, "hostile", 4, SLOW_S)
        await world.send(nursery, "other", 3, QUICK_S)
    assert world.done["other"] == pytest.approx([began + QUICK_S * n for n in (1, 2, 3)])
    assert world.done["hostile"] == pytest.approx([began + SLOW_S * n for n in (1, 2, 3, 4)])


async def test_a_grammar_waits_for_one_slow_one_at_most_where_others_have_all_threads(
    autojump_clock: MockClock,
) -> None:
    world, began = World(GRAMMARS), trio.current_time()
    async with trio.open_nursery() as nursery:
        for client in ("hostile", "worse"):
            await world.send(nursery, client, 4, SLOW_S)
        await world.send(nursery, "other", 1, QUICK_S)
    assert world.done["other"] == pytest.approx([began + SLOW_S + QUICK_S])
    assert world.most_at_work == 2


async def test_one_long_prompt_does_not_wait_for_two_hundred_of_another_client(
    autojump_clock: MockClock,
) -> None:
    world, began = World(TEXTS), trio.current_time()
    async with trio.open_nursery() as nursery:
        await world.send(nursery, "many", 200, 1.0)
        await world.send(nursery, "one", 1, 1.0)
    assert world.done["one"] == pytest.approx([began + 2.0])
    assert max(world.done["many"]) == pytest.approx(began + 101.0), (
        "one client alone has all threads"
    )


@pytest.mark.parametrize("clients", [2, 5])
async def test_clients_have_equal_shares(autojump_clock: MockClock, clients: int) -> None:
    world = World(TEXTS)
    async with trio.open_nursery() as nursery:
        # No two turns end at once: Trio draws whose task runs first.
        await world.send(nursery, "shifted", 1, 0.5)
        for client in map(str, range(clients)):
            await world.send(nursery, client, 40, 1.0)
        await trio.sleep(20.75)
        done = [len(world.done[client]) for client in map(str, range(clients))]
        assert max(done) - min(done) <= 2, "whoever came first had two turns before the others came"
        assert sum(done) == 40
        nursery.cancel_scope.cancel(reason="the test")


async def test_a_full_lane_refuses_the_client_that_fills_it(autojump_clock: MockClock) -> None:
    world = World(TEXTS, max_waiting=8)
    async with trio.open_nursery() as nursery:
        await world.send(nursery, "many", 12, 1.0)
        assert world.refused == {"many": ["queue_full"] * 2}
        await world.send(nursery, "one", 3, 1.0)
        assert world.refused == {"many": ["queue_full"] * 5}
        assert world.lane.waiting == 8
    assert (len(world.done["many"]), len(world.done["one"])) == (7, 3)


async def test_grammars_of_a_client_that_wait_are_bounded(autojump_clock: MockClock) -> None:
    world = World(GRAMMARS, share=3)
    async with trio.open_nursery() as nursery:
        await world.send(nursery, "hostile", 9, SLOW_S)
        assert world.refused == {"hostile": ["grammar_queue_full"] * 5}
        await world.send(nursery, "other", 4, QUICK_S)
    assert len(world.done["other"]) == 4
    assert "1/4 of --max-queue-size" in grammars_full(32, GRAMMAR_SHARE).message


@pytest.mark.parametrize("leaver", ["first", "second"])
async def test_whoever_leaves_gives_its_turn_to_the_next(
    autojump_clock: MockClock, leaver: str
) -> None:
    world, began = World(LaneSize(1)), trio.current_time()
    async with trio.open_nursery() as nursery:
        scopes = {client: trio.CancelScope() for client in ("first", "second", "third")}
        for client, scope in scopes.items():
            nursery.start_soon(_work_within, scope, world, client)
            await wait_all_tasks_blocked()
        scopes[leaver].cancel(reason="it leaves")
    assert world.done["third"] == pytest.approx([began + 2.0])
    assert not world.lane._waiting
    assert not world.lane._at_work


async def _work_within(scope: trio.CancelScope, world: World, client: str) -> None:
    with scope:
        await world.work(client, 1.0)


async def test_a_system_without_threads_lacks_something_for_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither a request nor a disk is to blame: requests get a 503, and the writer tries again as
    after an error of its disk."""

    async def lacking(*_: Any, **__: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("can't start new thread")

    runs: list[Any] = [Lanes(8).run, DiskThread().run, on_disk]
    with monkeypatch.context() as short:
        short.setattr(trio.to_thread, "run_sync", lacking)
        for run in runs:
            with pytest.raises(OSError, match="no further thread") as failed:
                await run(int)
            assert is_shortage(failed.value)
    for run in runs:
        with pytest.raises(RuntimeError):
            await run(_fails)
        assert await run(int) == 0


def _fails() -> None:
    raise RuntimeError("of the work itself")
