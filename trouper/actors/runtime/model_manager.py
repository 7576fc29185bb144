"""The model manager serves several models: one graph of actors for each loaded model, within a
bound on their weights.

Graphs share nothing. A model is loaded on request, if necessary after idle ones were unloaded. Each
user of a model holds a `Lease`, and a leased model is never unloaded unless forced. A sleeping
model has its cached blocks on disk, and is loaded again on request.

The table decides (`model_table.py`), and one task, `ModelManager.run`, does what comes next. All
others tell the table of an event, wake that task, and wait for the outcome.
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
    find_once,
    keep_found,
    load_problem,
    managed,
    unforeseen,
)
from trouper.actors.runtime.model_table import (
    AWAY,
    COMING,
    Away,
    Load,
    LoadLimits,
    Measure,
    ModelTable,
    Refuse,
    Unload,
    WaitUntil,
    lacking_room,
    loaded,
)
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import Lease, ModelEntry, Operation, named
from trouper.actors.runtime.supervision import innermost
from trouper.protocol.loading import Loading
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
    draining,
    leaves,
)
from trouper.protocol.settings import Settings
from trouper.system.model_download import Fetch, Report

log = logging.getLogger("trouper.models")
LOOK_S = 1.0  # Time between looks at the progress of a load.
UNLOAD_S = 5.0
CRASHED = Problem(
    503, "the model crashed too often", "server_error", "model", "model_failed", retry_after_s=60
)
PULLS_NOTHING = Problem(
    409,
    "models are downloaded only by a server with --models-from hub-cache; `trouper models pull` "
    "downloads one for the next start",
    code="models_not_pulled",
)


def not_servable(name: str) -> Problem:
    message = f"{name} was downloaded, and cannot be served; `trouper models info {name}` says why"
    return Problem(422, message, param="model", code="model_unusable")


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
        self.nursery = nursery
        self.table = ModelTable(list(models), limits)
        self.control = ManagerControl(self)
        self.finished = trio.Event()
        self._start = start
        self._measure = measure
        self._progress = progress
        self._changed = trio.Event()
        self._serves = False
        self._drained_by = -inf

    @property
    def models(self) -> list[ManagedModel]:
        return self.table.rows

    @property
    def draining(self) -> bool:
        return self.table.draining

    def entries(self) -> Sequence[ModelEntry]:
        held = loaded(self.models)
        return tuple(
            entry_of(model, held, self.table.limits, self._progress) for model in self.models
        )

    def find(self, name: str | None) -> ManagedModel:
        """The model of a name; None: the default. Raises `RequestFailed` (404)."""
        return named(name, self.models)

    async def lease(self, name: str | None) -> Lease:
        """Wait until the model is loaded, up to --queue-timeout-s for room, and return a lease."""
        model = self.find(name)
        wait = self.table.ask(model, trio.current_time(), model.settings.queue_timeout_s or inf)
        try:
            if not wait.is_over:
                self.notify()
                await self.until(lambda: wait.is_over)
        except BaseException:
            self.table.leave(model, wait, trio.current_time())
            self.notify()
            raise
        if wait.problem is not None:
            raise RequestFailed(self._problem_of(wait.problem))
        if model.runtime is None:  # The model has crashed since the lease was granted.
            self._release(model)
            return await self.lease(name)
        return Lease(model.names[0], model.runtime, lambda: self._release(model))

    def _problem_of(self, problem: Problem) -> Problem:
        if problem is DRAINING:
            return draining(self._drained_by, trio.current_time())
        return problem

    def _release(self, model: ManagedModel) -> None:
        self.table.release(model, trio.current_time())
        self.notify()

    def notify(self) -> None:
        """Wake the task of the manager, and all who wait for an outcome."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._changed.wait()

    # -- the task that does what comes next ------------------------------------------------------

    async def run(self) -> None:
        """Do what the table says comes next. Runs until cancelled."""
        try:
            while True:
                match self.table.next(trio.current_time()):
                    case Measure(model):
                        self.nursery.start_soon(self._measure_files, model)
                    case Load(model):
                        self.nursery.start_soon(self._run_graph, model)
                    case Unload(model, away_as, at_once):
                        self.nursery.start_soon(self.unload, model, away_as, at_once)
                    case Refuse(model, problem):
                        if model.state == "silent":
                            log.warning("%s", problem.message)
                    case WaitUntil(time):
                        self.notify()
                        with trio.move_on_at(time):
                            await self._changed.wait()
        finally:
            self.table.drain()
            self.notify()

    async def _measure_files(self, model: ManagedModel) -> None:
        try:
            self.table.measured(model, await self.measured(model))
        except ModelUnusable as unusable:
            if model.state == "measuring":
                self.table.ended(model, trio.current_time(), self._note_fault(model, unusable))
        self.notify()

    async def measured(self, model: ManagedModel) -> int:
        """Bytes of a model's weights. Raises `ModelUnusable`."""
        try:
            files = await self._measure(model.settings)
        except ModelUnusable:
            raise
        except Exception as error:
            raise unforeseen(error) from error
        model.created = files.created
        return files.weights_bytes

    async def _run_graph(self, model: ManagedModel) -> None:
        model.ended = trio.Event()
        problem: Problem | None = DRAINING  # Of whatever ends the server, too.
        try:
            async with trio.open_nursery() as nursery, trio.open_nursery() as loading:
                loading.start_soon(self._watch, model)
                model.runtime = await nursery.start(self._start, model.settings)
                loading.cancel_scope.cancel()
                self._note_loaded(model, model.runtime)
            problem = None
        except ExceptionGroup as group:
            is_crash = model.runtime is not None
            problem = self._note_crash(model, group) if is_crash else self._note_fault(model, group)
        finally:
            model.runtime = None
            self.table.ended(model, trio.current_time(), problem)
            model.ended.set()
            self.notify()

    def _note_loaded(self, model: ManagedModel, runtime: Runtime) -> None:
        model.created = runtime.model.created
        # The id of one that was found is its directory, which is nobody's name for it.
        if model.files is None:
            model.names = tuple(dict.fromkeys([*model.names, encodable(runtime.model.id)]))
        self.table.loaded(model, runtime.model.weights_bytes, trio.current_time())
        self.notify()

    async def _watch(self, model: ManagedModel) -> None:
        """Tell the table that loading makes progress. The only model is not watched."""
        latest = self._progress.of(model.settings.model)
        while self.table.has_several:
            await trio.sleep(LOOK_S)
            if (seen := self._progress.of(model.settings.model)) is not latest:
                latest = seen
                if model.problem is not None:
                    log.warning("%s goes on loading", model.names[0])
                self.table.heard(model, trio.current_time())
                self.notify()

    def _note_fault(self, model: ManagedModel, error: Exception) -> Problem:
        """Log why a model cannot be loaded. Raises the error again if none has ever been loaded."""
        if not self._serves:
            raise error
        # Whatever a model's files and code raise, the other models go on.
        unusable = next((leaf for leaf in leaves(error) if isinstance(leaf, ModelUnusable)), None)
        problem = load_problem(unusable or error)
        log.warning(
            "%s cannot be loaded: %s",
            model.names[0],
            problem.message,
            exc_info=None if unusable else error,
        )
        return problem

    def _note_crash(self, model: ManagedModel, crash: ExceptionGroup) -> Problem:
        """Raises the crash again if no other model is left, or if it is no actor's."""
        _, others = crash.split(ActorFailed)
        if others is not None or not self.table.has_several:
            raise crash
        log.warning("%s ends, the other models go on: %s", model.names[0], innermost(crash))
        return CRASHED

    async def unload(self, model: ManagedModel, away_as: Away, at_once: bool) -> None:
        """End the graph of a model, with blocks written and memory freed. `at_once`: end running
        requests, too."""
        if model.runtime is not None:  # Otherwise the model has crashed meanwhile.
            await model.runtime.drain(0 if at_once else UNLOAD_S, leaving=away_as)
            log.info("%s is %s", model.names[0], away_as)

    # -- the start and the end -------------------------------------------------------------------

    async def load_first(self) -> None:
        """Load the first model, whose faults end the manager."""
        first = self.models[0]
        self.table.request(first, trio.current_time())
        self.notify()
        await self.until(lambda: first.state == "ready")
        self._serves = True

    async def load_what_fits(self) -> None:
        """Load the models after the first, in order, while there is room."""
        for model in self.models[1:]:
            if model.state == "unloaded":
                self.table.request(model, trio.current_time())
                self.notify()
            while model.state in COMING and model.state != "silent":
                await self._changed.wait()

    async def drain(self, timeout_s: float) -> bool:
        self._drained_by = trio.current_time() + timeout_s
        self.table.drain()
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
    fetch: Fetch | None = None,
    task_status: trio.TaskStatus[ModelManager],
) -> None:
    """Load the first model, return the manager to the starter, load the others that fit; end when
    drained. `default_name`: of a model without a name in its settings; `options`: by model name;
    `fetch`: downloads a model that `scan` finds.
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
        nursery.start_soon(manager.run)
        await manager.load_first()
        task_status.started(manager)
        nursery.start_soon(manager.load_what_fits)
        if scan is not None:
            nursery.start_soon(keep_found, manager.models, scan, ttl_s)
            if fetch is not None:
                find = partial(find_once, manager.models, scan, ttl_s)
                manager.control.fetch = _fetched_and_found(fetch, find)
        await manager.finished.wait()
        nursery.cancel_scope.cancel()


def _fetched_and_found(fetch: Fetch, find: Callable[[], Awaitable[None]]) -> Fetch:
    async def fetch_and_find(name: str, report: Report) -> None:
        await fetch(name, report)
        await find()

    return fetch_and_find


class ManagerControl:
    """Implements `ModelControl`: each operation is a task of the manager's nursery."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self.fetch: Fetch | None = None
        self._pulls: dict[str, Operation] = {}

    def load(
        self, name: str | None, *, pinned: bool | None = None, ttl_s: float | None = None
    ) -> Operation:
        model = self._manager.find(name)
        work = partial(self._load, model, pinned, ttl_s)
        return self._begin(Operation(model.names[0]), work)

    def unload(self, name: str | None, *, force: bool = False, sleep: bool = False) -> Operation:
        model = self._manager.find(name)
        work = partial(self._unload, model, "asleep" if sleep else "unloaded", force=force)
        return self._begin(Operation(model.names[0]), work)

    def pull(self, name: str) -> Operation:
        if self.fetch is None:
            raise RequestFailed(PULLS_NOTHING)
        self._pulls = {name: pull for name, pull in self._pulls.items() if not pull.done.is_set()}
        if (running := self._pulls.get(name)) is not None:
            return running
        operation = self._pulls[name] = Operation(name)
        return self._begin(operation, partial(self._pull, operation, self.fetch))

    async def _pull(self, operation: Operation, fetch: Fetch) -> None:
        def report(done: int, total: int) -> None:
            operation.progress = Loading(operation.name, "downloading", done, total)

        try:
            await fetch(operation.name, report)
        except ModelUnusable:
            raise
        except Exception as error:
            # No process may be left for it, or a directory be unreadable: the models go on.
            log.exception("%s cannot be downloaded", operation.name)
            raise unforeseen(error) from innermost(error)
        if all(operation.name not in model.names for model in self._manager.models):
            raise RequestFailed(not_servable(operation.name))

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
                adapter, directory, partial(self._make_room, model, adapter)
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

    async def _make_room(self, model: ManagedModel, adapter: str, nbytes: int) -> None:
        """Make room for a LoRA adapter within --model-memory. The bytes count until the caller
        corrects the sum. Raises `RequestFailed` (507)."""
        wait = self._manager.table.grow(model, nbytes, trio.current_time())
        self._manager.notify()
        await self._manager.until(lambda: wait.is_over)
        if wait.problem is DRAINING:
            raise RequestFailed(DRAINING)
        if wait.problem is not None:
            raise insufficient(f"with the adapter {adapter!r} {wait.problem.message}")

    def _begin(self, operation: Operation, work: Callable[[], Awaitable[None]]) -> Operation:
        if self._manager.draining:
            raise RequestFailed(DRAINING)
        # The request's context ends with it.
        Context().run(self._manager.nursery.start_soon, _run, operation, work)
        return operation

    async def _load(self, model: ManagedModel, pinned: bool | None, ttl_s: float | None) -> None:
        table = self._manager.table
        if model.state in AWAY:
            model.weights_bytes = await self._manager.measured(model)
            if reason := lacking_room(table.rows, model, table.limits):
                raise RequestFailed(
                    Problem(507, reason, "server_error", "model", code="insufficient_memory")
                )
            model.unusable_until = -inf  # Its files may have been repaired since.
        lease = await self._manager.lease(model.names[0])
        model.pinned = model.pinned if pinned is None else pinned
        model.ttl_s = model.ttl_s if ttl_s is None else ttl_s
        lease.release()

    async def _unload(self, model: ManagedModel, away_as: Away, *, force: bool) -> None:
        manager = self._manager
        await manager.until(lambda: model.state not in COMING or model.problem is not None)
        if model.state in COMING and model.problem is not None:
            raise RequestFailed(model.problem)
        ended = model.ended  # The next load has an event of its own.
        manager.table.unload(model, away_as, trio.current_time(), force=force)
        if model.runtime is not None:
            model.runtime.leaving = away_as
            manager.notify()
            await ended.wait()


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
