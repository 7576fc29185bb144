"""What goes wrong with one model of several is that model's affair: the others serve, and who waits
for it does not keep others waiting."""

from __future__ import annotations

from contextvars import ContextVar

import pytest
import trio
import trio.lowlevel

from tests.actors.test_model_control import done, serves
from tests.actors.test_model_manager import WEIGHTS, World, manager_of, states, tokens_from
from trouper import RequestFailed, Runtime, Settings
from trouper.actors.runtime import served_models
from trouper.actors.runtime.model_table import RETRY_S, lacking_room

ASKED_BY: ContextVar[str] = ContextVar("asked_by", default="nobody")


async def test_whatever_loading_raises_the_others_go_on(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by review: anything but `ModelUnusable` ended the server."""
    world = World(error=AttributeError("'list' object has no attribute 'items'"))
    world.may_load.set()
    async with manager_of("small", "broken", world=world) as (manager, _):
        with pytest.raises(RequestFailed, match="AttributeError: 'list' object") as refused:
            await manager.lease("broken")
        assert (refused.value.problem.status, refused.value.problem.code) == (500, "model_unusable")
        assert any(record.exc_info for record in caplog.records), (
            "nobody foresaw it, so the log has its traceback"
        )
        assert await serves(manager, "small") == 3
        assert await done(manager.control.load("broken")) == "model_unusable"
        world.repaired = True
        await trio.sleep(RETRY_S)
        assert await serves(manager, "broken") == 3


async def test_a_model_that_cannot_be_measured_is_unusable(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(WEIGHTS, "broken")
    async with manager_of("small", "broken") as (manager, _):
        with pytest.raises(RequestFailed, match="KeyError: 'broken'"):
            await manager.lease("broken")
        assert await serves(manager, "small") == 3
        assert await done(manager.control.load("broken")) == "model_unusable"


async def test_what_can_never_fit_is_refused_at_once_and_nothing_is_unloaded_for_it(
    autojump_clock: object,
) -> None:
    """Found by review: all idle models were unloaded one by one, and then it waited."""
    async with manager_of("middle", "small", "large", room=70) as (manager, world):
        manager.control.pin("middle", pinned=True)
        began = trio.current_time()
        with pytest.raises(RequestFailed, match="beside pinned models") as refused:
            await manager.lease("large")
        assert "middle" not in refused.value.problem.message, (
            "it may be none that the client knows of"
        )
        assert (refused.value.problem.status, refused.value.problem.code) == (
            503,
            "no_memory_for_model",
        )
        assert trio.current_time() == began and states(manager) == ["ready", "ready", "unloaded"]
        manager.control.pin("middle", pinned=False)
        assert await serves(manager, "large") == 3
        assert world.events[-2:] == ["-middle", "+large"], "small stays"


async def test_who_waits_for_room_unloads_nothing_and_lets_others_load(
    autojump_clock: object,
) -> None:
    async with (
        manager_of("middle", "small", "large", "broken", room=70, queue_timeout_s=30) as (
            manager,
            world,
        ),
        trio.open_nursery() as nursery,
    ):
        world.repaired = True
        lease = await manager.lease("middle")
        got: list[int] = []

        async def ask() -> None:
            got.append(await serves(manager, "large"))

        nursery.start_soon(ask)
        await trio.sleep(10)
        assert states(manager) == ["ready", "ready", "waiting", "unloaded"], (
            "20 and 60 are too much without small, too"
        )
        assert await done(manager.control.load("broken")) == ""
        lease.release()
        await trio.sleep(1)
        assert got == [3]


async def test_who_comes_later_waits_for_room_as_long_as_the_first(
    autojump_clock: object,
) -> None:
    """The first one's time limit refused all."""
    async with (
        manager_of("middle", "large", room=70, queue_timeout_s=30) as (manager, _),
        trio.open_nursery() as nursery,
    ):
        lease = await manager.lease("middle")
        served: list[int] = []

        async def come_later() -> None:
            await trio.sleep(20)
            served.append(await serves(manager, "large"))

        nursery.start_soon(come_later)
        began = trio.current_time()
        with pytest.raises(RequestFailed, match="in use for 30 s"):
            await manager.lease("large")
        assert trio.current_time() - began == pytest.approx(30)
        await trio.sleep(10)
        lease.release()
        await trio.sleep(1)
        assert served == [3]


@pytest.mark.parametrize("queue_timeout_s", [0, 30])
async def test_nothing_is_loaded_for_those_who_have_left(
    autojump_clock: object, queue_timeout_s: float
) -> None:
    async with manager_of("middle", "large", room=70, queue_timeout_s=queue_timeout_s) as (
        manager,
        world,
    ):
        lease = await manager.lease("middle")
        with trio.move_on_after(5):
            await manager.lease("large")
        await trio.sleep(1)
        assert states(manager) == ["ready", "unloaded"]
        lease.release()
        await trio.sleep(1)
        assert world.events == ["+middle"]
        assert await serves(manager, "large") == 3


async def test_force_helps_a_model_that_is_unloading(autojump_clock: object) -> None:
    """Found by review: the second operation waited for the first, which waited for streams."""
    async with manager_of("small", "middle") as (manager, world):
        lease = await manager.lease("middle")
        gentle = manager.control.unload("middle")
        await trio.sleep(1)
        with trio.fail_after(1):
            assert await done(manager.control.unload("middle", force=True)) == ""
            assert await done(gentle) == ""
        with pytest.raises(RequestFailed):
            await tokens_from(lease.runtime)
        lease.release()
        assert states(manager) == ["ready", "unloaded"] and world.events[-1] == "-middle"
        assert await serves(manager, "middle") == 3


async def test_who_waits_for_a_model_that_is_unloading_waits_no_longer_than_in_the_queue(
    autojump_clock: object,
) -> None:
    async with manager_of("small", "middle", queue_timeout_s=30) as (manager, _):
        lease = await manager.lease("middle")
        operation = manager.control.unload("middle")
        await trio.sleep(1)
        began = trio.current_time()
        with pytest.raises(RequestFailed, match="being unloaded") as refused:
            await manager.lease("middle")
        assert (refused.value.problem.status, refused.value.problem.code) == (503, "queue_timeout")
        assert trio.current_time() - began == pytest.approx(30)
        lease.release()
        assert await done(operation) == ""


async def test_a_model_does_not_inherit_the_context_of_who_loads_it(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: its log lines had the request's id, and its tasks kept the request."""
    seen: list[str] = []

    class Noting(World):
        async def start(
            self, settings: Settings, /, *, task_status: trio.TaskStatus[Runtime]
        ) -> None:
            seen.append(ASKED_BY.get())
            await super().start(settings, task_status=task_status)

    world = Noting()
    world.may_load.set()
    async with manager_of("middle", "large", room=70, world=world) as (manager, _):
        token = ASKED_BY.set("me")
        assert await serves(manager, "large") == 3

        async def measured(_: object) -> int:
            seen.append(ASKED_BY.get())
            await trio.lowlevel.checkpoint()
            return 20

        monkeypatch.setattr(manager, "measured", measured)
        assert await done(manager.control.load("middle")) == ""
        ASKED_BY.reset(token)
        assert seen == ["nobody"] * 5, (
            "two models at the start and one again, and it was measured twice"
        )


async def test_entries_say_what_fits_only_when_asked(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests look for names in the entries, several times each."""
    asked: list[str] = []

    def counting(*arguments: object) -> str:
        asked.append("once")
        return lacking_room(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("trouper.actors.runtime.model_table.lacking_room", counting)
    async with manager_of("small", "middle") as (manager, _):
        entries: list[served_models.ModelEntry] = [*manager.entries()]
        assert asked == []
        assert [entry.fits for entry in entries] == [True, True] and len(asked) == 2
