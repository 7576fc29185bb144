"""Several models over real sockets: what is told of requests that wait for a model, and of a model
that cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.actors.test_model_manager import World, manager_of
from tests.fakes import FakeEngine
from tests.web.scraping import scrape
from tests.web.serving import Served, ask, eventually, exchange, get, post, serving_manager
from tests.web.test_logs import Log, log
from trouper import ServerSettings

__all__ = ["log"]
LOADING_S = 0.2


async def waiting_for_middle(served: Served) -> float:
    """Return how many requests wait for that model."""
    text = await scrape(served)
    return text.value("trouper_model_requests_waiting", model_name="middle")


@asynccontextmanager
async def serving_several(
    *models: str, world: World | None = None, server: ServerSettings | None = None
) -> AsyncIterator[Served]:
    async with (
        manager_of(*models, world=world) as (manager, _),
        serving_manager(manager, server) as port,
    ):
        runtime = manager.entries()[0].runtime
        assert runtime is not None
        yield Served(port, runtime, FakeEngine(), trio.Event())


def wish(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}


def loading_world() -> World:
    world = World()
    world.may_load.set()
    return world


async def test_a_model_has_its_date_whether_it_is_loaded_or_not() -> None:
    async with (
        manager_of("large", "middle", room=70) as (manager, _),
        serving_manager(manager) as port,
    ):
        runtime = manager.entries()[0].runtime
        assert runtime is not None
        _, _, body = await exchange(
            Served(port, runtime, FakeEngine(), trio.Event()), get("/v1/models")
        )
    listed = json.loads(body)["data"]
    assert {model["loaded"] for model in listed} == {True, False}
    assert {(model["created"], model["created_at"]) for model in listed} == {
        (1_700_000_000, "2023-11-14T22:13:20Z")
    }


async def test_waiting_for_a_model_is_a_part_of_a_requests_time(log: Log) -> None:
    world = loading_world()
    async with (
        serving_several("large", "middle", world=world) as served,
        trio.open_nursery() as nursery,
    ):
        world.may_load = trio.Event()
        nursery.start_soon(ask, served, wish("middle"))
        with trio.fail_after(60):
            while await waiting_for_middle(served) != 1:  # noqa: ASYNC110
                await trio.sleep(LOADING_S)
        await trio.sleep(LOADING_S)  # At least this is measured.
        world.may_load.set()
        await eventually(lambda: bool(log["request"]))
        seen = await scrape(served)
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
    ):
        assert seen.value(f"{name}_count", model_name="middle") == 1
        assert seen.value(f"{name}_sum", model_name="middle") >= LOADING_S, name
    assert seen.value("trouper_model_requests_waiting", model_name="middle") == 0
    [line] = log["request"]
    assert line["queue_s"] >= LOADING_S


async def test_a_client_that_leaves_while_its_model_is_loaded_is_told_of(log: Log) -> None:
    world = loading_world()
    async with serving_several("large", "middle", world=world) as served:
        world.may_load = trio.Event()
        async with await served.connect() as stream:
            await stream.send_all(post("/v1/completions", wish("middle")))
            with trio.fail_after(60):
                while await waiting_for_middle(served) != 1:  # noqa: ASYNC110
                    await trio.sleep(0.01)
        await eventually(lambda: bool(log["request"]))
        seen = await scrape(served)
        world.may_load.set()
    assert (
        seen.value("vllm:request_success_total", model_name="middle", finished_reason="abort") == 1
    )
    assert [line["reason"] for line in log["request"]] == ["abort"]


async def test_what_cannot_be_loaded_is_told_wherever_somebody_looks(log: Log) -> None:
    async with serving_several("small", "broken") as served:
        for _ in range(2):
            status, body = await ask(served, wish("broken"))
            assert (status, body["error"]["code"]) == (500, "model_unusable")
        seen = await scrape(served)
        _, _, live = await exchange(served, get("/v1/live"))
        _, _, health = await exchange(served, get("/health"))
    assert (
        seen.value("trouper_request_problems_total", model_name="broken", code="model_unusable")
        == 2
    )
    assert (
        seen.value("trouper_request_problems_total", model_name="small", code="model_unusable") == 0
    )
    for line in log["request"]:
        assert (line["model"], line["reason"], line["code"]) == (
            "broken",
            "refused",
            "model_unusable",
        )
    assert len(log["request"]) == 2
    assert b'"problem":"no weights"' in live
    assert b'"detail":"no weights"' in health


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_model_that_is_not_known_is_the_clients_affair(log: Log, path: str) -> None:
    async with serving_several("small", "large") as served:
        status, _ = await ask(
            served, wish("nobody") | {"messages": [{"role": "user", "content": "?"}]}, path
        )
        assert status in (400, 404)
        seen = await scrape(served)
    assert not log["request"]
    assert not seen.values("trouper_request_problems_total", model_name="nobody")
