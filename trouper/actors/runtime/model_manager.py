"""The model manager serves several models: one graph of actors for each loaded model, within a
bound on their weights.

Graphs share nothing. A model is loaded on
request, if necessary after idle models were unloaded. Each user of a model holds a `Lease`, and a
leased model is never unloaded unless forced. A sleeping model has its cached blocks on disk, and is
loaded again on request.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from math import inf
from typing import Protocol

import attrs
import trio

from trouper.actors.runtime.adapter_table import insufficient, with_unloaded
from trouper.actors.runtime.managed_model import (
    LoadProgress,
    ManagedModel,
    Scan,
    entry_of,
    keep_found,
    load_problem,
    managed,
    unforeseen,
)
from trouper.actors.runtime.model_table import (
    AWAY,
    Away,
    LoadLimits,
    Refuse,
    Unload,
    lacking_room,
    loaded,
    next_for,
)
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import (
    Lease,
    ModelEntry,
    Operation,
    model_not_found,
)
from trouper.actors.runtime.supervision import innermost
from trouper.protocol.model import Measured
from trouper.protocol.model_options import ModelOptions
from trouper.protocol.names import adapters_of, names_of, require_names
from trouper.protocol.paths import encodable
from trouper.protocol.problems import (
    DRAINING,
    ActorFailed,
    ModelUnusable,
    Problem,
    RequestFailed,
    adapter_unknown,
)
from trouper.protocol.settings import Settings

log = logging.getLogger("trouper.models")
LOOK_S = 1.0
# Most files are opened and read in less than a second. A dead network mount, or a FIFO, hangs a
# load, and nothing can interrupt the thread; its weights count as loaded, since the load may go on.
SILENT_S = 15.0  # Time without progress after which others load beside this model.
# Kernels of a large model take up to a minute to compile.
STALLED_S = 120.0  # Time without progress after which requests for the model are refused.
UNLOAD_S = 5.0
RETRY_S = 60.0  # Time between attempts to load a faulty model, since each may unload another.


class LoadTurns:
    """Turns of loading: one model after another, but not behind a silent one. `changed` is called
    when a model stalls, or goes on."""

    def __init__(self, progress: LoadProgress, changed: Callable[[], None]) -> None:
        self._progress, self._changed = progress, changed
        self._turn = trio.CapacityLimiter(1)
        self._holder: object = None

    async def take(self, holder: object) -> None:
        await self._turn.acquire_on_behalf_of(holder)
        self._holder = holder

    def give(self, holder: object) -> None:
        if self._holder is holder:
            self._holder = None
            self._turn.release_on_behalf_of(holder)

    async def watched(self, model: ManagedModel, load: Callable[[], Awaitable[None]]) -> None:
        """Load a model in its turn, which ends early in silence. Raises what `load` raises."""
        failed: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, model)
            try:
                await load()
            except Exception as error:  # noqa: BLE001
                # Raised again below, outside of the nursery, which would wrap it.
                failed = error
            nursery.cancel_scope.cancel()
        model.is_silent, model.problem = False, model.problem if failed else None
        if failed is not None:
            raise failed

    async def _watch(self, model: ManagedModel) -> None:
        latest, since = self._progress.of(model.settings.model), trio.current_time()
        while True:
            await trio.sleep(LOOK_S)
            found, silent_s = self._progress.of(model.settings.model), trio.current_time() - since
            if found is not latest:
                latest, since = found, trio.current_time()
                self._note(model, None)
            elif silent_s >= STALLED_S:
                self._note(model, _stalled(model))
            elif silent_s >= SILENT_S and not model.is_silent:
                model.is_silent = True
                self.give(model)
                self._changed()

    def _note(self, model: ManagedModel, problem: Problem | None) -> None:
        if (problem is None) != (model.problem is None):
            model.problem = problem
            log.warning(
                "%s", f"{model.names[0]} goes on loading" if problem is None else problem.message
            )
            self._changed()


def _stalled(model: ManagedModel) -> Problem:
    message = (
        f"{model.names[0]} is being loaded and has made no progress for {STALLED_S:g} s: its files "
        f"({model.settings.model}) may be on a file system that does not answer"
    )
    return Problem(
        503, message, "server_error", "model", code="model_load_stalled", retry_after_s=30
    )


class StartGraph(Protocol):
    def __call__(
        self, settings: Settings, /, *, task_status: trio.TaskStatus[Runtime]
    ) -> Awaitable[None]: ...


class ModelManager:
    """Implements `Models`; the graphs run in `nursery`."""

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
        self.control, self.turns = ManagerControl(self), LoadTurns(progress, self.notify)
        self.changed = trio.Event()
        """Set, and replaced, when the state of any model changes."""
        self.draining, self.finished = False, trio.Event()

    def entries(self) -> Sequence[ModelEntry]:
        held = loaded(self.models)
        return tuple(entry_of(model, held, self.limits, self._progress) for model in self.models)

    async def lease(self, name: str | None) -> Lease:
        """Wait until the model is loaded, up to --queue-timeout-s for room, and return a lease."""
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
        """The model of a name; None: the default. Raises `RequestFailed` (404)."""
        found = next((model for model in self.models if name is None or name in model.names), None)
        if found is None:
            raise model_not_found(name or "", self.entries())
        return found

    def _release(self, model: ManagedModel) -> None:
        model.leases -= 1
        model.used_at = trio.current_time()
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    # -- loading ---------------------------------------------------------------------------------

    def _request_load(self, model: ManagedModel) -> None:
        """Load in a separate task, which outlives the client and has none of its context variables.
        Raises the problem of a recent attempt."""
        if model.state == "loading" and model.problem is not None:
            raise RequestFailed(model.problem)
        if model.state not in AWAY:
            return
        if model.problem is not None and trio.current_time() < model.unusable_until:
            raise RequestFailed(model.problem)
        model.enter("waiting")
        model.problem = None
        Context().run(self.nursery.start_soon, self._load_or_note_problem, model)

    async def _load_or_note_problem(self, model: ManagedModel) -> None:
        try:
            await self.load(model)
        except RequestFailed as refused:
            model.problem = refused.problem
        except Exception as error:  # noqa: BLE001
            # Whatever a model's files and code raise, the other models go on.
            self._note_problem(model, error)
        finally:
            if model.state in ("waiting", "loading"):
                model.enter("unloaded")
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
        """Load a model in its turn. Raises `ModelUnusable`, or `RequestFailed` (503) for lack of
        room."""
        if len(self.models) > 1:
            model.weights_bytes = await self.measured(model)
        await load_in_turn(self, model, partial(self._load_now, model))

    async def _load_now(self, model: ManagedModel) -> None:
        model.enter("loading")
        model.ended = trio.Event()
        model.runtime = await self._started(model)
        model.weights_bytes, model.created = (
            model.runtime.model.weights_bytes,
            model.runtime.model.created,
        )
        # The id of one that was found is its directory, which is nobody's name for it.
        if model.files is None:
            model.names = tuple(dict.fromkeys([*model.names, encodable(model.runtime.model.id)]))
        model.enter("ready")
        model.used_at = trio.current_time()

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
        """Run the graph of a model. Raises `ActorFailed` if no other model is left to serve."""
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
                model.leave()
            model.ended.set()
            self.notify()

    async def unload(
        self, model: ManagedModel, after: Away = "unloaded", *, at_once: bool = False
    ) -> None:
        """End the graph of a model, with blocks written and memory freed. `at_once`: end running
        requests, too."""
        assert model.runtime is not None, "it is ready"
        model.enter("unloading")
        model.away_as = after
        ended = model.ended  # The next load has an event of its own.
        self.notify()
        await model.runtime.drain(0 if at_once else UNLOAD_S, leaving=after)
        await ended.wait()
        log.info("%s is %s", model.names[0], after)
        self.notify()

    async def load_what_fits(self) -> None:
        """Load the models after the first, in order, while there is room."""
        for model in self.models[1:]:
            model.weights_bytes = await self._measured_or_none(model)
            fits = next_for(self.models, model, self.limits) == "load"
            if model.state == "unloaded" and model.weights_bytes and fits:
                model.enter("waiting")
                self.nursery.start_soon(self._load_or_note_problem, model)
            while model.state in ("waiting", "loading") and not model.is_silent:
                await self.changed.wait()

    async def measured(self, model: ManagedModel) -> int:
        """Bytes of a model's weights. Raises `ModelUnusable`."""
        try:
            found = await self._measure(model.settings)
            model.created = found.created
            return found.weights_bytes
        except ModelUnusable:
            raise
        except Exception as error:
            raise unforeseen(error) from error

    async def _measured_or_none(self, model: ManagedModel) -> int:
        try:
            return await self.measured(model)
        except ModelUnusable as unusable:
            log.warning("%s: %s", model.names[0], unusable)
            return 0

    # -- the end ---------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
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
    """Load the first model, return the manager to the starter, load the others that fit; end when
    drained. `default_name`: of a model without a name in its settings; `options`: by model name.
    Raises `ModelUnusable`, `SettingsInvalid`."""
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
            nursery.start_soon(keep_found, manager.models, scan, ttl_s)
        await manager.finished.wait()
        nursery.cancel_scope.cancel()


async def until_room(manager: ModelManager, model: ManagedModel) -> bool:
    """Wait until a model would fit without all idle ones. False: nobody waits any more. Raises
    `RequestFailed` (503): at once if pinned models leave no room, else after --queue-timeout-s."""
    limit_s = model.settings.queue_timeout_s or inf
    with trio.move_on_after(limit_s):
        while True:
            step = next_for(manager.models, model, manager.limits)
            if isinstance(step, Refuse):
                raise _refused(step.reason)
            if step != "wait":
                return True
            if not model.waiting:
                return False
            await manager.changed.wait()
    raise _refused(
        f"{model.names[0]} is not loaded, and the other models were in use for {limit_s:g} s "
        "(--model-memory)"
    )


async def make_room(manager: ModelManager, model: ManagedModel) -> bool:
    """Unload idle models, least recently used first, until a model fits. False: too many are in use
    again."""
    while (step := next_for(manager.models, model, manager.limits)) != "load":
        if not isinstance(step, Unload):
            return False
        await manager.unload(step.model)
    return True


async def load_in_turn(
    manager: ModelManager, model: ManagedModel, load: Callable[[], Awaitable[None]]
) -> None:
    """Load a model in its turn when there is room, unless nobody waits any more. Raises
    `RequestFailed` (503), and what `load` raises."""
    while await until_room(manager, model):
        await manager.turns.take(model)
        try:
            if await make_room(manager, model):
                await (manager.turns.watched(model, load) if len(manager.models) > 1 else load())
                return
        finally:
            manager.turns.give(model)


async def room_for_adapter(
    manager: ModelManager, model: ManagedModel, adapter: str, nbytes: int
) -> None:
    """Make room for a LoRA adapter within --model-memory. The bytes count as the model's until the
    caller corrects the sum. Raises `RequestFailed` (507)."""
    model.weights_bytes += nbytes
    await manager.turns.take(turn := object())
    try:
        reason = lacking_room(manager.models, model, manager.limits)
        if not reason and not await make_room(manager, model):
            reason = (
                lacking_room(manager.models, model, manager.limits)
                or "idle models are in use again: try again"
            )
    finally:
        manager.turns.give(turn)
    if reason:
        raise insufficient(f"with the adapter {adapter!r} {reason}")


def _refused(message: str) -> RequestFailed:
    return RequestFailed(
        Problem(503, message, "server_error", "model", code="no_memory_for_model", retry_after_s=5)
    )


class ManagerControl:
    """Implements `ModelControl`: each operation is a task of the manager."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def load(
        self, name: str | None, *, pinned: bool | None = None, ttl_s: float | None = None
    ) -> Operation:
        model = self._manager.find(name)
        return self._begin(model, lambda: self._load(model, pinned, ttl_s))

    def unload(self, name: str | None, *, force: bool = False, sleep: bool = False) -> Operation:
        model = self._manager.find(name)
        return self._begin(
            model, lambda: self._unload(model, "asleep" if sleep else "unloaded", force=force)
        )

    def pin(self, name: str | None, *, pinned: bool) -> str:
        model = self._manager.find(name)
        model.pinned = pinned
        self._manager.notify()
        return model.names[0]

    async def load_adapter(self, name: str | None, adapter: str, directory: str) -> None:
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
            if after == "unloaded":
                model.enter("unloaded")
            return
        if model.pinned and not force:
            message = f"{model.names[0]} is pinned: release it (POST /v1/models/pin), or send force"
            raise RequestFailed(
                Problem(409, message, "invalid_request_error", "model", code="model_pinned")
            )
        # Requests that come now wait, and load it again.
        model.enter("unloading")
        runtime = model.runtime
        if runtime is not None:
            runtime.leaving = after
        manager.notify()
        while not force and model.running and model.runtime is runtime:
            await manager.changed.wait()
        if runtime is not None and model.runtime is runtime:
            await manager.unload(model, after, at_once=force)

    async def put_idle_to_sleep(self) -> None:
        """Put models to sleep at the end of their time to live. Runs until cancelled."""
        manager = self._manager
        while True:
            now = trio.current_time()
            due = [model for model in manager.models if model.sleeps_at <= now]
            for model in due:
                if model.sleeps_at <= trio.current_time():  # Not used meanwhile.
                    await manager.unload(model, "asleep")
            if not due:
                with trio.move_on_at(
                    min((model.sleeps_at for model in manager.models), default=inf)
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
