"""Options of one of several models: names, pin and time to live of its own, through `run_models`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import trio

from tests.families import save
from trouper import ModelManager, ServerSettings, Settings, run_models
from trouper.protocol.model_options import ModelOptions


async def test_a_model_has_its_own_options(tmp_path: Path) -> None:
    paths = [str(save(family, tmp_path / family)) for family in ("llama", "qwen3")]
    settings = [Settings(model=path, no_ssd=True, self_check="off") for path in paths]
    server = ServerSettings(served_model_name=(f"small={paths[1]}",), model_ttl_s=70.0)
    options = {paths[1]: ModelOptions(pinned=True, ttl_s=9.0)}
    async with trio.open_nursery() as nursery:
        manager: ModelManager = await nursery.start(partial(run_models, settings, server, options=options))
        first, second = manager.entries()
        assert (first.pinned, first.ttl_s) == (False, 70.0)
        assert (second.names[0], second.pinned, second.ttl_s) == ("small", True, 9.0)
        assert await manager.drain(5)
