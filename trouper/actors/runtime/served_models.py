"""Models as the HTTP server sees them: entries, and leases on loaded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import attrs
import trio

from trouper.actors.runtime.model_table import Shown
from trouper.actors.runtime.runtime import Runtime
from trouper.protocol.loading import Loading
from trouper.protocol.names import adapters_of, names_of, require_names
from trouper.protocol.problems import Problem, RequestFailed, quoted
from trouper.storage.model_files import ModelFiles


@attrs.frozen(eq=False)
class Lease:
    """The right to use a loaded model until released."""

    name: str
    runtime: Runtime
    _give_back: Callable[[], None]

    def release(self) -> None:
        self._give_back()


@attrs.frozen
class ModelEntry:
    """A model that clients may request. `runtime` is None unless loaded."""

    names: tuple[str, ...]
    """The first name is the id in the API."""
    state: Shown
    runtime: Runtime | None
    waiting: int = 0
    problem: Problem | None = None
    pinned: bool = False
    ttl_s: float = 0.0
    """Time without requests until sleep; 0: never."""
    weights_bytes: int = 0
    """0: unknown."""
    created: int = 0
    """Unix time of the config; 0: unknown, since the files were never read."""
    progress: Loading | None = None
    adapters: tuple[str, ...] = ()
    adapter_directories: tuple[str, ...] = ()
    unloaded_adapters: tuple[str, ...] = ()
    files: ModelFiles | None = None
    """Facts from the model's files; None for a model of --model."""
    _fits: Callable[[], bool | None] = attrs.field(default=lambda: None, eq=False, repr=False)

    @property
    def fits(self) -> bool | None:
        """Whether loading would disturb nobody; None: unknown size."""
        # Computed on demand: requests look through the entries for names.
        return self._fits()

    @property
    def is_unused(self) -> bool:
        """Whether a model of --models-from is unused, unpinned, and has not failed."""
        if self.files is None or self.state != "unloaded":
            return False
        return not (self.waiting or self.pinned or self.problem)


@attrs.define(eq=False)
class Operation:
    """Loading or unloading on demand. `problem` is why it failed, once it is `done`."""

    name: str
    done: trio.Event = attrs.field(factory=trio.Event)
    problem: Problem | None = None
    progress: Loading | None = None
    """Of a download; progress of loading is the entry's."""


class ModelControl(Protocol):
    """Starts operations, which outlive their clients. Raises `RequestFailed` (404) for an unknown
    name."""

    def load(
        self, name: str | None, *, pinned: bool | None = None, ttl_s: float | None = None
    ) -> Operation:
        """Load or wake a model. Fails with 507 if pinned or used models leave no room; then
        `pinned` and `ttl_s` have no effect."""

    def unload(self, name: str | None, *, force: bool = False, sleep: bool = False) -> Operation:
        """Unload a model, or put one to sleep, after its running requests. `force`: end these with
        an error, and ignore a pin. Fails with 409 for a pinned model."""

    def pin(self, name: str | None, *, pinned: bool) -> str:
        """Pin or release a model. Returns the name in the API."""

    def pull(self, name: str) -> Operation:
        """Download a model of the hub, which is then served. Fails with 409 where models of the
        hub's cache are not."""

    async def load_adapter(self, name: str | None, adapter: str, directory: str) -> None:
        """Load a LoRA adapter for good, its model first. Raises `RequestFailed` (507: too large),
        and `ModelUnusable`."""

    async def unload_adapter(self, name: str | None, adapter: str) -> None:
        """Refuse new requests with a LoRA adapter, and unload the adapter after the last one.
        Raises `RequestFailed` (404)."""


class Models(Protocol):
    """Interface by which the HTTP server gets models."""

    @property
    def finished(self) -> trio.Event: ...

    @property
    def draining(self) -> bool: ...

    @property
    def control(self) -> ModelControl | None:
        """Loads and unloads on demand; None for the only model of an embedding program."""

    def entries(self) -> Sequence[ModelEntry]:
        """The default first."""

    async def lease(self, name: str | None) -> Lease:
        """The loaded model of that name; None: the default. Raises `RequestFailed` (404, 503)."""


class OneModel:
    """A runtime that the caller started, as the only model. Raises `SettingsInvalid` for a name
    without effect."""

    def __init__(self, runtime: Runtime, aliases: Sequence[str] = ()) -> None:
        require_names((runtime.model.id,), aliases)
        self._entry = ModelEntry(
            names_of(runtime.model.id, aliases, default=True),
            "ready",
            runtime,
            created=runtime.model.created,
            adapter_directories=tuple(adapters_of(runtime.settings.adapter).values()),
        )
        self._runtime = runtime

    @property
    def finished(self) -> trio.Event:
        return self._runtime.finished

    @property
    def draining(self) -> bool:
        return self._runtime.draining

    @property
    def control(self) -> None:
        return None

    def entries(self) -> Sequence[ModelEntry]:
        adapters = tuple(card.name for card in self._runtime.adapters)
        unloaded = self._runtime.unloaded_adapters
        return (attrs.evolve(self._entry, adapters=adapters, unloaded_adapters=unloaded),)

    async def lease(self, name: str | None) -> Lease:
        named(name, (self._entry,))
        return Lease(self._entry.names[0], self._runtime, lambda: None)


class Named(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...


N = TypeVar("N", bound=Named)


def named(model: str | None, models: Sequence[N]) -> N:
    """The model of a name; None: the first one. Raises `RequestFailed` (404)."""
    found = next((each for each in models if model is None or model in each.names), None)
    if found is not None:
        return found
    served = ", ".join(repr(each.names[0]) for each in models)
    message = (
        f"the model {quoted(model or '')} does not exist here; {served} "
        f"{'is' if len(models) == 1 else 'are'} served"
    )
    if not models:
        message = "no model is served here that this API key may use (models in --api-key-file)"
    raise RequestFailed(Problem(404, message, "invalid_request_error", "model", "model_not_found"))
