"""Cancelling by id, tokenizing, detokenizing."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.fakes import EOS, FakeEngine
from tests.web.serving import PATIENCE_S, STREAM, ask, eventually, exchange, pace, post, serving


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_cancelled_by_its_id(stream: bool) -> None:
    async with serving(FakeEngine(before_step=pace)) as served:
        ended: list[tuple[int, bytes]] = []

        async def client(name: str) -> None:
            status, _, body = await exchange(
                served,
                post("/v1/completions", STREAM | {"stream": stream}, f"X-Request-Id: {name}\r\n"),
            )
            ended.append((status, body))

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client, "mine")
                await eventually(lambda: served.runtime.health().scheduler.tokens_generated > 5)
                status, said = await ask(served, {}, "/v1/requests/mine/cancel")
        assert (status, said["cancelled"]) == (200, True)
        [(status, body)] = ended
        assert status == (200 if stream else 499)
        assert b'"cancelled"' in body and b"[DONE]" not in body
        await eventually(lambda: served.busy == 0)
        assert (await ask(served, {}, "/v1/requests/mine/cancel"))[0] == 404


async def test_the_id_in_the_body_cancels_too() -> None:
    async with serving(FakeEngine(before_step=pace)) as served, trio.open_nursery() as nursery:
        nursery.start_soon(
            exchange, served, post("/v1/completions", STREAM, "X-Request-Id: a-b\r\n")
        )
        await eventually(lambda: served.busy == 1)
        assert (await ask(served, {}, "/v1/requests/cmpl-a-b/cancel"))[0] == 200


async def test_tokens_and_back() -> None:
    async with serving(FakeEngine()) as served:
        _, said = await ask(served, {"prompt": "né"}, "/tokenize")
        read = [said[name] for name in ("tokens", "count", "token_strs")]
        assert read == [[110, 195, 169], 3, None]
        _, texts = await ask(served, {"prompt": "né", "return_token_strs": True}, "/tokenize")
        assert (texts["count"], len(texts["token_strs"])) == (3, 3)
        _, back = await ask(served, {"tokens": [*said["tokens"], EOS]}, "/detokenize")
        assert back["prompt"] == "né<eos>"
        _, chat = await ask(served, {"messages": [{"role": "user", "content": "x"}]}, "/tokenize")
        assert chat["tokens"] == list(b"<user>x<assistant>")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/detokenize", {"tokens": [1, 99999]}, "tokens.1"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized(path: str, body: dict[str, Any], param: str) -> None:
    async with serving(FakeEngine()) as served:
        status, said = await ask(served, body, path)
    assert (status, said["error"]["param"]) == (400, param)
