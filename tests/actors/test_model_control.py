"""Loading, unloading, sleep and wake on demand: nobody who runs is disturbed, and what cannot be is
refused at once."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.actors.test_model_manager import manager_of, states, tokens_from
from trouper import ModelManager, RequestFailed
from trouper.actors.runtime.managed_model import ManagedModel
from trouper.actors.runtime.model_table import Away
from trouper.actors.runtime.served_models import Operation


async def done(operation: Operation) -> str:
    """The code of the operation's problem; "" if there is none."""
    await operation.done.wait()
    return "" if operation.problem is None else operation.problem.code or ""


async def serves(manager: ModelManager, name: str) -> int:
    lease = await manager.lease(name)
    try:
        return await tokens_from(lease.runtime)
    finally:
        lease.release()


async def test_a_model_sleeps_and_wakes_and_a_request_wakes_it_too(autojump_clock: object) -> None:
    async with manager_of("small", "middle") as (manager, world):
        assert await done(manager.control.unload("middle", sleep=True)) == ""
        assert states(manager) == ["ready", "asleep"]
        assert await done(manager.control.load("middle")) == ""
        assert states(manager) == ["ready", "ready"]
        assert await done(manager.control.unload("middle", sleep=True)) == ""
        assert await serves(manager, "middle") == 3
        assert world.events.count("+middle") == world.events.count("-middle") + 1 == 3


async def test_what_sleeps_can_be_unloaded_and_the_default_too(autojump_clock: object) -> None:
    async with manager_of("small", "middle") as (manager, _):
        await done(manager.control.unload("middle", sleep=True))
        await done(manager.control.unload("middle"))
        await done(manager.control.unload(None))
        assert states(manager) == ["unloaded", "unloaded"]
        assert await serves(manager, "small") == 3


async def test_unloading_waits_for_those_who_run_and_later_requests_load_it_again(
    autojump_clock: object,
) -> None:
    async with manager_of("small", "middle") as (manager, world), trio.open_nursery() as nursery:
        lease = await manager.lease("middle")
        operation = manager.control.unload("middle")
        await trio.sleep(1)
        assert not operation.done.is_set()
        served: list[int] = []

        async def ask() -> None:
            served.append(await serves(manager, "middle"))

        nursery.start_soon(ask)
        await trio.sleep(1)
        assert await tokens_from(lease.runtime) == 3 and not served
        lease.release()
        assert await done(operation) == ""
        await trio.sleep(1)
        assert served == [3] and world.events[-2:] == ["-middle", "+middle"]


async def test_force_ends_those_who_run_also_of_a_pinned_model(autojump_clock: object) -> None:
    async with manager_of("small", "middle") as (manager, _):
        manager.control.pin("middle", pinned=True)
        lease = await manager.lease("middle")
        assert await done(manager.control.unload("middle")) == "model_pinned"
        assert await tokens_from(lease.runtime) == 3
        assert await done(manager.control.unload("middle", force=True)) == ""
        with pytest.raises(RequestFailed):
            await tokens_from(lease.runtime)
        lease.release()
        assert states(manager) == ["ready", "unloaded"]


async def test_what_does_not_fit_is_refused_at_once_and_nothing_is_unloaded_for_it(
    autojump_clock: object,
) -> None:
    async with manager_of("small", "large", "middle") as (manager, world):
        lease = await manager.lease("large")
        operation = manager.control.load("middle")
        assert await done(operation) == "insufficient_memory"
        assert operation.problem is not None and operation.problem.status == 507
        assert (
            "large (in use)" in operation.problem.message
            and "--model-memory" in operation.problem.message
        )
        assert world.events == ["+small", "+large"]
        lease.release()
        manager.control.pin("large", pinned=True)
        assert (
            await done(manager.control.load("middle", pinned=True, ttl_s=9))
            == "insufficient_memory"
        )
        assert [(one.pinned, one.ttl_s) for one in manager.entries()][2] == (False, 0), (
            "what is refused changes nothing"
        )
        manager.control.pin("large", pinned=False)
        assert await done(manager.control.load("middle", pinned=True)) == ""
        assert [entry.pinned for entry in manager.entries()] == [False, False, True]


async def test_the_number_of_loaded_models_is_bounded(autojump_clock: object) -> None:
    async with manager_of("small", "middle", max_models=1) as (manager, _):
        assert states(manager) == ["ready", "unloaded"]
        lease = await manager.lease("small")
        assert await done(manager.control.load("middle")) == "insufficient_memory"
        lease.release()
        assert await serves(manager, "middle") == 3
        assert states(manager) == ["unloaded", "ready"]


async def test_a_model_that_nobody_uses_goes_to_sleep(autojump_clock: object) -> None:
    async with manager_of("small", "middle", ttl_s=60) as (manager, _):
        lease = await manager.lease("small")
        await trio.sleep(50)
        assert await serves(manager, "middle") == 3
        await trio.sleep(50)
        assert states(manager) == ["ready", "ready"], "used 50 s ago"
        await trio.sleep(20)
        assert states(manager) == ["ready", "asleep"], "the other is in use"
        await done(manager.control.load("middle", pinned=True))
        lease.release()
        await trio.sleep(100)
        assert states(manager) == ["asleep", "ready"], "pinned"


async def test_a_model_that_was_used_while_another_went_to_sleep_stays(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To end a graph may take seconds."""
    async with manager_of("small", "middle", ttl_s=60) as (manager, _):
        unload = manager.unload

        async def used_meanwhile(model: ManagedModel, after: Away, at_once: bool) -> None:
            if model.names[0] == "small":
                assert await serves(manager, "middle") == 3
            await unload(model, after, at_once)

        monkeypatch.setattr(manager, "unload", used_meanwhile)
        await trio.sleep(61)
        assert states(manager) == ["asleep", "ready"]
        await trio.sleep(60)
        assert states(manager) == ["asleep", "asleep"]


async def test_what_cannot_be_loaded_says_why_and_is_tried_again_on_demand(
    autojump_clock: object,
) -> None:
    async with manager_of("small", "broken") as (manager, world):
        for _ in range(2):
            assert await done(manager.control.load("broken")) == "model_unusable"
        world.repaired = True
        assert await done(manager.control.load("broken")) == ""
        with pytest.raises(RequestFailed, match="'nobody' does not exist here"):
            manager.control.load("nobody")
        await done(manager.control.load("small"))


async def test_an_operation_that_the_end_of_the_server_has_cut_off_has_not_succeeded(
    autojump_clock: object,
) -> None:
    async with manager_of("small", "large", room=60) as (manager, world):
        world.may_load = trio.Event()
        load = manager.control.load("large")
        await wait_all_tasks_blocked()
        assert states(manager) == ["unloaded", "loading"]
        unload = manager.control.unload("large")
        await wait_all_tasks_blocked()
    assert [await done(operation) for operation in (load, unload)] == ["draining", "draining"]
