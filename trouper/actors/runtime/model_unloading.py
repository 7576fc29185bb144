"""The state of a managed model, and which idle model is unloaded to make room: the least recently
used one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf

import attrs
import trio

from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import ModelEntry, State
from trouper.actors.runtime.supervision import innermost
from trouper.protocol.loading import Loading, LoadWatch
from trouper.protocol.model_options import DEFAULT_OPTIONS, ModelOptions
from trouper.protocol.names import adapters_of
from trouper.protocol.paths import encodable
from trouper.protocol.problems import ModelUnusable, Problem, is_shortage
from trouper.protocol.settings import Settings
from trouper.storage.model_files import ModelFiles

AWAY = ("unloaded", "asleep")


class LoadProgress:
    """The latest progress of each model. Engines' threads write, anybody reads."""

    def __init__(self) -> None:
        self._latest: dict[str | None, Loading] = {}

    def watching(self, model: str | None, watch: LoadWatch) -> LoadWatch:
        def note(loading: Loading) -> None:
            self._latest[model] = loading
            watch(loading)

        return note

    def of(self, model: str | None) -> Loading | None:
        return self._latest.get(model)


@attrs.define(eq=False)
class ManagedModel:
    settings: Settings
    names: tuple[str, ...]
    state: State = "unloaded"
    runtime: Runtime | None = None
    weights_bytes: int = 0
    created: int = 0
    """Unix time of the model's config; 0: unknown."""
    leases: int = 0
    waiting: int = 0
    used_at: float = 0.0
    """Time of loading, or of the last release of a lease."""
    problem: Problem | None = None
    unusable_until: float = -inf
    pinned: bool = False
    ttl_s: float = 0.0
    """Time without requests until sleep; 0: never."""
    away_as: State = "unloaded"
    files: ModelFiles | None = None
    """Facts from the model's files; None for a model of --model."""
    # Outlast the graph, which ends when the model sleeps.
    unloaded_adapters: tuple[str, ...] = ()
    ended: trio.Event = attrs.field(factory=trio.Event)
    is_silent: bool = False
    """Whether loading is silent for so long that others load beside it."""

    @property
    def running(self) -> int:
        return self.leases - self.waiting

    @property
    def is_idle(self) -> bool:
        return self.state == "ready" and not self.leases and not self.pinned

    @property
    def is_kept(self) -> bool:
        return self.state == "ready" and self.pinned


@attrs.frozen
class LoadLimits:
    weights_bytes: int
    max_models: int | None = None


def managed(
    settings: Settings, names: tuple[str, ...], ttl_s: float, options: Mapping[str, ModelOptions]
) -> ManagedModel:
    """State of a model of --model. `ttl_s`: default for models whose options name none."""
    own = options.get(settings.model or "", DEFAULT_OPTIONS)
    return ManagedModel(
        settings, names, pinned=own.pinned, ttl_s=ttl_s if own.ttl_s is None else own.ttl_s
    )


def has_room(others: Sequence[ManagedModel], new: ManagedModel, limits: LoadLimits) -> bool:
    """Whether a model fits beside others. A single model may have any size; loading fails if the
    machine has no room."""
    if limits.max_models is not None and len(others) >= limits.max_models:
        return False
    return (
        not others
        or sum(other.weights_bytes for other in others) + new.weights_bytes <= limits.weights_bytes
    )


def loaded(models: Sequence[ManagedModel]) -> list[ManagedModel]:
    """Models with weights in memory, even while unloading or loading in silence."""
    return [model for model in models if model.runtime is not None or model.is_silent]


def lacking_room(models: Sequence[ManagedModel], new: ManagedModel, limits: LoadLimits) -> str:
    """Reason why a model would not fit without all idle ones; "" if it would."""
    return _lack(
        [model for model in loaded(models) if model is not new and not model.is_idle], new, limits
    )


def lacking_after_pinned(
    models: Sequence[ManagedModel], new: ManagedModel, limits: LoadLimits
) -> str:
    """Reason why a model would not fit beside the pinned ones; "" if it would."""
    # No other model is named: clients read the reason, and their keys may hide models.
    held = [model for model in loaded(models) if model is not new and model.is_kept]
    return _lack(held, new, limits, holders="pinned models")


def _lack(
    held: Sequence[ManagedModel], new: ManagedModel, limits: LoadLimits, holders: str = ""
) -> str:
    if has_room(held, new, limits):
        return ""
    used = sum(model.weights_bytes for model in held)
    holders = holders or ", ".join(
        f"{model.names[0]} ({'pinned' if model.pinned else 'in use'})" for model in held
    )
    if limits.max_models is not None and len(held) >= limits.max_models:
        return (
            f"{new.names[0]} would be one more than {limits.max_models} loaded models "
            f"(--max-loaded-models): {holders}"
        )
    free = max(0, limits.weights_bytes - used)
    return (
        f"{new.names[0]} needs {new.weights_bytes / 1e9:.2f} GB for its weights, and "
        f"{free / 1e9:.2f} of "
        f"{limits.weights_bytes / 1e9:.2f} GB (--model-memory) are left beside {holders}, which "
        "would have to be unloaded"
    )


def next_to_unload(models: Sequence[ManagedModel]) -> ManagedModel | None:
    """The least recently used idle model; None if all are pinned or in use."""
    idle = [model for model in models if model.is_idle]
    return min(idle, key=lambda model: model.used_at) if idle else None


def fits_now(
    models: Sequence[ManagedModel], model: ManagedModel, limits: LoadLimits
) -> bool | None:
    """Whether a model could be loaded without disturbing others; None: unknown size."""
    return None if not model.weights_bytes else not lacking_room(models, model, limits)


def entry_of(
    model: ManagedModel, held: Sequence[ManagedModel], limits: LoadLimits, progress: LoadProgress
) -> ModelEntry:
    adapters = adapters_of(model.settings.adapter)
    return ModelEntry(
        model.names,
        model.state,
        model.runtime,
        model.waiting,
        model.problem,
        pinned=model.pinned,
        ttl_s=model.ttl_s,
        weights_bytes=model.weights_bytes,
        created=model.created,
        progress=progress.of(model.settings.model) if model.state == "loading" else None,
        adapters=tuple(adapters),
        adapter_directories=tuple(adapters.values()),
        unloaded_adapters=model.unloaded_adapters,
        files=model.files,
        fits=partial(fits_now, held, model, limits),
    )


def unforeseen(error: Exception) -> ModelUnusable:
    cause = innermost(error)
    return ModelUnusable(f"{type(cause).__name__}: {cause}")


def load_problem(error: Exception) -> Problem:
    """Reason why a model cannot be loaded. With `retry_after_s` the next request may try again."""
    unusable = error if isinstance(error, ModelUnusable) else unforeseen(error)
    status, retry_after_s = (503, 1) if lacked_resources(innermost(error)) else (500, None)
    return Problem(
        status,
        encodable(str(unusable)),
        "server_error",
        "model",
        code="model_unusable",
        retry_after_s=retry_after_s,
    )


def lacked_resources(error: BaseException | None) -> bool:
    """Whether loading lacked file descriptors or processes, which passes. Too large a model is
    another matter."""
    while error is not None:
        if isinstance(error, OSError) and is_shortage(error):
            return True
        error = error.__cause__ or error.__context__
    return False
