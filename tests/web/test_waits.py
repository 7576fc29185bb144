"""GET /v1/requests and /v1/requests/ID: what a request waits for, while it waits and afterwards."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fakes import EOS, ByteTokenizer, FakeEngine
from tests.web.serving import (
    STREAM,
    Served,
    eventually,
    exchange,
    get,
    post,
    serving,
)
from tests.web.test_key_rights import bearer, key_file
from tests.web.test_several_models import loading_world, serving_several
from trouper.protocol import waits
from trouper.protocol.grammar import FollowedGrammar, Grammar

Json = dict[str, Any]
CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def step(_: object) -> None:
    await trio.sleep(0.002)


async def look(served: Served, name: str = "mine", headers: str = "") -> Json:
    status, _, data = await exchange(served, get(f"/v1/requests/{name}", headers))
    assert status == 200, data
    seen: Json = json.loads(data)
    assert seen["id"] == name.removeprefix("cmpl-")
    return seen


async def choice(served: Served, name: str = "mine") -> Json:
    [only] = (await look(served, name))["choices"]
    return only  # type: ignore[no-any-return]


async def until(condition: Callable[[Json], bool], served: Served) -> Json:
    """The first choice as soon as it is so."""
    with trio.fail_after(30):
        while True:
            status, _, data = await exchange(served, get("/v1/requests/mine"))
            if status == 200 and condition(seen := json.loads(data)["choices"][0]):
                return seen  # type: ignore[no-any-return]
            await trio.sleep(0.01)


async def until_waits(served: Served, reason: str) -> Json:
    return await until(lambda seen: seen["reason"] == reason, served)


@asynccontextmanager
async def stream(
    served: Served, name: str, path: str = "/v1/completions", headers: str = "", **more: Any
) -> AsyncIterator[trio.SocketStream]:
    """A stream whose client reads nothing and leaves at the end of the body."""
    async with await served.connect() as client:
        body = (STREAM if path == "/v1/completions" else {}) | more
        await client.send_all(post(path, body, f"X-Request-Id: {name}\r\n{headers}"))
        yield client


async def test_a_row_while_the_wait_lasts_in_the_list_afterwards_and_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "LONG_WAIT_S", 0.2)
    caplog.set_level(logging.INFO, "trouper.waits")
    engine = FakeEngine(before_step=step)
    async with serving(engine, {"completion_batch_size": 1}) as served:
        async with stream(served, "first"):
            await eventually(lambda: served.busy == 1)
            async with stream(served, "mine", max_tokens=3) as client:
                seen = await until_waits(served, "rows")
                assert seen["state"] == "queued"
                assert seen["message"].startswith("queued: waits for a row")
                _, _, data = await exchange(served, get("/v1/requests"))
                assert [one["id"] for one in json.loads(data)["data"]] == ["first", "mine"]
                first = await choice(served, "first")
                assert (first["state"], first["reason"]) == ("decoding", None)
                await trio.sleep(0.3)
                await exchange(served, post("/v1/requests/first/cancel", b""))
                while b"[DONE]" not in await client.receive_some():
                    pass
        ended = await choice(served, "cmpl-mine")
    assert (ended["state"], ended["reason"], ended["completion_tokens"]) == ("ended", "length", 3)
    [wait] = [one for one in ended["history"] if one["reason"] == "rows"]
    assert wait["seconds"] > 0.2 and abs(wait["at"] - time.time()) < 60
    [line] = [one.getMessage() for one in caplog.records if "request mine" in one.getMessage()]
    assert " s for a row: all that may be in use are" in line


class Wide(ByteTokenizer):
    """Each token is much text."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) * 4096 if token < EOS else b""


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_client_that_does_not_read(choices: int) -> None:
    """One choice is written by StepDelivery, several by the stream's own task."""
    engine = FakeEngine(before_step=step, tokenizer=Wide())
    async with serving(engine) as served:
        with trio.socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await client.connect(("127.0.0.1", served.port))
            body = STREAM | {"n": choices}
            await client.send(post("/v1/completions", body, "X-Request-Id: mine\r\n"))
            seen = await until(lambda seen: seen["unread_tokens"] > 5, served)
        assert (seen["state"], seen["reason"]) == ("decoding", "client")
        assert seen["message"] == "decoding: waits for its client, which does not read"


async def test_text_that_may_be_a_stop_string() -> None:
    engine = FakeEngine(before_step=step, token_at=lambda key, position: 97)
    async with serving(engine) as served, stream(served, "mine", stop=["a" * 500 + "b"]):
        seen = await until_waits(served, "stop_string")
        assert seen["state"] == "decoding" and seen["completion_tokens"] > 0


async def test_text_that_may_be_a_call() -> None:
    text = b"<call>" + b" " * 4000
    engine = FakeEngine(before_step=step, token_at=lambda key, position: text[position])
    more: Json = {"tools": [CALL], "stream": True, "max_tokens": 3000}
    more["messages"] = [{"role": "user", "content": "x"}]
    async with (
        serving(engine) as served,
        stream(served, "mine", "/v1/chat/completions", **more),
    ):
        seen = await until_waits(served, "parser")
        assert seen["state"] == "decoding"


class SlowGrammars(ByteTokenizer):
    def compile_grammar(self, grammar: Grammar, timeout_s: float = 1.0) -> FollowedGrammar:
        time.sleep(0.5)  # On a worker thread, as a large grammar takes.
        return super().compile_grammar(grammar, timeout_s)


async def test_a_grammar() -> None:
    engine = FakeEngine(before_step=step, tokenizer=SlowGrammars())
    async with serving(engine) as served, stream(served, "mine", guided_regex="a+"):
        seen = await until_waits(served, "grammar")
        assert seen["message"] == "preparing: waits for its grammar to be compiled"


async def test_how_much_of_the_prompt_is_prefilled() -> None:
    async def slow(_: object) -> None:
        await trio.sleep(0.05)

    async with serving(FakeEngine(before_step=slow), {"prefill_step_size": 64}) as served:
        async with stream(served, "mine", prompt="x" * 1000):
            seen = await until(lambda seen: "prefills: " in seen["message"], served)
        assert seen["state"] == "prefilling" and seen["message"].endswith(" of 1000 tokens")


async def test_a_model_that_is_being_loaded() -> None:
    world = loading_world()
    world.hanging["middle"] = trio.Event()
    async with (
        serving_several("small", "large", "middle", world=world) as served,
        trio.open_nursery() as nursery,
    ):
        body = {"model": "middle", "prompt": "x", "max_tokens": 1}
        request = post("/v1/completions", body, "X-Request-Id: mine\r\n")
        nursery.start_soon(exchange, served, request)
        seen = await until_waits(served, "model")
        assert seen["message"] == "preparing: waits for its model to be loaded"
        world.hanging["middle"].set()


async def test_an_id_that_was_used_again_is_the_newest_request() -> None:
    async with serving(FakeEngine()) as served:
        for max_tokens in (2, 3):
            body = {"prompt": "x", "max_tokens": max_tokens, "n": 2}
            await exchange(served, post("/v1/completions", body, "X-Request-Id: mine\r\n"))
        choices = (await look(served))["choices"]
    assert [one["completion_tokens"] for one in choices] == [3, 3]


async def test_an_id_that_nobody_has() -> None:
    async with serving(FakeEngine()) as served:
        status, _, data = await exchange(served, get("/v1/requests/none"))
    assert status == 404 and json.loads(data)["error"]["code"] == "request_not_found"


async def test_a_key_sees_its_own_requests_and_an_admin_all(tmp_path: Path) -> None:
    async with serving(api_key_file=key_file(tmp_path)) as served:

        async def visible(key: str) -> tuple[int, list[str]]:
            status, _, _ = await exchange(served, get("/v1/requests/mine", bearer(key)))
            _, _, data = await exchange(served, get("/v1/requests", bearer(key)))
            return status, [one["id"] for one in json.loads(data)["data"]]

        async with stream(served, "mine", headers=bearer("sk-plain")):
            await eventually(lambda: served.busy == 1)
            assert await visible("sk-plain") == (200, ["mine"])
            assert await visible("sk-admin") == (200, ["mine"])
            assert await visible("sk-red") == (404, [])
        await eventually(lambda: served.busy == 0)
        assert await visible("sk-plain") == (200, [])
        assert await visible("sk-admin") == (200, [])
        assert await visible("sk-red") == (404, []), "nor what has ended"
