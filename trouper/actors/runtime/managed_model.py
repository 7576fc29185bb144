"""A model as the manager holds it, and its entry for the HTTP server."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import attrs
import trio

from trouper.actors.runtime.model_table import AWAY, SHOWN, LoadLimits, ModelRow, fits_now
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import ModelEntry
from trouper.actors.runtime.supervision import innermost
from trouper.protocol.loading import Loading, LoadWatch
from trouper.protocol.model_options import DEFAULT_OPTIONS, ModelOptions
from trouper.protocol.names import adapters_of
from trouper.protocol.paths import encodable
from trouper.protocol.problems import ModelUnusable, Problem, causes_of, is_shortage
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
    # Outlast the graph, which ends when the model sleeps.
    unloaded_adapters: tuple[str, ...] = ()
    ended: trio.Event = attrs.field(factory=trio.Event)

    @property
    def source(self) -> str:
        return self.settings.model or self.names[0]


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
        SHOWN[model.state],
        model.runtime,
        len(model.waits),
        model.problem,
        pinned=model.pinned,
        ttl_s=model.ttl_s,
        weights_bytes=model.weights_bytes,
        created=model.created,
        progress=progress.of(model.settings.model) if SHOWN[model.state] == "loading" else None,
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
    """Whether loading lacked file descriptors, processes or threads, which passes. Too large a
    model is another matter."""
    return any(
        is_shortage(cause) for cause in causes_of(error) if not isinstance(cause, MemoryError)
    )


log = logging.getLogger("trouper.models")
RESCAN_S = 10.0


@attrs.frozen
class ScannedModel:
    files: ModelFiles
    weights_bytes: int


Scan = Callable[[], Awaitable[Sequence[ScannedModel]]]


async def keep_found(models: list[ManagedModel], scan: Scan, ttl_s: float) -> None:
    """Add models that scans find, and drop unloaded ones whose files have vanished. Runs until
    cancelled; a failed scan is logged and changes nothing."""
    last = ""
    while True:
        try:
            await find_once(models, scan, ttl_s)
            last = ""
        except Exception as error:  # whatever a directory raises, the models that run go on
            text = f"{type(error).__name__}: {error}"
            if text != last:
                log.exception("the models of --models-from cannot be looked for: %s", text)
            last = text
        await trio.sleep(RESCAN_S)


async def find_once(models: list[ManagedModel], scan: Scan, ttl_s: float) -> None:
    found = {each.files.name: each for each in await scan()}
    taken = {name for model in models if model.files is None for name in model.names}
    known = {model.names[0]: model for model in models if model.files is not None}
    base = models[0].settings
    for name, each in found.items():
        if name in known:
            _renew(known[name], each)
        elif name not in taken:
            models.append(_managed(each, base, ttl_s))
    for name, model in known.items():
        if name not in found and model.state in AWAY and not model.leases:
            models.remove(model)


def _renew(model: ManagedModel, found: ScannedModel) -> None:
    # A new commit in the hub's cache is another directory, from which the model is loaded next
    # time.
    model.files, model.created = found.files, found.files.created_at
    if model.state in AWAY and model.settings.model != (directory := str(found.files.directory)):
        model.settings = attrs.evolve(model.settings, model=directory)
        model.weights_bytes = found.weights_bytes


def _managed(found: ScannedModel, base: Settings, ttl_s: float) -> ManagedModel:
    speculation = "auto" if base.speculation in ("draft_model", "mtp") else base.speculation
    settings = attrs.evolve(
        base,
        model=str(found.files.directory),
        adapter_path=None,
        adapter=(),
        draft_model=None,
        speculation=speculation,
    )
    return ManagedModel(
        (found.files.name,),
        settings=settings,
        weights_bytes=found.weights_bytes,
        created=found.files.created_at,
        ttl_s=ttl_s,
        files=found.files,
    )
