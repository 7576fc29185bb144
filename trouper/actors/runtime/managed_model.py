"""A model as the manager holds it, its entry for the HTTP server, and why it cannot be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import attrs
import trio

from trouper.actors.runtime.model_table import LoadLimits, ModelRow, fits_now
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import ModelEntry
from trouper.actors.runtime.supervision import innermost
from trouper.protocol.loading import Loading, LoadWatch
from trouper.protocol.model_options import DEFAULT_OPTIONS, ModelOptions
from trouper.protocol.names import adapters_of
from trouper.protocol.paths import encodable
from trouper.protocol.problems import ModelUnusable, Problem, is_shortage
from trouper.protocol.settings import Settings
from trouper.storage.model_files import ModelFiles


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
class ManagedModel(ModelRow):
    """A row of the table with what the manager runs for it."""

    settings: Settings = attrs.field(kw_only=True)
    runtime: Runtime | None = None
    created: int = 0
    """Unix time of the model's config; 0: unknown."""
    files: ModelFiles | None = None
    """Facts from the model's files; None for a model of --model."""
    # Outlast the graph, which ends when the model sleeps.
    unloaded_adapters: tuple[str, ...] = ()
    ended: trio.Event = attrs.field(factory=trio.Event)


def managed(
    settings: Settings, names: tuple[str, ...], ttl_s: float, options: Mapping[str, ModelOptions]
) -> ManagedModel:
    """State of a model of --model. `ttl_s`: default for models whose options name none."""
    own = options.get(settings.model or "", DEFAULT_OPTIONS)
    return ManagedModel(
        names, settings=settings, pinned=own.pinned, ttl_s=ttl_s if own.ttl_s is None else own.ttl_s
    )


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
