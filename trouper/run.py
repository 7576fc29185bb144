"""The runtime with the real engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

import trio

from trouper.actors.graph import run_graph
from trouper.actors.ranks.leader import Leader
from trouper.actors.runtime.managed_model import LoadProgress, Scan, ScannedModel
from trouper.actors.runtime.model_manager import ModelManager, run_model_manager
from trouper.actors.runtime.runtime import Runtime
from trouper.process import prepare_process
from trouper.protocol.loading import LoadWatch, nobody_watches
from trouper.protocol.logits_processor import Processors
from trouper.protocol.model import Engine, Measured
from trouper.protocol.model_options import DEFAULT_OPTIONS, ModelOptions
from trouper.protocol.names import EMBEDDED
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import HUB_CACHE, ServerSettings, Settings
from trouper.storage.model_scan import ModelScan, require_hub_cache
from trouper.system.model_download import download_model

if TYPE_CHECKING:
    from trouper.engine.host import MlxEngine

FILES_ANSWER_S = 60.0  # For the headers of a model's files.


def mlx_engine() -> type[MlxEngine]:
    """Prepare the process and import the real engine with MLX."""
    prepare_process()
    from trouper.engine.host import MlxEngine

    return MlxEngine


async def run_runtime(
    settings: Settings,
    *,
    engine: Engine | None = None,
    logits_processors: Processors | None = None,
    task_status: trio.TaskStatus[Runtime] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Load the model and run the seven actors; `nursery.start` returns the `Runtime`. Ends after
    `Runtime.drain`.

    `engine` None: MLX, with `logits_processors` for requests that name them. Raises
    `ModelUnusable`.
    """
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError("run it by trio.run: Trouper's actors are tasks of Trio, not of asyncio")
    if engine is None:
        engine = mlx_engine()(settings, processors=logits_processors or {})
    await run_graph(settings, engine, task_status=task_status)


def scan_of(sources: Sequence[str]) -> Scan | None:
    """Models of --models-from, found on a thread; None: no sources. Raises `SettingsInvalid`."""
    from trouper.engine.platform import device

    if not sources:
        return None
    require_hub_cache(sources)
    scan, is_cpu = ModelScan(sources), device.is_cpu()

    def found() -> list[ScannedModel]:
        return [
            ScannedModel(files, files.float32_bytes if is_cpu else files.stored_bytes)
            for files in scan.models()
            if not files.is_foreign
        ]

    async def scan_once() -> list[ScannedModel]:
        return await trio.to_thread.run_sync(found, abandon_on_cancel=True)

    return scan_once


class WeightSizes:
    """Bytes and dates of unloaded models; hanging files block a thread each."""

    def __init__(self) -> None:
        self._threads: defaultdict[str | None, trio.CapacityLimiter] = defaultdict(
            lambda: trio.CapacityLimiter(1)
        )

    async def measure(self, settings: Settings) -> Measured:
        """Read headers after downloads. Raises `ModelUnusable`, also after FILES_ANSWER_S."""
        from trouper.engine.loading.model_loading import measured
        from trouper.engine.loading.model_source import may_download

        named = (settings.model, settings.draft_model or settings.model)
        limit_s = inf if any(map(may_download, named)) else FILES_ANSWER_S
        with trio.move_on_after(limit_s):
            return await trio.to_thread.run_sync(
                measured, settings, abandon_on_cancel=True, limiter=self._threads[settings.model]
            )
        raise ModelUnusable(
            f"{settings.model} does not answer within {limit_s:g} s: its file system hangs, or a "
            "file is none"
        )


async def run_models(
    settings: Sequence[Settings],
    server: ServerSettings,
    *,
    options: Mapping[str, ModelOptions] | None = None,
    watch: LoadWatch = nobody_watches,
    ranks: Leader | None = None,
    logits_processors: Processors | None = None,
    task_status: trio.TaskStatus[ModelManager] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a runtime for each model; `nursery.start` returns the `ModelManager` once the first is
    loaded. Ends after `ModelManager.drain`.

    `options`: by model name. `watch`: gets loading progress on a thread. `ranks`: for rank 0 of
    several processes, without `logits_processors`. Raises `ModelUnusable` for the first model, and
    `SettingsInvalid` for a name in `server` without effect.
    """
    engine_class = mlx_engine()
    from trouper.engine.platform.device import weights_room

    progress = LoadProgress()

    async def start(model_settings: Settings, *, task_status: trio.TaskStatus[Runtime]) -> None:
        await run_graph(
            model_settings,
            engine_class(
                model_settings,
                progress.watching(model_settings.model, watch),
                {} if ranks is not None else logits_processors or {},
            ),
            graphs=server.max_models(len(settings)),
            own_memory=(options or {}).get(model_settings.model or "", DEFAULT_OPTIONS).own_memory,
            ranks=ranks,
            task_status=task_status,
        )

    room = weights_room() if server.model_memory is None else server.model_memory
    await run_model_manager(
        settings,
        server.served_model_name,
        start,
        WeightSizes().measure,
        room,
        default_name=EMBEDDED,
        max_models=server.max_models(len(settings)),
        ttl_s=server.model_ttl_s,
        options=options,
        progress=progress,
        scan=None if ranks is not None else scan_of(server.models_from),
        fetch=download_model if HUB_CACHE in server.models_from else None,
        task_status=task_status,
    )
