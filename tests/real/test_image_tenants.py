"""Four keys and one image: each key's first request decodes and encodes it, whatever others sent,
and no `cached_tokens` tells of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.pictures import one
from tests.vision_model.asking import CHAT, PATHS, read_answer, request
from tests.vision_model.questions import IMAGE, text_of
from tests.web.serving import Served, ask
from tests.web.test_key_rights import bearer, key_file
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.engine.host import MlxEngine
from trouper.engine.loading.model_source import SHAPES
from trouper.web.server import serve_http

TENANTS = ("sk-a", "sk-b", "sk-c", "sk-d")
RED = one("circle", "red")


@asynccontextmanager
async def serving(tmp_path: Path, **settings: Any) -> AsyncIterator[Served]:
    keys = key_file(tmp_path, "".join(f"{key} name={key[3:]}\n" for key in TENANTS))
    shutdown = trio.Event()
    usual: dict[str, Any] = {"no_ssd": True, "gather_ms": 0, "block_size": 16}
    chosen = Settings(model=str(SHAPES), self_check="off", **(usual | settings))
    async with trio.open_nursery() as nursery:
        run = partial(run_runtime, chosen, engine=MlxEngine(chosen))
        runtime: Runtime = await nursery.start(run)
        server = ServerSettings(port=0, no_batches=True, api_key_file=keys)
        [url] = await nursery.start(partial(serve_http, runtime, server, shutdown=shutdown))
        yield Served(int(url.rsplit(":", 1)[1]), runtime, None, shutdown)  # type: ignore[arg-type]
        await runtime.drain(5)
        shutdown.set()


async def cached_tokens(served: Served, key: str, path: str, question: str) -> int:
    messages = [{"role": "user", "content": [IMAGE, text_of(question)]}]
    body = request(path, messages, [RED])
    status, answer = await ask(served, body, path, bearer(key))
    assert status == 200, answer
    return read_answer(path, answer).cached_tokens


def work(served: Served) -> tuple[int, int]:
    """Images that were decoded, and encoded."""
    counters = served.runtime.health().scheduler
    return counters.images_decoded, counters.images_encoded


@pytest.mark.parametrize("path", PATHS)
async def test_an_image_costs_each_tenant_its_own_work(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as served:
        for number, key in enumerate(TENANTS, 1):
            assert await cached_tokens(served, key, path, "What color is it?") == 0
            assert work(served) == (number, number)
        for key in TENANTS:
            assert await cached_tokens(served, key, path, "What color is it?") > 0
        assert work(served) == (len(TENANTS), len(TENANTS))


async def test_nor_does_the_encoder_share(tmp_path: Path) -> None:
    """Without a prefix cache: vectors of the encoder are kept, for their own tenant."""
    async with serving(tmp_path, cache_memory="0") as served:
        for number, key in enumerate(TENANTS, 1):
            for question in ("What color is it?", "What shape is it?"):
                assert await cached_tokens(served, key, CHAT, question) == 0
                assert work(served) == (number, number)


async def test_nor_do_requests_at_the_same_time(tmp_path: Path) -> None:
    async with serving(tmp_path, gather_ms=50) as served:
        async with trio.open_nursery() as nursery:
            for key in TENANTS * 2:
                nursery.start_soon(cached_tokens, served, key, CHAT, "What color is it?")
        assert work(served) == (len(TENANTS), len(TENANTS))


async def test_nor_does_a_disk(tmp_path: Path) -> None:
    """What one tenant's blocks on disk hold is computed again for the others."""
    disk: dict[str, Any] = {"no_ssd": False, "ssd_cache_dir": tmp_path / "blocks"}
    async with serving(tmp_path, **disk) as served:
        await cached_tokens(served, TENANTS[0], CHAT, "What color is it?")
    async with serving(tmp_path, **disk) as served:
        for number, key in enumerate(TENANTS[1:], 1):
            assert await cached_tokens(served, key, CHAT, "What color is it?") == 0
            assert work(served) == (number, number)
