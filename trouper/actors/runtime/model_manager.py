"""The model manager serves several models: one graph of six actors for each loaded model, within a
bound on their weights.

Nothing is shared between the graphs, so one model's requests never wait in another's queue or
batch. A model is loaded when it is first requested, if necessary after the least recently used idle
models were unloaded. Each user of a model holds a `Lease` on it, and a leased model is never
unloaded: a request for one does not end another's.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from functools import partial
from math import inf
from typing import Protocol

import trio

from trouper.actors.runtime.found_models import Scan, keep_found
from trouper.actors.runtime.load_progress import LoadProgress
from trouper.actors.runtime.load_turns import LoadTurns
from trouper.actors.runtime.model_control import ModelControl
from trouper.actors.runtime.model_room import has_room_now, load_in_turn
from trouper.actors.runtime.model_unloading import (
    AWAY,
    LoadLimits,
    ManagedModel,
    entry_of,
    load_problem,
    loaded,
    managed,
    unforeseen,
)
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import Away, Lease, ModelEntry, model_not_found
from trouper.actors.runtime.supervision import innermost
from trouper.protocol.model import Measured
from trouper.protocol.model_options import ModelOptions
from trouper.protocol.names import names_of, require_names
from trouper.protocol.paths import encodable
from trouper.protocol.problems import DRAINING, ActorFailed, ModelUnusable, Problem, RequestFailed
from trouper.protocol.settings import Settings

log = logging.getLogger("trouper.models")
UNLOAD_S = 5.0
"""Maximum wait for an idle graph to finish its writes to disk."""
RETRY_S = 60.0
"""Time until a model that could not be loaded is tried again, since each try may unload another
model."""


class StartGraph(Protocol):
    """Load a model and run its graph until it was drained."""

    def __call__(
        self, settings: Settings, /, *, task_status: trio.TaskStatus[Runtime]
    ) -> Awaitable[None]: ...


class ModelManager:
    """Implements `Models`. Its graphs run in `nursery`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        models: Sequence[ManagedModel],
        start: StartGraph,
        measure: Callable[[Settings], Awaitable[Measured]],
        *,
        limits: LoadLimits,
        progress: LoadProgress,
    ) -> None:
        self.nursery, self.models = nursery, list(models)
        self._start, self._measure, self.limits, self._progress = start, measure, limits, progress
        self.control, self.turns = ModelControl(self), LoadTurns(progress, self.notify)
        self.changed = trio.Event()
        """Set, and replaced, when the state of any model changes."""
        self.draining, self.finished = False, trio.Event()

    def entries(self) -> Sequence[ModelEntry]:
        held = loaded(self.models)
        return tuple(entry_of(model, held, self.limits, self._progress) for model in self.models)

    async def lease(self, name: str | None) -> Lease:
        """Wait until the model is loaded, or has room to be loaded (--queue-timeout-s), and return
        a lease on it."""
        model = self.find(name)
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
        self.refuse_if_draining()
        limit_s = model.settings.queue_timeout_s or inf
        give_up_at = trio.current_time() + limit_s
        while model.state != "ready":
            self._request_load(model)
            with trio.move_on_at(give_up_at if model.state == "unloading" else inf):
                await self.changed.wait()
            self.refuse_if_draining()
            if model.state == "unloading" and trio.current_time() >= give_up_at:
                message = (
                    f"{model.names[0]} is being unloaded, and its requests have not ended for "
                    f"{limit_s:g} s"
                )
                raise RequestFailed(
                    Problem(503, message, "server_error", "model", "queue_timeout", retry_after_s=5)
                )
            if model.problem is not None:
                raise RequestFailed(model.problem)

    def refuse_if_draining(self) -> None:
        if self.draining:
            raise RequestFailed(DRAINING)

    def find(self, name: str | None) -> ManagedModel:
        """Return the model of a name; None: the default. Raises `RequestFailed` (404)."""
        found = next((model for model in self.models if name is None or name in model.names), None)
        if found is None:
            raise model_not_found(name or "", self.entries())
        return found

    def _release(self, model: ManagedModel) -> None:
        model.leases -= 1
        model.used_at = trio.current_time()
        self.notify()

    def notify(self) -> None:
        """Wake those who wait for a change of any model."""
        self.changed.set()
        self.changed = trio.Event()

    # -- loading ---------------------------------------------------------------------------------

    def _request_load(self, model: ManagedModel) -> None:
        """Start loading in a separate task, which continues when the client aborts, and has none of
        its context variables. Raises the problem of the last attempt if that was recent."""
        if model.state == "loading" and model.problem is not None:
            raise RequestFailed(model.problem)
        if model.state not in AWAY:
            return
        if model.problem is not None and trio.current_time() < model.unusable_until:
            raise RequestFailed(model.problem)
        model.state, model.problem = "waiting", None
        Context().run(self.nursery.start_soon, self._load_or_note_problem, model)

    async def _load_or_note_problem(self, model: ManagedModel) -> None:
        try:
            await self.load(model)
        except RequestFailed as refused:
            model.problem = refused.problem
        except Exception as error:  # noqa: BLE001 - whatever a model's files and code raise, the other models go on.
            self._note_problem(model, error)
        finally:
            if model.state != "ready":
                model.state = "unloaded"
            self.notify()

    def _note_problem(self, model: ManagedModel, error: Exception) -> None:
        traceback = None if isinstance(error, ModelUnusable) else error
        model.problem = load_problem(error)
        log.warning(
            "%s cannot be loaded: %s", model.names[0], model.problem.message, exc_info=traceback
        )
        model.unusable_until = trio.current_time() + (
            RETRY_S if model.problem.retry_after_s is None else 0
        )

    async def load(self, model: ManagedModel) -> None:
        """Load a model in its turn. Raises `ModelUnusable`, or `RequestFailed` (503) if there is no
        room for it."""
        if len(self.models) > 1:
            model.weights_bytes = await self.measured(model)
        await load_in_turn(self, model, partial(self._load_now, model))

    async def _load_now(self, model: ManagedModel) -> None:
        model.state, model.ended = "loading", trio.Event()
        model.runtime = await self._started(model)
        model.weights_bytes, model.created = (
            model.runtime.model.weights_bytes,
            model.runtime.model.created,
        )
        # The id of one that was found is its directory, which is nobody's name for it.
        if model.files is None:
            model.names = tuple(dict.fromkeys([*model.names, encodable(model.runtime.model.id)]))
        model.state, model.used_at = "ready", trio.current_time()

    async def _started(self, model: ManagedModel) -> Runtime:
        try:
            runtime: Runtime = await self.nursery.start(self._run, model)
        except BaseExceptionGroup as group:
            unusable, _ = group.split(ModelUnusable)
            if unusable is None:
                raise
            found = innermost(unusable)
            raise found from found.__cause__
        return runtime

    async def _run(self, model: ManagedModel, *, task_status: trio.TaskStatus[Runtime]) -> None:
        """Run the graph of a model. Raises `ActorFailed` if it is the only model, since then
        nothing is left to serve."""
        try:
            await self._start(model.settings, task_status=task_status)
        except* ActorFailed as failed:
            if len(self.models) == 1:
                raise
            log.warning("%s ends, the other models go on: %s", model.names[0], innermost(failed))
            model.problem = Problem(
                503,
                "the model crashed too often",
                "server_error",
                "model",
                code="model_failed",
                retry_after_s=60,
            )
            model.unusable_until = trio.current_time() + RETRY_S
        finally:
            model.runtime = None
            # If it could not be loaded, the reason is noted first: until then nobody is to try
            # again.
            if model.state != "loading":
                model.state, model.away_as = model.away_as, "unloaded"
            model.ended.set()
            self.notify()

    async def unload(
        self, model: ManagedModel, after: Away = "unloaded", *, at_once: bool = False
    ) -> None:
        """End the graph of a model, which has then written its blocks to disk and freed its memory.
        `at_once`: end its requests, too."""
        assert model.runtime is not None, "it is ready"
        model.state, model.away_as = "unloading", after
        ended = model.ended  # The next load has an event of its own.
        self.notify()
        await model.runtime.drain(0 if at_once else UNLOAD_S, leaving=after)
        await ended.wait()
        log.info("%s is %s", model.names[0], after)
        self.notify()

    async def load_what_fits(self) -> None:
        """Load the models after the first, in order, as long as no other must be unloaded for
        them."""
        for model in self.models[1:]:
            model.weights_bytes = await self._measured_or_none(model)
            if model.state == "unloaded" and model.weights_bytes and has_room_now(self, model):
                model.state = "waiting"
                self.nursery.start_soon(self._load_or_note_problem, model)
            while model.state in ("waiting", "loading") and not model.is_silent:
                await self.changed.wait()

    async def measured(self, model: ManagedModel) -> int:
        """Bytes of a model's weights; its date is noted. Raises `ModelUnusable`."""
        try:
            found = await self._measure(model.settings)
            model.created = found.created
            return found.weights_bytes
        except ModelUnusable:
            raise
        except Exception as error:
            raise unforeseen(error) from error

    async def _measured_or_none(self, model: ManagedModel) -> int:
        """Bytes of a model's weights; 0 if it cannot be loaded, in which case a request for it gets
        the reason."""
        try:
            return await self.measured(model)
        except ModelUnusable as unusable:
            log.warning("%s: %s", model.names[0], unusable)
            return 0

    # -- the end ---------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Drain all models, each with `Runtime.drain`."""
        self.draining = True
        self.notify()
        finished = []

        async def drain_graph(runtime: Runtime) -> None:
            finished.append(await runtime.drain(timeout_s))

        async with trio.open_nursery() as nursery:
            for model in self.models:
                if model.runtime is not None:
                    nursery.start_soon(drain_graph, model.runtime)
        self.finished.set()
        return all(finished)


async def run_model_manager(
    settings: Sequence[Settings],
    aliases: Sequence[str],
    start: StartGraph,
    measure: Callable[[Settings], Awaitable[Measured]],
    budget_bytes: int,
    *,
    default_name: str,
    max_models: int | None = None,
    ttl_s: float = 0.0,
    options: Mapping[str, ModelOptions] | None = None,
    progress: LoadProgress | None = None,
    scan: Scan | None = None,
    task_status: trio.TaskStatus[ModelManager],
) -> None:
    """Load the first model, return the model manager to the starter, load the others that fit; end
    when it was drained. `default_name`: of the model whose settings name none; `options`: by what
    settings name; `progress`: what `start` notes. Raises `ModelUnusable`, `SettingsInvalid`."""
    require_names([each.model or default_name for each in settings], aliases)
    async with trio.open_nursery() as nursery:
        models = [
            managed(
                each,
                names_of(each.model or default_name, aliases, default=index == 0),
                ttl_s,
                options or {},
            )
            for index, each in enumerate(settings)
        ]
        limits = LoadLimits(budget_bytes, max_models)
        manager = ModelManager(
            nursery, models, start, measure, limits=limits, progress=progress or LoadProgress()
        )
        await manager.load(models[0])
        task_status.started(manager)
        nursery.start_soon(manager.load_what_fits)
        nursery.start_soon(manager.control.put_idle_to_sleep)
        if scan is not None:
            nursery.start_soon(keep_found, manager, scan, ttl_s)
        await manager.finished.wait()
        nursery.cancel_scope.cancel()
