"""Loading, unloading, sleep and wake of models on demand, pins, and models that go to sleep when
nobody uses them (--model-ttl-s).

An operation runs in a task of the model manager, so it goes on when its client leaves. Memory is
planned before anything is loaded, and what runs is not disturbed: to make room only idle models are
unloaded, and a model is unloaded when its running requests have ended, unless it is forced. A
sleeping model has no weights in memory; its cached blocks stay on disk. A request for it, or for
one that was unloaded, loads it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import attrs
import trio

from trouper.actors.runtime.adapter_table import with_unloaded
from trouper.actors.runtime.model_room import room_for_adapter
from trouper.actors.runtime.model_unloading import AWAY, ManagedModel, lacking_room, load_problem
from trouper.protocol.names import adapters_of
from trouper.protocol.problems import (
    DRAINING,
    ModelUnusable,
    Problem,
    RequestFailed,
    adapter_unknown,
)

if TYPE_CHECKING:
    from trouper.actors.runtime.model_manager import ModelManager
    from trouper.actors.runtime.served_models import Away


@attrs.define(eq=False)
class Operation:
    """A change of a model's state that somebody requested."""

    name: str
    """The model's name in the API."""
    done: trio.Event = attrs.field(factory=trio.Event)
    problem: Problem | None = None
    """Why it failed, once it is done."""


class ModelControl:
    """Starts operations on the models of one manager. Raises `RequestFailed` (404) for a name that
    no model has."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def load(
        self, name: str | None, *, pinned: bool | None = None, ttl_s: float | None = None
    ) -> Operation:
        """Load a model, or wake it. Fails with 507 if it does not fit beside the models that are
        pinned or in use; then it is neither pinned nor has another time to live."""
        model = self._manager.find(name)
        return self._begin(model, lambda: self._load(model, pinned, ttl_s))

    def unload(self, name: str | None, *, force: bool = False, sleep: bool = False) -> Operation:
        """Unload a model, or put it to sleep, when its running requests have ended. `force`: end
        them with an error, and do so although it is pinned. Fails with 409 for a pinned model."""
        model = self._manager.find(name)
        return self._begin(
            model, lambda: self._unload(model, "asleep" if sleep else "unloaded", force=force)
        )

    def pin(self, name: str | None, *, pinned: bool) -> str:
        """Pin a model, so that it is not unloaded, or release it. Returns its name in the API."""
        model = self._manager.find(name)
        model.pinned = pinned
        self._manager.notify()
        return model.names[0]

    async def load_adapter(self, name: str | None, adapter: str, directory: str) -> None:
        """Load a LoRA adapter of a model, which is loaded before, and keep it when the model goes
        and comes. Raises `RequestFailed` (507: it does not fit), and `ModelUnusable`."""
        model = self._manager.find(name)
        lease = await self._manager.lease(model.names[0])
        try:
            await lease.runtime.load_adapter(
                adapter, directory, partial(room_for_adapter, self._manager, model, adapter)
            )
            model.settings = attrs.evolve(
                model.settings, adapter=(*model.settings.adapter, f"{adapter}={directory}")
            )
        finally:
            model.weights_bytes = lease.runtime.weights_bytes
            lease.release()

    async def unload_adapter(self, name: str | None, adapter: str) -> None:
        """Unload a LoRA adapter of a model when the requests that have it have ended; requests that
        come now are refused. Raises `RequestFailed` (404)."""
        model = self._manager.find(name)
        adapters = adapters_of(model.settings.adapter)
        if adapters.pop(adapter, None) is None:
            raise adapter_unknown(adapter)
        model.settings = attrs.evolve(
            model.settings, adapter=tuple(f"{name}={path}" for name, path in adapters.items())
        )
        model.unloaded_adapters = with_unloaded(model.unloaded_adapters, adapter)
        if model.runtime is not None:
            with suppress(ModelUnusable):  # The model itself was unloaded meanwhile.
                await (runtime := model.runtime).unload_adapter(adapter)
                model.weights_bytes = runtime.weights_bytes

    def _begin(self, model: ManagedModel, work: Callable[[], Awaitable[None]]) -> Operation:
        self._manager.refuse_if_draining()
        operation = Operation(model.names[0])
        # The request's context ends with it.
        Context().run(self._manager.nursery.start_soon, _run, operation, work)
        return operation

    async def _load(self, model: ManagedModel, pinned: bool | None, ttl_s: float | None) -> None:
        if model.state in AWAY:
            model.weights_bytes = await self._manager.measured(model)
            if reason := lacking_room(self._manager.models, model, self._manager.limits):
                raise RequestFailed(
                    Problem(507, reason, "server_error", "model", code="insufficient_memory")
                )
            model.unusable_until = -inf  # Its files may have been repaired since.
        lease = await self._manager.lease(model.names[0])
        model.pinned = model.pinned if pinned is None else pinned
        model.ttl_s = model.ttl_s if ttl_s is None else ttl_s
        lease.release()

    async def _unload(self, model: ManagedModel, after: Away, *, force: bool) -> None:
        manager = self._manager
        while model.state in ("waiting", "loading", "unloading"):
            if model.state == "loading" and model.problem is not None:
                raise RequestFailed(model.problem)
            if force and model.state == "unloading" and model.runtime is not None:
                await manager.unload(model, after, at_once=True)
                return
            await manager.changed.wait()
        if model.state in AWAY:
            model.state = "unloaded" if after == "unloaded" else model.state
            return
        if model.pinned and not force:
            message = f"{model.names[0]} is pinned: release it (POST /v1/models/pin), or send force"
            raise RequestFailed(
                Problem(409, message, "invalid_request_error", "model", code="model_pinned")
            )
        # Requests that come now wait, and load it again.
        model.state, runtime = "unloading", model.runtime
        if runtime is not None:
            runtime.leaving = after
        manager.notify()
        while not force and model.running and model.runtime is runtime:
            await manager.changed.wait()
        if runtime is not None and model.runtime is runtime:
            await manager.unload(model, after, at_once=force)

    async def put_idle_to_sleep(self) -> None:
        """Put each model to sleep that nobody has used for its time to live. Runs until
        cancelled."""
        manager = self._manager
        while True:
            now = trio.current_time()
            mortal = [model for model in manager.models if model.is_idle and model.ttl_s]
            due = [model for model in mortal if model.used_at + model.ttl_s <= now]
            for model in due:
                # Not used meanwhile.
                if model.is_idle and model.used_at + model.ttl_s <= trio.current_time():
                    await manager.unload(model, "asleep")
            if not due:
                with trio.move_on_at(
                    min((model.used_at + model.ttl_s for model in mortal), default=inf)
                ):
                    await manager.changed.wait()


async def _run(operation: Operation, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except RequestFailed as failed:
        operation.problem = failed.problem
    except ModelUnusable as unusable:
        operation.problem = load_problem(unusable)
    except trio.Cancelled:  # The server has ended before it.
        operation.problem = DRAINING
        raise
    finally:
        operation.done.set()
