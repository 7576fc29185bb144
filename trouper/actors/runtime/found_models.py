"""The models of --models-from, served like those of --model and loaded on request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import attrs
import trio

from trouper.actors.runtime.managed_model import ManagedModel
from trouper.actors.runtime.model_table import AWAY
from trouper.protocol.settings import Settings
from trouper.storage.model_files import ModelFiles

log = logging.getLogger("trouper.models")
RESCAN_S = 10.0


@attrs.frozen
class ScannedModel:
    files: ModelFiles
    weights_bytes: int


Scan = Callable[[], Awaitable[Sequence[ScannedModel]]]


async def keep_found(models: list[ManagedModel], scan: Scan, ttl_s: float) -> None:
    """Add to `models` those that scans find, and drop unloaded ones whose files have vanished.
    Runs until cancelled; a failed scan is logged and changes nothing."""
    last = ""
    while True:
        try:
            _update(models, await scan(), ttl_s)
            last = ""
        except Exception as error:  # whatever a directory raises, the models that run go on
            text = f"{type(error).__name__}: {error}"
            if text != last:
                log.exception("the models of --models-from cannot be looked for: %s", text)
            last = text
        await trio.sleep(RESCAN_S)


def _update(models: list[ManagedModel], scanned: Sequence[ScannedModel], ttl_s: float) -> None:
    found = {each.files.name: each for each in scanned}
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
