"""Images named by address, through every dialect: in the prompt as if they had been uploaded, kept
with what is stored, and refused by the part."""

from __future__ import annotations

import json
import sqlite3
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import attrs
import openai
import pytest
import trio

from tests.fake_images import png_file, shown
from tests.media_servers import PUBLIC, Elsewhere, answer, elsewhere, sends
from tests.web.batching import ended, output, request, started, strict
from tests.web.serving import Served, ask, eventually, exchange, get, post, serving
from tests.web.test_batch_attempts import decodes
from tests.web.test_batches import using
from tests.web.test_image_requests import (
    CHAT,
    COUNTS,
    MESSAGES,
    RESPONSES,
    part_of,
    prompts,
    seeing,
    tokens,
)
from trouper.web.serving.state_database import NAME

SMALL, WIDE = png_file(20, 10), png_file(50, 20, seed=1)
IN_SMALL, IN_WIDE = shown(20, 10), shown(50, 20)
NAMES = {"images.test": [[PUBLIC]], "gone.test": [["10.0.0.1"]]}
FILES = {"/small": sends(answer(SMALL)), "/wide": sends(answer(WIDE)), "/text": sends(answer(b"a"))}
Json = dict[str, Any]


@attrs.frozen
class World:
    served: Served
    other: Elsewhere

    def url(self, path: str, host: str = "images.test") -> str:
        return f"http://{host}:{self.other.port}{path}"

    def part(self, api: str, path: str, host: str = "images.test") -> Json:
        url = self.url(path, host)
        if api == MESSAGES:
            return part_of(MESSAGES, source={"type": "url", "url": url})
        return part_of(api, **{"image_url" if api == RESPONSES else "url": url})

    def asking(self, api: str, *paths: str) -> Json:
        content = [self.part(api, path) for path in paths]
        if api == RESPONSES:
            return {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


@asynccontextmanager
async def worlds(monkeypatch: pytest.MonkeyPatch, **server: Any) -> AsyncIterator[World]:
    async with elsewhere(monkeypatch, dict(FILES), NAMES) as other:
        allowed = (f"http://images.test:{other.port}", f"http://gone.test:{other.port}")
        async with serving(seeing(), allowed_media_domains=allowed, **server) as served:
            yield World(served, other)


@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES])
async def test_remote_images_are_in_the_prompt(monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    async with worlds(monkeypatch) as world:
        body = world.asking(api, "/small", "/wide", "/small")
        status, got = await ask(world.served, body, api)
        assert status == 200, got
        expected = tokens("<user>", IN_SMALL, IN_WIDE, IN_SMALL)
        assert prompts(world.served) == [expected]
        assert len(world.other.heads) == 2
        counting, name = COUNTS[api]
        counted = {key: body[key] for key in ("messages", "input") if key in body}
        _, got = await ask(world.served, counted, counting)
        assert got[name] == len(expected)


@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES])
async def test_faults_are_named_by_the_part(monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    async with worlds(monkeypatch) as world:
        for path, host, code in [
            ("/none", "images.test", "media_unreachable"),
            ("/text", "images.test", "image_format"),
            ("/small", "gone.test", "media_not_allowed"),
            ("/small", "other.test", "media_not_allowed"),
        ]:
            body = world.asking(api, "/small")
            [message] = body.get("messages") or body["input"]
            message["content"].append(world.part(api, path, host))
            before = len(world.other.heads)
            status, got = await ask(world.served, body, api)
            assert status == 400, got
            # Addresses are checked before any is fetched.
            assert host != "other.test" or len(world.other.heads) == before
            assert "content.1" in got["error"]["message"]
            assert host not in got["error"]["message"]
            assert api == MESSAGES or got["error"]["code"] == code
        assert prompts(world.served) == []


async def test_fetched_images_count_as_memory_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worlds(monkeypatch, request_memory=2 * 2**20, max_body_bytes=10**5) as world:
        world.other.answers["/big"] = sends(answer(bytes(3 * 2**20)))
        status, got = await ask(world.served, world.asking(CHAT, "/big"), CHAT)
    assert status == 413, got


async def test_a_text_model_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(monkeypatch, dict(FILES), NAMES) as other:
        allowed = (f"http://images.test:{other.port}",)
        async with serving(allowed_media_domains=allowed) as served:
            world = World(served, other)
            sent = post(CHAT, world.asking(CHAT, "/small"))
            status, headers, _ = await exchange(served, sent)
    assert (status, headers["x-trouper-ignored"], other.dialled) == (200, "image_url", [])


async def test_a_stored_response_keeps_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its client reads, and what a continued conversation shows the model, is never fetched
    again, though the other server is gone."""
    async with worlds(monkeypatch) as world:
        body = world.asking(RESPONSES, "/small", "/small")
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        wide = {"type": "input_image", "image_url": {"url": world.url("/wide")}}
        body["input"] += [call, {"type": "function_call_output", "call_id": "c", "output": [wide]}]
        _, made = await ask(world.served, body, RESPONSES)
        assert len(world.other.heads) == 2
        world.other.answers.clear()
        more = {"previous_response_id": made["id"], "input": "b", "max_output_tokens": 2}
        status, got = await ask(world.served, more, RESPONSES)
        assert status == 200, got
        first, second = prompts(world.served)
        assert second[: len(first)] == first
        _, _, data = await exchange(world.served, get(f"/v1/responses/{made['id']}/input_items"))
        kept = json.loads(data)["data"]
        item = {"type": "item_reference", "id": kept[-1]["id"]}
        status, got = await ask(world.served, {"input": [item], "max_output_tokens": 2}, RESPONSES)
        assert status == 200, got
    assert len(world.other.heads) == 2
    results, _, user = kept
    assert [decoded(part) for part in user["content"]] == [SMALL, SMALL]
    assert [decoded(part) for part in results["output"]] == [WIDE]


def decoded(part: Json) -> bytes | None:
    head, data = part["image_url"].split(",")
    assert head == "data:application/octet-stream;base64"
    return next((file for file in (SMALL, WIDE) if b64encode(file).decode() == data), None)


async def test_a_batch_fetches_an_image_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Several lines may name it."""

    def use(client: openai.OpenAI) -> None:
        bodies = [world.asking(CHAT, "/small"), world.asking(CHAT, "/small", "/wide")]
        lines = [request(f"line {number}", body) for number, body in enumerate(bodies)]
        lines.append(request("bad", world.asking(CHAT, "/none")))
        batch = ended(client, started(client, lines, CHAT))
        assert output(client, batch.output_file_id).keys() == {"line 0", "line 1"}
        [line] = output(client, batch.error_file_id).values()
        assert line["response"]["body"]["error"]["code"] == "media_unreachable"

    async with worlds(monkeypatch, batch_dir=tmp_path) as world:
        await using(world.served, use)
        assert {*prompts(world.served)} == {
            tokens("<user>", IN_SMALL),
            tokens("<user>", IN_SMALL, IN_WIDE),
        }
        paths = [head.split()[1] for head in world.other.heads]
    assert sorted(paths) == [b"/none", b"/small", b"/wide"]


async def test_a_line_that_runs_again_has_the_same_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though the server ended while it ran, and the other server has another file by now."""
    async with elsewhere(monkeypatch, dict(FILES), NAMES) as other:
        flags: Json = {"allowed_media_domains": f"http://images.test:{other.port}"}
        async with serving(seeing(), batch_dir=tmp_path, **flags) as served:
            body = World(served, other).asking(CHAT, "/small")
            body |= {"max_tokens": 4000, "ignore_eos": True}
            batch = await call(served, started, [request("long", body)], CHAT)
            await eventually(lambda: decodes(served))
        other.answers["/small"] = FILES["/wide"]
        async with serving(seeing(), batch_dir=tmp_path, **flags) as served:
            await eventually(lambda: decodes(served))
            assert prompts(served) == [tokens("<user>", IN_SMALL)]
            held = (await health(served))["batches"]["bytes"]
            await call(served, cancelled, batch.id)
            assert (await call(served, ended, batch)).status == "cancelled"
            assert (await health(served))["batches"]["bytes"] <= held - len(SMALL)
    assert len(other.heads) == 1
    with closing(sqlite3.connect(tmp_path / NAME)) as database:
        assert database.execute("SELECT count(*) FROM batch_images").fetchone() == (0,)


async def call(served: Served, function: Callable[..., Any], *arguments: Any) -> Any:
    with strict(served.base_url) as client:
        return await trio.to_thread.run_sync(function, client, *arguments)


def cancelled(client: openai.OpenAI, batch_id: str) -> None:
    client.batches.cancel(batch_id)


async def health(served: Served) -> Any:
    _, _, data = await exchange(served, get("/health"))
    return json.loads(data)


async def test_a_server_that_never_answers_holds_up_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(_: trio.abc.Stream, __: bytes) -> None:
        held.set()
        await trio.sleep_forever()

    held = trio.Event()
    async with worlds(monkeypatch) as world:
        world.other.answers["/never"] = never
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, world.served, world.asking(CHAT, "/never"), CHAT)
            await held.wait()
            status, _ = await ask(world.served, world.asking(CHAT, "/small"), CHAT)
            assert status == 200
            nursery.cancel_scope.cancel()
