"""The models that --models-from finds: they are served like those of --model, and loaded when a request names them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from trouper.actors.runtime.model_unloading import AWAY, ManagedModel
from trouper.protocol.settings import Settings
from trouper.storage.model_files import ModelFiles

if TYPE_CHECKING:
    from trouper.actors.runtime.model_manager import ModelManager

RESCAN_S = 10.0
"""Interval between scans, after which a model that was fetched meanwhile is served."""


@attrs.frozen
class ScannedModel:
    """A model that a scan has found, and the bytes of its weights on this device."""

    files: ModelFiles
    weights_bytes: int


Scan = Callable[[], Awaitable[Sequence[ScannedModel]]]


async def keep_found(manager: ModelManager, scan: Scan, ttl_s: float) -> None:
    """Add the models that scans find, and drop those whose files have vanished once they are not loaded. Runs until cancelled."""
    while True:
        found = {each.files.name: each for each in await scan()}
        taken = {name for model in manager.models if model.files is None for name in model.names}
        known = {model.names[0]: model for model in manager.models if model.files is not None}
        base = manager.models[0].settings
        for name, each in found.items():
            if name in known:
                known[name].files = each.files
            elif name not in taken:
                manager.models.append(_managed(each, base, ttl_s))
        for name, model in known.items():
            if name not in found and model.state in AWAY and not model.leases:
                manager.models.remove(model)
        await trio.sleep(RESCAN_S)


def _managed(found: ScannedModel, base: Settings, ttl_s: float) -> ManagedModel:
    """The model with the settings of the default model, as far as they are not about that model itself."""
    settings = attrs.evolve(base, model=str(found.files.directory), adapter_path=None, adapter=(), draft_model=None)
    if settings.speculation == "draft_model":
        settings = attrs.evolve(settings, speculation="auto")
    return ManagedModel(
        settings, (found.files.name,), weights_bytes=found.weights_bytes, ttl_s=ttl_s, files=found.files
    )
