"""The model manager serves several models: one graph of six actors for each loaded model, within a bound on their weights.

Nothing is shared between the graphs, so one model's requests never wait in another's queue or batch. A model is
loaded when it is first requested, if necessary after the least recently used idle models were unloaded. Each user of a
model holds a `Lease` on it, and a leased model is never unloaded: a request for one does not end another's.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Literal, Protocol

import attrs
import trio

from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.supervision import innermost
from trouper.protocol.names import names_of, require_names
from trouper.protocol.problems import DRAINING, ActorFailed, ModelUnusable, Problem, RequestFailed
from trouper.protocol.settings import Settings

log = logging.getLogger("trouper.fleet")
UNLOAD_S = 5.0
"""Maximum wait for an idle graph to finish its writes to disk."""
RETRY_S = 60.0
"""Time until a model that could not be loaded is tried again, since each try may unload another model."""

State = Literal["unloaded", "waiting", "loading", "ready", "unloading"]


class StartGraph(Protocol):
    """Load a model and run its graph until it was drained."""

    def __call__(self, settings: Settings, /, *, task_status: trio.TaskStatus[Runtime]) -> Awaitable[None]: ...


@attrs.frozen(eq=False)
class Lease:
    """The right to use a loaded model until it is released."""

    name: str
    runtime: Runtime
    _give_back: Callable[[], None]

    def release(self) -> None:
        """Release the lease. To be called once."""
        self._give_back()


@attrs.frozen
class ModelEntry:
    """A model that clients may request. `runtime` is None while it is not loaded."""

    names: tuple[str, ...]
    """Names of the model. The first one is its id in the API."""
    state: State
    runtime: Runtime | None
    waiting: int = 0
    """Number of requests that wait until the model is loaded."""
    problem: Problem | None = None
    """Problem of the last attempt to load the model."""


class Models(Protocol):
    """Interface by which the edge gets models."""

    @property
    def finished(self) -> trio.Event:
        """Set when all were drained."""

    def listed(self) -> Sequence[ModelEntry]:
        """All models that clients may request, the default first."""

    async def lease(self, name: str | None) -> Lease:
        """The model of that name, loaded; None: the default. Raises `RequestFailed` (404, 503)."""


class OneModel:
    """A runtime that the caller started, as the only model. Raises `SettingsInvalid` for a name without effect."""

    def __init__(self, runtime: Runtime, aliases: Sequence[str] = ()) -> None:
        require_names((runtime.model.id,), aliases)
        self._listed = ModelEntry(names_of(runtime.model.id, aliases, default=True), "ready", runtime)
        self._runtime = runtime

    @property
    def finished(self) -> trio.Event:
        return self._runtime.finished

    def listed(self) -> Sequence[ModelEntry]:
        return (self._listed,)

    async def lease(self, name: str | None) -> Lease:
        if name is not None and name not in self._listed.names:
            raise model_not_found(name, (self._listed,))
        return Lease(self._listed.names[0], self._runtime, lambda: None)


@attrs.define(eq=False)
class ManagedModel:
    """State of one model in the model manager."""

    settings: Settings
    names: tuple[str, ...]
    state: State = "unloaded"
    runtime: Runtime | None = None
    weights_bytes: int = 0
    leases: int = 0
    """Number of leases, including those of waiting requests."""
    waiting: int = 0
    """Number of requests that wait for the model."""
    used_at: float = 0.0
    problem: Problem | None = None
    """Problem of the last attempt to load the model."""
    unusable_until: float = -inf
    """Time until which the model is not loaded again."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    """Set when the model's graph has ended."""


class ModelManager:
    """Implements `Models`. Its graphs live in the nursery of `run`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        members: Sequence[ManagedModel],
        start: StartGraph,
        measure: Callable[[Settings], Awaitable[int]],
        budget_bytes: int,
    ) -> None:
        self._nursery, self._members = nursery, tuple(members)
        self._start, self._measure, self._budget = start, measure, budget_bytes
        self._loader = trio.StrictFIFOLock()
        self._changed = trio.Event()
        self.draining = False
        self.finished = trio.Event()

    def listed(self) -> Sequence[ModelEntry]:
        return tuple(
            ModelEntry(member.names, member.state, member.runtime, member.waiting, member.problem)
            for member in self._members
        )

    async def lease(self, name: str | None) -> Lease:
        """Waits while the model is loaded, or while there is no room for it (--queue-timeout-s)."""
        member = self._find(name)
        member.leases += 1
        member.waiting += 1
        try:
            await self._wait_until_ready(member)
        except BaseException:
            self._release(member)
            raise
        finally:
            member.waiting -= 1
        assert member.runtime is not None, "it is ready"
        return Lease(member.names[0], member.runtime, lambda: self._release(member))

    async def _wait_until_ready(self, member: ManagedModel) -> None:
        self._refuse_if_draining()
        while member.state != "ready":
            self._ask_for(member)
            await self._changed.wait()
            self._refuse_if_draining()
            if member.problem is not None:
                raise RequestFailed(member.problem)

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise RequestFailed(DRAINING)

    def _find(self, name: str | None) -> ManagedModel:
        if name is None:
            return self._members[0]
        found = next((member for member in self._members if name in member.names), None)
        if found is None:
            raise model_not_found(name, self.listed())
        return found

    def _release(self, member: ManagedModel) -> None:
        member.leases -= 1
        member.used_at = trio.current_time()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # -- loading ---------------------------------------------------------------------------------

    def _ask_for(self, member: ManagedModel) -> None:
        """Start loading in a separate task, which continues when the client aborts. Raises the problem of the last attempt if that
        was recent."""
        if member.state != "unloaded":
            return
        if member.problem is not None and trio.current_time() < member.unusable_until:
            raise RequestFailed(member.problem)
        member.state, member.problem = "waiting", None
        self._nursery.start_soon(self._bring, member)

    async def _bring(self, member: ManagedModel) -> None:
        try:
            await self.load(member)
        except ModelUnusable as unusable:
            log.warning("%s cannot be loaded: %s", member.names[0], unusable)
            member.problem = Problem(500, str(unusable), "server_error", "model", "model_unusable")
            member.unusable_until = trio.current_time() + RETRY_S
        except RequestFailed as refused:
            member.problem = refused.problem
        finally:
            if member.state != "ready":
                member.state = "unloaded"
            self._tell()

    async def load(self, member: ManagedModel) -> None:
        """Load a model; one at a time. Raises `ModelUnusable`, or `RequestFailed` (503) if there is no room for it."""
        async with self._loader:
            if len(self._members) > 1:
                member.weights_bytes = await self._measure(member.settings)
                await self._make_room(member)
            member.state, member.ended = "loading", trio.Event()
            member.runtime = await self._started(member)
            member.weights_bytes = member.runtime.model.weights_bytes
            member.names = tuple(dict.fromkeys([*member.names, member.runtime.model.id]))
            member.state, member.used_at = "ready", trio.current_time()

    async def _started(self, member: ManagedModel) -> Runtime:
        try:
            runtime: Runtime = await self._nursery.start(self._run, member)
        except BaseExceptionGroup as group:
            unusable, _ = group.split(ModelUnusable)
            if unusable is None:
                raise
            raise _first(unusable) from None
        return runtime

    async def _run(self, member: ManagedModel, *, task_status: trio.TaskStatus[Runtime]) -> None:
        """Run the graph of a model. Raises `ActorFailed` if it is the only model, since then nothing is left to serve."""
        try:
            await self._start(member.settings, task_status=task_status)
        except* ActorFailed as failed:
            if len(self._members) == 1:
                raise
            log.warning("%s ends, the other models go on: %s", member.names[0], innermost(failed))
            member.problem = Problem(503, "the model crashed too often", "server_error", "model", "model_failed", 60)
            member.unusable_until = trio.current_time() + RETRY_S
        finally:
            member.state, member.runtime = "unloaded", None
            member.ended.set()
            self._tell()

    async def _make_room(self, member: ManagedModel) -> None:
        """Unload idle models until `member` fits. Raises `RequestFailed` (503) when the others were in use for --queue-timeout-s."""
        limit_s = member.settings.queue_timeout_s or float("inf")
        with trio.move_on_after(limit_s):
            while not self._fits(member):
                idle = [other for other in self._loaded() if not other.leases]
                if idle:
                    await self._unload(min(idle, key=lambda other: other.used_at))
                else:
                    await self._changed.wait()
            return
        message = (
            f"{member.names[0]} is not loaded, and the other models were in use for {limit_s:g} s (--model-memory)"
        )
        raise RequestFailed(Problem(503, message, "server_error", "model", "no_memory_for_model", 5))

    def _loaded(self) -> list[ManagedModel]:
        return [member for member in self._members if member.state == "ready"]

    def _fits(self, member: ManagedModel) -> bool:
        """Whether a model fits beside the loaded ones. A single model may be of any size; loading fails if the machine has no room."""
        loaded = self._loaded()
        return not loaded or sum(other.weights_bytes for other in loaded) + member.weights_bytes <= self._budget

    async def _unload(self, member: ManagedModel) -> None:
        log.info("unloading %s to make room", member.names[0])
        assert member.runtime is not None, "it is ready"
        member.state = "unloading"
        await member.runtime.drain(UNLOAD_S)
        await member.ended.wait()
        self._tell()

    async def load_what_fits(self) -> None:
        """Load the models after the first, in order, as long as no other must be unloaded for them."""
        for member in self._members[1:]:
            member.weights_bytes = await self._measured(member)
            if member.state == "unloaded" and member.weights_bytes and self._fits(member):
                member.state = "waiting"
                await self._bring(member)

    async def _measured(self, member: ManagedModel) -> int:
        """Bytes of a model's weights; 0 if it cannot be loaded, in which case a request for it gets the reason."""
        try:
            return await self._measure(member.settings)
        except ModelUnusable as unusable:
            log.warning("%s: %s", member.names[0], unusable)
            return 0

    # -- the end ---------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Drain all models, each with `Runtime.drain`."""
        self.draining = True
        self._tell()
        finished = []

        async def drain_graph(runtime: Runtime) -> None:
            finished.append(await runtime.drain(timeout_s))

        async with trio.open_nursery() as nursery:
            for member in self._members:
                if member.runtime is not None:
                    nursery.start_soon(drain_graph, member.runtime)
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
    """Load the first model, hand out the model manager, load the others that fit; return when it was drained. `measure`
    returns the bytes of a model's weights; `default_name` is the name of the model whose settings name none. Raises `ModelUnusable`, and
    `SettingsInvalid` for a name without effect."""
    require_names([member.model or default_name for member in settings], aliases)
    async with trio.open_nursery() as nursery:
        members = [
            ManagedModel(member, names_of(member.model or default_name, aliases, default=place == 0))
            for place, member in enumerate(settings)
        ]
        manager = ModelManager(nursery, members, start, measure, budget_bytes)
        await manager.load(members[0])
        task_status.started(manager)
        nursery.start_soon(manager.load_what_fits)
        await manager.finished.wait()
        nursery.cancel_scope.cancel()


def model_not_found(model: str, listed: Sequence[ModelEntry]) -> RequestFailed:
    served = ", ".join(repr(member.names[0]) for member in listed)
    message = f"the model {model!r} is not served here; {served} {'is' if len(listed) == 1 else 'are'}"
    return RequestFailed(Problem(404, message, "invalid_request_error", "model", "model_not_found"))


def _first(group: BaseExceptionGroup[ModelUnusable]) -> ModelUnusable:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ModelUnusable)
    return error
