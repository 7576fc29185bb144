"""Several models: loaded when they are asked for, unloaded only while nobody uses them."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fakes import EngineDied, FakeEngine, card
from trouper import (
    Generate,
    ModelManager,
    ModelUnusable,
    RequestFailed,
    Runtime,
    Settings,
    SettingsInvalid,
    TokenPrompt,
)
from trouper.actors.graph import run_graph
from trouper.actors.runtime.model_manager import run_model_manager
from trouper.actors.runtime.model_table import RETRY_S
from trouper.protocol.model import AdapterCard, AdapterPlan, LoadedModel, Measured, MemoryStats
from trouper.protocol.names import names_of
from trouper.protocol.plans import Plan
from trouper.protocol.problems import ActorFailed

WEIGHTS = {"small": 10, "middle": 20, "large": 60, "broken": 5}


@attrs.define
class World:
    """Fake engines, and what happened to them."""

    events: list[str] = attrs.field(factory=list)
    may_load: trio.Event = attrs.field(factory=trio.Event)
    hanging: dict[str, trio.Event] = attrs.field(factory=dict)
    """Models whose files do not answer until the event."""
    crashing: set[str] = attrs.field(factory=set)
    """Models whose engine crashes at each step, whatever it computes."""
    repaired: bool = False
    """Whether the broken model can be loaded."""
    cause: OSError | None = None
    """Why not."""
    error: Exception | None = None
    """What loading the broken model raises, if that is not `ModelUnusable`."""

    async def start(self, settings: Settings, /, *, task_status: trio.TaskStatus[Runtime]) -> None:
        name = settings.model or "none"
        world = self

        async def crash(_: Plan) -> None:
            await trio.lowlevel.checkpoint()
            if name in world.crashing:
                raise EngineDied("for good")

        class Engine(FakeEngine):
            async def plan_adapter(self, name: str, directory: str) -> AdapterPlan:
                await trio.lowlevel.checkpoint()
                size = int(directory)
                return AdapterPlan(added_bytes=size, total_bytes=size, loading_bytes=size)

            async def load_adapter(self, name: str, directory: str) -> AdapterCard:
                world.events.append(f"+{name}")
                return await super().load_adapter(name, directory)

            async def load(self) -> LoadedModel:
                await world.may_load.wait()
                if name in world.hanging:
                    await world.hanging[name].wait()
                if name == "broken" and not world.repaired:
                    if world.error is not None:
                        raise world.error
                    raise ModelUnusable("no weights") from world.cause
                world.events.append(f"+{name}")
                return LoadedModel(
                    attrs.evolve(card(), id=name, weights_bytes=WEIGHTS[name]), self.tokenizer
                )

        try:
            unknown = MemoryStats(active_bytes=0, spare_bytes=0, limit_bytes=0)
            await run_graph(
                settings, Engine(before_step=crash, stats=unknown), task_status=task_status
            )
        finally:
            self.events.append(f"-{name}")


@asynccontextmanager
async def manager_of(
    *models: str,
    room: int = 70,
    aliases: tuple[str, ...] = (),
    world: World | None = None,
    max_models: int | None = None,
    ttl_s: float = 0.0,
    **settings: float,
) -> AsyncIterator[tuple[ModelManager, World]]:
    if world is None:
        world = World()
        world.may_load.set()
    each = [Settings(model=model, no_ssd=True, gather_ms=0, **settings) for model in models]  # type: ignore[arg-type]

    async def measure(one: Settings) -> Measured:
        return Measured(WEIGHTS[one.model or ""], card().created)

    run = partial(
        run_model_manager,
        each,
        aliases,
        world.start,
        measure,
        room,
        default_name="none",
        max_models=max_models,
        ttl_s=ttl_s,
    )
    async with trio.open_nursery() as nursery:
        start: ModelManager = await nursery.start(
            lambda *, task_status: run(task_status=task_status)
        )
        await wait_all_tasks_blocked()
        yield start, world
        assert await start.drain(5)


def states(manager: ModelManager) -> list[str]:
    return [one.state for one in manager.entries()]


async def tokens_from(runtime: Runtime, count: int = 3) -> int:
    wish = Generate(request_id="a", prompt=TokenPrompt((1, 2)), max_tokens=count, ignore_eos=True)
    with await runtime.submit(wish) as answer:
        return len([token async for delta in answer for token in delta.tokens])


async def test_what_fits_is_loaded_at_the_start(autojump_clock: object) -> None:
    async with manager_of("small", "large", "middle") as (manager, world):
        assert states(manager) == ["ready", "ready", "unloaded"], "70 are 10 and 60"
        assert world.events == ["+small", "+large"]


async def test_the_least_recently_used_idle_one_goes(autojump_clock: object) -> None:
    async with manager_of("small", "large", "middle") as (manager, world):
        for name in ("large", "small"):
            (await manager.lease(name)).release()
            await trio.sleep(1)
        lease = await manager.lease("middle")
        assert await tokens_from(lease.runtime) == 3
        lease.release()
        assert states(manager) == ["ready", "unloaded", "ready"]
        assert world.events[-2:] == ["-large", "+middle"]


async def test_a_model_in_use_is_not_unloaded(autojump_clock: object) -> None:
    """A request for one model waits; it does not drain another's batch."""
    async with (
        manager_of("small", "large", "middle", queue_timeout_s=30) as (manager, _),
        trio.open_nursery() as nursery,
    ):
        large = await manager.lease("large")
        small = await manager.lease("small")
        got: list[str] = []

        async def ask() -> None:
            lease = await manager.lease("middle")
            got.append(lease.name)
            lease.release()

        nursery.start_soon(ask)
        await trio.sleep(10)
        assert got == [] and await tokens_from(large.runtime) == 3, "it still serves"
        small.release()
        await trio.sleep(1)
        assert got == [], "small is gone, which is not enough"
        large.release()
        await trio.sleep(1)
        assert got == ["middle"]


async def test_without_room_for_too_long(autojump_clock: object) -> None:
    async with manager_of("large", "middle", queue_timeout_s=30) as (manager, _):
        large = await manager.lease(None)
        with pytest.raises(RequestFailed, match="--model-memory") as refused:
            await manager.lease("middle")
        assert (refused.value.problem.status, refused.value.problem.code) == (
            503,
            "no_memory_for_model",
        )
        large.release()
        (await manager.lease("middle")).release()


async def test_one_loading_serves_all_who_wait(autojump_clock: object) -> None:
    """... also when the first of them does not wait any longer."""
    world = World()
    world.may_load.set()
    async with (
        manager_of("large", "middle", world=world) as (manager, _),
        trio.open_nursery() as nursery,
    ):
        world.may_load = trio.Event()
        got: list[str] = []

        async def ask() -> None:
            lease = await manager.lease("middle")
            got.append(lease.name)
            lease.release()

        with trio.move_on_after(1):
            await ask()
        for _ in range(3):
            nursery.start_soon(ask)
        await trio.sleep(1)
        assert got == [] and states(manager)[1] == "loading"
        world.may_load.set()
        await trio.sleep(1)
        assert got == ["middle"] * 3 and world.events.count("+middle") == 1


async def test_what_cannot_be_loaded(autojump_clock: object) -> None:
    async with manager_of("small", "broken") as (manager, _):
        with pytest.raises(RequestFailed, match="no weights") as refused:
            await manager.lease("broken")
        assert (refused.value.problem.status, refused.value.problem.code) == (500, "model_unusable")
        assert states(manager) == ["ready", "unloaded"]
    with pytest.RaisesGroup(ModelUnusable, flatten_subgroups=True, allow_unwrapped=True):
        async with manager_of("broken", "small"):
            pass


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_a_model_that_met_the_limit_on_descriptors_is_tried_again_with_the_next_request(
    autojump_clock: object, number: int
) -> None:
    """Found by `just chaos 1 5`: a moment without descriptors cost the model a minute."""
    world = World(cause=OSError(number, "Too many open files"))
    world.may_load.set()
    async with manager_of("small", "broken", world=world) as (manager, _):
        with pytest.raises(RequestFailed, match="no weights") as refused:
            await manager.lease("broken")
        problem = refused.value.problem
        assert (problem.status, problem.code, problem.retry_after_s) == (503, "model_unusable", 1)
        world.repaired = True
        (await manager.lease("broken")).release()
    world = World(cause=OSError(errno.ENOENT, "No such file"))
    world.may_load.set()
    async with manager_of("small", "broken", world=world) as (manager, _):
        for _ in range(2):
            with pytest.raises(RequestFailed, match="no weights") as refused:
                await manager.lease("broken")
            assert refused.value.problem.status == 500
            world.repaired = True


async def test_what_cannot_be_loaded_is_not_tried_again_at_once(autojump_clock: object) -> None:
    """Each try may cost another model its place, and a client that asks again and again would cost
    it that each time."""
    async with manager_of("small", "large", "broken") as (manager, world):
        for _ in range(3):
            with pytest.raises(RequestFailed, match="no weights"):
                await manager.lease("broken")
        told = manager.entries()[2].problem
        assert told is not None
        assert told.code == "model_unusable"
        assert world.events.count("-small") == world.events.count("-broken") == 1
        await trio.sleep(1)
        (await manager.lease("small")).release()
        await trio.sleep(RETRY_S)
        with pytest.raises(RequestFailed, match="no weights"):
            await manager.lease("broken")
        assert world.events.count("-large") == 1, (
            "it was tried again, and this one had gone longest without being used"
        )


async def test_who_waits_for_a_model_is_counted(autojump_clock: object) -> None:
    world = World()
    world.may_load.set()
    async with (
        manager_of("large", "middle", world=world) as (manager, _),
        trio.open_nursery() as nursery,
    ):
        world.may_load = trio.Event()

        async def ask() -> None:
            (await manager.lease("middle")).release()

        for _ in range(3):
            nursery.start_soon(ask)
        with trio.move_on_after(1):
            await ask()
        assert [one.waiting for one in manager.entries()] == [0, 3]
        world.may_load.set()
        await trio.sleep(1)
        assert [one.waiting for one in manager.entries()] == [0, 0]


async def test_a_draining_manager_refuses(autojump_clock: object) -> None:
    async with manager_of("large", "middle") as (manager, _):
        assert await manager.drain(5)
        for name in ("middle", "large"):
            with pytest.raises(RequestFailed, match="shutting down"):
                await manager.lease(name)


async def test_a_name_that_would_have_no_effect_is_refused_before_anything_is_loaded() -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(SettingsInvalid, match="'huge' is none"), flatten_subgroups=True
    ):
        async with manager_of("small", "large", aliases=("big=huge",)):
            pytest.fail("it was loaded")


async def test_names(autojump_clock: object) -> None:
    assert names_of("b", ["x", "y=b"], default=False) == ("y", "b")
    async with manager_of("small", "large", aliases=("gpt", "big=large")) as (manager, _):
        assert [one.names for one in manager.entries()] == [("gpt", "small"), ("big", "large")]
        for name, meant in (
            (None, "small"),
            ("gpt", "small"),
            ("small", "small"),
            ("big", "large"),
        ):
            lease = await manager.lease(name)
            assert lease.runtime.model.id == meant
            lease.release()
        with pytest.raises(RequestFailed, match="'gpt', 'big' are") as refused:
            await manager.lease("nobody")
        assert refused.value.problem.status == 404


async def test_a_model_that_crashes_too_often_ends_alone_and_is_tried_again_later(
    autojump_clock: object,
) -> None:
    async with manager_of("small", "middle") as (manager, world):
        world.crashing.add("middle")
        lease = await manager.lease("middle")
        with pytest.raises(RequestFailed) as failed:
            await tokens_from(lease.runtime)
        assert failed.value.problem.code == "engine_stopped"
        lease.release()
        await trio.sleep(1)
        assert states(manager) == ["ready", "unloaded"]
        other = await manager.lease("small")
        assert await tokens_from(other.runtime) == 3
        other.release()
        with pytest.raises(RequestFailed) as refused:
            await manager.lease("middle")
        assert (refused.value.problem.status, refused.value.problem.code) == (503, "model_failed")
        world.crashing.clear()
        await trio.sleep(RETRY_S)
        again = await manager.lease("middle")
        assert await tokens_from(again.runtime) == 3
        again.release()


async def test_the_only_model_ends_with_the_server(autojump_clock: object) -> None:
    with pytest.raises(ExceptionGroup) as ended:  # noqa: PT012
        async with manager_of("small") as (manager, world):
            world.crashing.add("small")
            lease = await manager.lease("small")
            with pytest.raises(RequestFailed):
                await tokens_from(lease.runtime)
            await trio.sleep_forever()
    assert ended.group_contains(ActorFailed)


# -- adapters that are loaded at run time --------------------------------------------------------


async def test_adapters_count_as_their_models_memory(autojump_clock: object) -> None:
    async with manager_of("small", "middle", "large", room=35) as (manager, world):
        world.events.clear()
        await manager.control.load_adapter("small", "fits", "5")
        assert [entry.weights_bytes for entry in manager.entries()][:2] == [
            15,
            20,
        ] and world.events == ["+fits"]
        lease = await manager.lease("middle")
        with pytest.raises(RequestFailed) as refused:
            await manager.control.load_adapter("small", "large", "9")
        assert (refused.value.problem.status, refused.value.problem.code) == (
            507,
            "insufficient_memory",
        )
        assert "with the adapter 'large' small needs" in refused.value.problem.message
        assert manager.entries()[0].weights_bytes == 15 and world.events == ["+fits"]
        lease.release()
        await manager.control.unload_adapter("small", "fits")
        assert manager.entries()[0].weights_bytes == 10


async def test_the_names_of_unloaded_adapters_outlast_a_sleep_of_their_model(
    autojump_clock: object,
) -> None:
    async with manager_of("small", "middle", "large", room=35) as (manager, _):
        await manager.control.load_adapter("small", "brief", "5")
        assert manager.entries()[0].unloaded_adapters == ()
        await manager.control.unload_adapter("small", "brief")
        await manager.control.unload("small", sleep=True).done.wait()
        assert manager.entries()[0].unloaded_adapters == ("brief",)


async def test_idle_models_make_room_for_an_adapter(autojump_clock: object) -> None:
    async with manager_of("small", "middle", room=35) as (manager, world):
        world.events.clear()
        await manager.control.load_adapter("small", "wide", "9")
        assert world.events == ["-middle", "+wide"]
        assert [entry.state for entry in manager.entries()] == ["ready", "unloaded"]
        manager.control.pin("small", pinned=True)
        with pytest.raises(RequestFailed, match="would have to be unloaded"):
            (await manager.lease("middle")).release()
