"""Rows in two banks and one that was preempted, on a real model: what the live page's data, /health
and /metrics say of them."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio

from tests.families import save
from tests.reuse.serving import not_warmed_up
from tests.web.scraping import scrape
from tests.web.serving import PATIENCE_S, Served, eventually, exchange, get, post
from tests.web.test_live import WATCH, told
from tests.web.test_openapi import data_of, described, validator
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.engine import host
from trouper.engine.host import MlxEngine
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.kv import KvLayout
from trouper.protocol.plans import Plan
from trouper.protocol.setting_fields import ByteSize
from trouper.web.server import serve_http

STEP_S = 0.03
LONG, SHORT = 600, 20
"""Prompts of rows in the second bank and in the first."""
Json = dict[str, Any]


class SlowEngine(StepEngine):
    """As a device whose steps take a while, until there is a hurry."""

    hurry: threading.Event

    def launch(self, plan: Plan) -> Launched:
        if plan.has_work:
            self.hurry.wait(STEP_S)
        return super().launch(plan)


@asynccontextmanager
async def serving(path: Path, kv_memory: int) -> AsyncIterator[Served]:
    shutdown, SlowEngine.hurry = trio.Event(), threading.Event()
    settings = Settings(
        model=str(path),
        no_ssd=True,
        gather_ms=0,
        kv_memory=ByteSize(kv_memory),
        cache_memory=ByteSize(0),
    )
    with patch.object(host, "StepEngine", SlowEngine), not_warmed_up():
        async with trio.open_nursery() as nursery:
            runtime: Runtime = await nursery.start(
                partial(run_runtime, settings, engine=MlxEngine(settings))
            )
            [url] = await nursery.start(
                partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
            )
            yield Served(int(url.rsplit(":", 1)[1]), runtime, None, shutdown)  # type: ignore[arg-type]
            SlowEngine.hurry.set()
            await runtime.drain(5)
            shutdown.set()


@asynccontextmanager
async def stream(
    served: Served, name: str, tokens: int, priority: int = 0
) -> AsyncIterator[trio.SocketStream]:
    """A row that decodes until this is left; from its first token on."""
    body = {
        "prompt": [7] * tokens,
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
        "priority": priority,
    }
    async with await served.connect() as client:
        await client.send_all(post("/v1/completions", body, f"X-Request-Id: {name}\r\n"))
        heard = b""
        with trio.fail_after(PATIENCE_S):
            while b"data: " not in heard:
                heard += await client.receive_some()
        yield client


async def until_shown(served: Served, name: str, state: str) -> Json:
    """The first snapshot in which a row has this state."""
    async with await served.connect() as viewer:
        await viewer.send_all(WATCH)
        received = b""
        with trio.fail_after(PATIENCE_S):
            while True:
                received += await viewer.receive_some()
                for kind, body in told(received):
                    if (
                        kind == "snapshot"
                        and state_of(body, name) == state
                        and len(body["models"][0]["banks"]) == 2
                    ):
                        return dict(body)


def rows_of(body: Json) -> dict[str, Json]:
    return {row["request_id"]: row for row in body["models"][0]["batch"]["rows"]}


def state_of(body: Json, name: str) -> str:
    return str(rows_of(body).get(name, {}).get("state"))


def limit_of(kv: KvLayout) -> int:
    """Enough for a long row and a short one, not for two short ones beside it, which would share a
    bank."""
    both = kv.batch_bytes([(LONG, LONG), (SHORT, SHORT)])
    three = kv.batch_bytes([(LONG, LONG), (SHORT, SHORT), (SHORT, SHORT)])
    limit = kv.row_bytes(1024) + kv.row_bytes(256) + kv.row_bytes(16)
    assert both < limit < three
    return limit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save("llama", tmp_path / "llama")


async def test_rows_in_two_banks_and_one_that_was_preempted(path: Path) -> None:
    kv = KvLayout(token_bytes=1024)
    async with serving(path, limit_of(kv)) as served:
        assert served.runtime.model.kv.token_bytes == kv.token_bytes
        schema = data_of(
            (document := await described(served))["paths"]["/v1/live"]["get"]["responses"]["200"][
                "content"
            ]["text/event-stream"]["schema"]
        )
        async with stream(served, "long", LONG), stream(served, "low", SHORT, priority=5) as low:
            async with stream(served, "first", SHORT, priority=-3):
                body = await until_shown(served, "low", "preempted")
                health = json.loads((await exchange(served, get("/health")))[2])
                seen = await scrape(served)
            await eventually(lambda: served.runtime.health().scheduler.preempted_sequences == 0)
            assert b"data: " in await low.receive_some(), "it goes on"
    validator(document, schema).validate(body)
    [model], rows = body["models"], rows_of(body)
    assert {name: (row["state"], row["priority"]) for name, row in rows.items()} == {
        "long": ("decoding", 0),
        "first": ("decoding", -3),
        "low": ("preempted", 5),
    }
    assert rows["low"]["tokens_to_restore"] == SHORT + rows["low"]["generated_tokens"] > SHORT
    assert [(bank["max_tokens"], bank["rows"]) for bank in model["banks"]] == [(512, 1), (1024, 1)]
    assert model["banks"][1]["capacity_tokens"] > LONG > model["banks"][0]["capacity_tokens"]
    assert all(
        bank["bytes"] >= bank["slots"] * bank["capacity_tokens"] * 1000 for bank in model["banks"]
    )
    stats = model["scheduler"]
    assert (stats["preemptions"], stats["preempted_sequences"]) == (1, 1)
    assert 0 < stats["kv_row_bytes"] <= stats["kv_limit_bytes"] == limit_of(kv)
    assert "inter_token_latency" not in stats, "histograms are for /metrics"
    memory = health["memory"]
    assert (memory["preemptions"], memory["preempted_sequences"]) == (1, 1)
    assert [bank["max_tokens"] for bank in memory["banks"]] == [512, 1024]
    assert seen.value("vllm:num_preemptions_total") == seen.value("trouper_requests_preempted") == 1
    used = seen.value("trouper_kv_row_bytes") / seen.value("trouper_kv_limit_bytes")
    assert 0.5 < seen.value("vllm:kv_cache_usage_perc") == used <= 1
    assert seen.value("trouper_kv_limit_bytes") == limit_of(kv)
    for bank in memory["banks"]:
        for field in ("rows", "slots", "capacity_tokens", "bytes"):
            assert seen.value(f"trouper_bank_{field}", bank=str(bank["max_tokens"])) == bank[field]


async def test_a_model_without_banks_shows_one(tmp_path: Path) -> None:
    async with serving(save("gemma2", tmp_path / "gemma2"), 2**30) as served:
        async with stream(served, "long", LONG), stream(served, "short", SHORT):
            await eventually(
                lambda: [bank.rows for bank in served.runtime.health().scheduler.banks] == [2]
            )
            [bank] = served.runtime.health().scheduler.banks
            assert bank.max_tokens is None and bank.slots >= 2 and bank.capacity_tokens > LONG
            assert (await scrape(served)).value("trouper_bank_rows", bank="all") == 2
        SlowEngine.hurry.set()
        await eventually(lambda: served.busy == 0)
        await eventually(lambda: not served.runtime.health().scheduler.banks)
