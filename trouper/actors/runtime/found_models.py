"""The models that --models-from finds: they are served like those of --model, and loaded when a
request names them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from trouper.actors.runtime.model_unloading import AWAY, ManagedModel
from trouper.protocol.settings import Settings
from trouper.storage.model_files import ModelFiles

if TYPE_CHECKING:
    from trouper.actors.runtime.model_manager import ModelManager

log = logging.getLogger("trouper.models")
RESCAN_S = 10.0
"""Interval between scans, after which a model that was fetched meanwhile is served."""


@attrs.frozen
class ScannedModel:
    """A model that a scan has found, and the bytes of its weights on this device."""

    files: ModelFiles
    weights_bytes: int


Scan = Callable[[], Awaitable[Sequence[ScannedModel]]]


async def keep_found(manager: ModelManager, scan: Scan, ttl_s: float) -> None:
    """Add the models that scans find, and drop those whose files have vanished once they are not
    loaded. Runs until cancelled; a scan that fails is logged, and what the last one found stays."""
    last = ""
    while True:
        try:
            _update(manager, await scan(), ttl_s)
            last = ""
        except Exception as error:  # whatever a directory raises, the models that run go on
            text = f"{type(error).__name__}: {error}"
            if text != last:
                log.exception("the models of --models-from cannot be looked for: %s", text)
            last = text
        await trio.sleep(RESCAN_S)


def _update(manager: ModelManager, scanned: Sequence[ScannedModel], ttl_s: float) -> None:
    """Make the manager's models those of a scan."""
    found = {each.files.name: each for each in scanned}
    taken = {name for model in manager.models if model.files is None for name in model.names}
    known = {model.names[0]: model for model in manager.models if model.files is not None}
    base = manager.models[0].settings
    for name, each in found.items():
        if name in known:
            _renew(known[name], each)
        elif name not in taken:
            manager.models.append(_managed(each, base, ttl_s))
    for name, model in known.items():
        if name not in found and model.state in AWAY and not model.leases:
            manager.models.remove(model)


def _renew(model: ManagedModel, found: ScannedModel) -> None:
    """Note what a scan says of a model that is known. Where the hub's cache has a new commit, its
    directory is another one, from which the model is loaded the next time."""
    model.files, model.created = found.files, found.files.created_at
    if model.state in AWAY and model.settings.model != (directory := str(found.files.directory)):
        model.settings = attrs.evolve(model.settings, model=directory)
        model.weights_bytes = found.weights_bytes


def _managed(found: ScannedModel, base: Settings, ttl_s: float) -> ManagedModel:
    """The model with the settings of the default model, as far as they are not about that model
    itself."""
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
        settings,
        (found.files.name,),
        weights_bytes=found.weights_bytes,
        created=found.files.created_at,
        ttl_s=ttl_s,
        files=found.files,
    )
