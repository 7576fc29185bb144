"""The state of a managed model, what fits beside others, and which model is unloaded when another
one needs its memory: the least recently used idle one."""

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


class LoadProgress:
    """The latest progress of each model. Engines' threads write, anybody reads: each value replaces
    the one before."""

    def __init__(self) -> None:
        self._latest: dict[str | None, Loading] = {}

    def watching(self, model: str | None, watch: LoadWatch) -> LoadWatch:
        """Return a watch of one model's loading that notes the progress and passes it on."""

        def note(loading: Loading) -> None:
            self._latest[model] = loading
            watch(loading)

        return note

    def of(self, model: str | None) -> Loading | None:
        return self._latest.get(model)


AWAY = ("unloaded", "asleep")
"""States of a model whose weights are not in memory."""


@attrs.define(eq=False)
class ManagedModel:
    """State of one model in the model manager."""

    settings: Settings
    names: tuple[str, ...]
    state: State = "unloaded"
    runtime: Runtime | None = None
    weights_bytes: int = 0
    created: int = 0
    """Unix time of the model's config; 0 while it is unknown."""
    leases: int = 0
    """Number of leases, including those of waiting requests."""
    waiting: int = 0
    """Number of requests that wait for the model."""
    used_at: float = 0.0
    """Time when the model was loaded, or when a lease on it was last released."""
    problem: Problem | None = None
    """Problem of the last attempt to load the model."""
    unusable_until: float = -inf
    """Time until which the model is not loaded again."""
    pinned: bool = False
    """Whether the model is never unloaded."""
    ttl_s: float = 0.0
    """Time without requests after which the model goes to sleep; 0: never."""
    away_as: State = "unloaded"
    """State once the model's graph has ended."""
    files: ModelFiles | None = None
    """What the model's files say; None for a model that --model names."""
    unloaded_adapters: tuple[str, ...] = ()
    """Names of LoRA adapters that were unloaded. They outlast the graph, which goes when the model
    sleeps."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    """Set when the model's graph has ended."""
    is_silent: bool = False
    """Whether nothing has been heard of its loading for so long that others load beside it."""

    @property
    def running(self) -> int:
        """Number of requests that have the model."""
        return self.leases - self.waiting

    @property
    def is_idle(self) -> bool:
        """Whether the model may be unloaded without disturbing anybody."""
        return self.state == "ready" and not self.leases and not self.pinned

    @property
    def is_kept(self) -> bool:
        """Whether the model stays loaded until it is released."""
        return self.state == "ready" and self.pinned


@attrs.frozen
class LoadLimits:
    """What may be loaded at a time."""

    weights_bytes: int
    """Bytes of all weights (--model-memory)."""
    max_models: int | None = None
    """Number of models (--max-loaded-models)."""


def managed(
    settings: Settings, names: tuple[str, ...], ttl_s: float, options: Mapping[str, ModelOptions]
) -> ManagedModel:
    """The state of a model that --model names. `ttl_s`: that of models whose options name none."""
    own = options.get(settings.model or "", DEFAULT_OPTIONS)
    return ManagedModel(
        settings, names, pinned=own.pinned, ttl_s=ttl_s if own.ttl_s is None else own.ttl_s
    )


def has_room(others: Sequence[ManagedModel], new: ManagedModel, limits: LoadLimits) -> bool:
    """Whether a model fits beside others. A single model may be of any size; loading fails if the
    machine has no room."""
    if limits.max_models is not None and len(others) >= limits.max_models:
        return False
    return (
        not others
        or sum(other.weights_bytes for other in others) + new.weights_bytes <= limits.weights_bytes
    )


def loaded(models: Sequence[ManagedModel]) -> list[ManagedModel]:
    """The models whose weights are in memory, those among them that are being unloaded; and those
    that others load beside."""
    return [model for model in models if model.runtime is not None or model.is_silent]


def lacking_room(models: Sequence[ManagedModel], new: ManagedModel, limits: LoadLimits) -> str:
    """Why a model would not fit although all idle ones made room; "" if it would."""
    return _lack(
        [model for model in loaded(models) if model is not new and not model.is_idle], new, limits
    )


def lacking_after_pinned(
    models: Sequence[ManagedModel], new: ManagedModel, limits: LoadLimits
) -> str:
    """Why a model would not fit although all that are not pinned made room; "" if it would. It
    names no other model: clients read it, and models that their keys may not use do not exist for
    them."""
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
    """The idle model that was used least recently; None if all are pinned or in use."""
    idle = [model for model in models if model.is_idle]
    return min(idle, key=lambda model: model.used_at) if idle else None


def fits_now(
    models: Sequence[ManagedModel], model: ManagedModel, limits: LoadLimits
) -> bool | None:
    """Whether a model could be loaded without disturbing others. None: its size is unknown."""
    return None if not model.weights_bytes else not lacking_room(models, model, limits)


def entry_of(
    model: ManagedModel, held: Sequence[ManagedModel], limits: LoadLimits, progress: LoadProgress
) -> ModelEntry:
    """A model as clients may request it, beside those that are loaded."""
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
    """What to say of an exception that nobody foresaw: any code of an architecture, and any bytes
    of a file, may have raised it."""
    cause = innermost(error)
    return ModelUnusable(f"{type(cause).__name__}: {cause}")


def load_problem(error: Exception) -> Problem:
    """Why a model cannot be loaded. With `retry_after_s` the reason passes, and the next request
    may try again."""
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
    """Return whether a model could not be loaded since the process, or the machine, had no file
    descriptor or process left. That is no fault of the model's, and passes. A model that is too
    large for the memory is another matter."""
    while error is not None:
        if isinstance(error, OSError) and is_shortage(error):
            return True
        error = error.__cause__ or error.__context__
    return False
