"""The model manager serves several models: one graph of six actors for each loaded model, within a bound on their weights.

Nothing is shared between the graphs, so one model's requests never wait in another's queue or batch. A model is
loaded when it is first requested, if necessary after the least recently used idle models were unloaded. Each user of a
model holds a `Lease` on it, and a leased model is never unloaded: a request for one does not end another's.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from trouper.actors.runtime.model_unloading import ManagedModel, has_room, next_to_unload
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import Lease, ModelEntry, model_not_found
from trouper.actors.runtime.supervision import innermost
from trouper.protocol.names import names_of, require_names
from trouper.protocol.problems import DRAINING, ActorFailed, ModelUnusable, Problem, RequestFailed
from trouper.protocol.settings import Settings

log = logging.getLogger("trouper.models")
UNLOAD_S = 5.0
"""Maximum wait for an idle graph to finish its writes to disk."""
RETRY_S = 60.0
"""Time until a model that could not be loaded is tried again, since each try may unload another model."""


class StartGraph(Protocol):
    """Load a model and run its graph until it was drained."""

    def __call__(self, settings: Settings, /, *, task_status: trio.TaskStatus[Runtime]) -> Awaitable[None]: ...


class ModelManager:
    """Implements `Models`. Its graphs run in `nursery`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        models: Sequence[ManagedModel],
        start: StartGraph,
        measure: Callable[[Settings], Awaitable[int]],
        budget_bytes: int,
    ) -> None:
        self._nursery, self._models = nursery, tuple(models)
        self._start, self._measure, self._budget_bytes = start, measure, budget_bytes
        self._loader = trio.StrictFIFOLock()
        self._changed = trio.Event()
        self.draining = False
        self.finished = trio.Event()

    def entries(self) -> Sequence[ModelEntry]:
        return tuple(
            ModelEntry(model.names, model.state, model.runtime, model.waiting, model.problem) for model in self._models
        )

    def listed(self) -> Sequence[ModelEntry]:
        """Former name of `entries`."""
        return self.entries()

    async def lease(self, name: str | None) -> Lease:
        """Wait until the model is loaded, or has room to be loaded (--queue-timeout-s), and return a lease on it."""
        model = self._find(name)
        model.leases += 1
        model.waiting += 1
        try:
            await self._wait_until_ready(model)
        except BaseException:
            self._release(model)
            raise
        finally:
            model.waiting -= 1
        assert model.runtime is not None, "it is ready"
        return Lease(model.names[0], model.runtime, lambda: self._release(model))

    async def _wait_until_ready(self, model: ManagedModel) -> None:
        self._refuse_if_draining()
        while model.state != "ready":
            self._request_load(model)
            await self._changed.wait()
            self._refuse_if_draining()
            if model.problem is not None:
                raise RequestFailed(model.problem)

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise RequestFailed(DRAINING)

    def _find(self, name: str | None) -> ManagedModel:
        if name is None:
            return self._models[0]
        found = next((model for model in self._models if name in model.names), None)
        if found is None:
            raise model_not_found(name, self.entries())
        return found

    def _release(self, model: ManagedModel) -> None:
        model.leases -= 1
        model.used_at = trio.current_time()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # -- loading ---------------------------------------------------------------------------------

    def _request_load(self, model: ManagedModel) -> None:
        """Start loading in a separate task, which continues when the client aborts. Raises the problem of the last attempt if that
        was recent."""
        if model.state != "unloaded":
            return
        if model.problem is not None and trio.current_time() < model.unusable_until:
            raise RequestFailed(model.problem)
        model.state, model.problem = "waiting", None
        self._nursery.start_soon(self._load_or_note_problem, model)

    async def _load_or_note_problem(self, model: ManagedModel) -> None:
        try:
            await self.load(model)
        except ModelUnusable as unusable:
            log.warning("%s cannot be loaded: %s", model.names[0], unusable)
            model.problem = Problem(500, str(unusable), "server_error", "model", code="model_unusable")
            model.unusable_until = trio.current_time() + RETRY_S
        except RequestFailed as refused:
            model.problem = refused.problem
        finally:
            if model.state != "ready":
                model.state = "unloaded"
            self._notify()

    async def load(self, model: ManagedModel) -> None:
        """Load a model; one at a time. Raises `ModelUnusable`, or `RequestFailed` (503) if there is no room for it."""
        async with self._loader:
            if len(self._models) > 1:
                model.weights_bytes = await self._measure(model.settings)
                await self._make_room(model)
            model.state, model.ended = "loading", trio.Event()
            model.runtime = await self._started(model)
            model.weights_bytes = model.runtime.model.weights_bytes
            model.names = tuple(dict.fromkeys([*model.names, model.runtime.model.id]))
            model.state, model.used_at = "ready", trio.current_time()

    async def _started(self, model: ManagedModel) -> Runtime:
        try:
            runtime: Runtime = await self._nursery.start(self._run, model)
        except BaseExceptionGroup as group:
            unusable, _ = group.split(ModelUnusable)
            if unusable is None:
                raise
            raise innermost(unusable) from None
        return runtime

    async def _run(self, model: ManagedModel, *, task_status: trio.TaskStatus[Runtime]) -> None:
        """Run the graph of a model. Raises `ActorFailed` if it is the only model, since then nothing is left to serve."""
        try:
            await self._start(model.settings, task_status=task_status)
        except* ActorFailed as failed:
            if len(self._models) == 1:
                raise
            log.warning("%s ends, the other models go on: %s", model.names[0], innermost(failed))
            model.problem = Problem(
                503, "the model crashed too often", "server_error", "model", code="model_failed", retry_after_s=60
            )
            model.unusable_until = trio.current_time() + RETRY_S
        finally:
            model.state, model.runtime = "unloaded", None
            model.ended.set()
            self._notify()

    async def _make_room(self, model: ManagedModel) -> None:
        """Unload idle models until `model` fits. Raises `RequestFailed` (503) when the others were in use for --queue-timeout-s."""
        limit_s = model.settings.queue_timeout_s or float("inf")
        with trio.move_on_after(limit_s):
            while not self._has_room(model):
                idle = next_to_unload(self._models)
                if idle is not None:
                    await self._unload(idle)
                else:
                    await self._changed.wait()
            return
        message = f"{model.names[0]} is not loaded, and the other models were in use for {limit_s:g} s (--model-memory)"
        raise RequestFailed(Problem(503, message, "server_error", "model", code="no_memory_for_model", retry_after_s=5))

    def _has_room(self, model: ManagedModel) -> bool:
        return has_room(self._models, model, self._budget_bytes)

    async def _unload(self, model: ManagedModel) -> None:
        log.info("unloading %s to make room", model.names[0])
        assert model.runtime is not None, "it is ready"
        model.state = "unloading"
        await model.runtime.drain(UNLOAD_S)
        await model.ended.wait()
        self._notify()

    async def load_what_fits(self) -> None:
        """Load the models after the first, in order, as long as no other must be unloaded for them."""
        for model in self._models[1:]:
            model.weights_bytes = await self._measured(model)
            if model.state == "unloaded" and model.weights_bytes and self._has_room(model):
                model.state = "waiting"
                await self._load_or_note_problem(model)

    async def _measured(self, model: ManagedModel) -> int:
        """Bytes of a model's weights; 0 if it cannot be loaded, in which case a request for it gets the reason."""
        try:
            return await self._measure(model.settings)
        except ModelUnusable as unusable:
            log.warning("%s: %s", model.names[0], unusable)
            return 0

    # -- the end ---------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Drain all models, each with `Runtime.drain`."""
        self.draining = True
        self._notify()
        finished = []

        async def drain_graph(runtime: Runtime) -> None:
            finished.append(await runtime.drain(timeout_s))

        async with trio.open_nursery() as nursery:
            for model in self._models:
                if model.runtime is not None:
                    nursery.start_soon(drain_graph, model.runtime)
        self.finished.set()
        return all(finished)


async def run_model_manager(
    settings: Sequence[Settings],
    aliases: Sequence[str],
    start: StartGraph,
    measure: Callable[[Settings], Awaitable[int]],
    budget_bytes: int,
    *,
    default_name: str,
    task_status: trio.TaskStatus[ModelManager],
) -> None:
    """Load the first model, return the model manager to the starter, load the others that fit; end when it was drained. `measure`
    returns the bytes of a model's weights; `default_name` is the name of the model whose settings name none. Raises `ModelUnusable`, and
    `SettingsInvalid` for a name without effect."""
    require_names([each.model or default_name for each in settings], aliases)
    async with trio.open_nursery() as nursery:
        models = [
            ManagedModel(model_settings, names_of(model_settings.model or default_name, aliases, default=index == 0))
            for index, model_settings in enumerate(settings)
        ]
        manager = ModelManager(nursery, models, start, measure, budget_bytes)
        await manager.load(models[0])
        task_status.started(manager)
        nursery.start_soon(manager.load_what_fits)
        await manager.finished.wait()
        nursery.cancel_scope.cancel()
