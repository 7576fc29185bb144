"""A model whose files do not answer: the others are loaded and served beside it, and requests for
it are refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel

from tests.actors.test_model_control import done, serves
from tests.actors.test_model_manager import World, manager_of, states
from trouper import ModelManager, RequestFailed
from trouper.actors.runtime.model_table import SILENT_S, STALLED_S
from trouper.protocol.loading import Loading, nobody_watches


@asynccontextmanager
async def middle_hangs(*models: str, room: int) -> AsyncIterator[tuple[ModelManager, World]]:
    world = World(hanging={"middle": trio.Event()})
    world.may_load.set()
    async with manager_of(*models, room=room, world=world, queue_timeout_s=5) as (manager, _):
        yield manager, world


async def test_the_others_are_loaded_and_served(autojump_clock: object) -> None:
    async with middle_hangs("small", "middle", "large", "broken", room=100) as (manager, world):
        world.repaired = True
        assert states(manager) == ["ready", "loading", "unloaded", "unloaded"], "one after another"
        assert await serves(manager, "large") == 3
        assert trio.current_time() < STALLED_S, (
            "who asks for another waits no longer than a short silence"
        )
        await trio.sleep(1)
        assert states(manager) == ["ready", "loading", "ready", "ready"], "what fits is loaded, too"


async def test_requests_for_it_are_refused_by_name_until_it_goes_on(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with middle_hangs("small", "middle", room=100) as (manager, world):
        with pytest.raises(RequestFailed, match=r"middle .* no progress for 120 s") as refused:
            await manager.lease("middle")
        problem = refused.value.problem
        assert (problem.status, problem.code) == (503, "model_load_stalled")
        began = trio.current_time()
        with pytest.raises(RequestFailed, match="no progress"):
            await manager.lease("middle")
        assert await done(manager.control.unload("middle", force=True)) == "model_load_stalled"
        assert await done(manager.control.load("middle")) == "model_load_stalled"
        assert trio.current_time() == began, "at once"
        entry = manager.entries()[1]
        assert (entry.state, entry.problem) == ("loading", problem)
        await trio.sleep(STALLED_S)
        assert [record.message for record in caplog.records].count(problem.message) == 1
        manager._progress.watching("middle", nobody_watches)(Loading("middle", "reading", 1, 2))
        await trio.sleep(2)
        assert manager.entries()[1].problem is None, "it goes on"
        world.hanging["middle"].set()
        assert await serves(manager, "middle") == 3
        assert (states(manager), manager.entries()[1].problem) == (["ready", "ready"], None)


async def test_who_says_something_keeps_the_turn(autojump_clock: object) -> None:
    async with (
        middle_hangs("small", "middle", "large", room=100) as (manager, world),
        trio.open_nursery() as nursery,
    ):
        note = manager._progress.watching("middle", nobody_watches)
        nursery.start_soon(serves, manager, "large")
        for number in range(10):
            note(Loading("middle", "reading", number, 10))
            await trio.sleep(SILENT_S / 2)
        assert states(manager) == ["ready", "loading", "waiting"]
        world.hanging["middle"].set()
        await trio.lowlevel.checkpoint()
        await trio.sleep(1)
        assert states(manager) == ["ready", "ready", "ready"]
        assert world.events == ["+small", "+middle", "+large"]


async def test_its_weights_count_as_loaded(autojump_clock: object) -> None:
    """It may go on at any time."""
    async with middle_hangs("small", "middle", "large", room=75) as (manager, world):
        await trio.sleep(SILENT_S + 2)
        assert await done(manager.control.load("large")) == "insufficient_memory"
        with pytest.raises(RequestFailed, match="in use") as refused:
            await manager.lease("large")
        assert refused.value.problem.code == "no_memory_for_model"
        world.hanging["middle"].set()
        await trio.sleep(1)
        assert await serves(manager, "large") == 3, "middle is idle now, and goes"


async def test_a_load_that_fails_after_a_silence_says_why(autojump_clock: object) -> None:
    world = World(hanging={"broken": trio.Event()})
    world.may_load.set()
    async with manager_of("small", "broken", "large", world=world, room=100) as (manager, _):
        assert await serves(manager, "large") == 3
        world.hanging["broken"].set()
        with pytest.raises(RequestFailed, match="no weights"):
            await manager.lease("broken")
        assert states(manager) == ["ready", "unloaded", "ready"]


async def test_the_first_model_may_take_as_long_as_it_takes(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody could be served meanwhile, and to begin again would take even longer."""
    world = World(hanging={"middle": trio.Event()})
    world.may_load.set()

    async def answer_late() -> None:
        await trio.sleep(2 * STALLED_S)
        world.hanging["middle"].set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_late)
        async with manager_of("middle", "small", world=world) as (manager, _):
            assert states(manager) == ["ready", "ready"]
            assert trio.current_time() >= 2 * STALLED_S
            assert manager.entries()[0].problem is None
    assert any("no progress for 120 s" in record.message for record in caplog.records)
