"""Options of one of several models: names, pin and time to live of its own, through
`run_models`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import trio

from tests.families import save
from trouper import ModelManager, ServerSettings, Settings, run_models
from trouper.protocol.model_options import ModelOptions
from trouper.protocol.setting_fields import ByteSize


async def test_a_model_has_its_own_options(tmp_path: Path) -> None:
    paths = [str(save(family, tmp_path / family)) for family in ("llama", "qwen3")]
    kv, cache = ByteSize(10**8), ByteSize(10**7)
    settings = [
        Settings(model=path, no_ssd=True, self_check="off", kv_memory=kv, cache_memory=cache)
        for path in paths
    ]
    server = ServerSettings(served_model_name=(f"small={paths[1]}",), model_ttl_s=70.0)
    options = {paths[1]: ModelOptions(pinned=True, ttl_s=9.0, own_memory=frozenset({"kv_memory"}))}
    async with trio.open_nursery() as nursery:
        manager: ModelManager = await nursery.start(
            partial(run_models, settings, server, options=options)
        )
        first, second = manager.entries()
        assert (first.pinned, first.ttl_s) == (False, 70.0)
        assert (second.names[0], second.pinned, second.ttl_s) == ("small", True, 9.0)
        shares = [one.runtime.settings for one in (first, second) if one.runtime is not None]
        if len(shares) == 1:  # The second is loaded when the first serves.
            shares.append((lease := await manager.lease("small")).runtime.settings)
            lease.release()
        assert [(one.kv_memory, one.cache_memory) for one in shares] == [
            (5 * 10**7, 5 * 10**6),
            (10**8, 5 * 10**6),
        ]
        assert await manager.drain(5)
