"""What is held for requests is bounded (--request-memory), and counted before it is there."""

from __future__ import annotations

import gc
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.serving import (
    PATIENCE_S,
    Served,
    ask,
    eventually,
    exchange,
    get,
    pace,
    post,
    serving,
)
from tests.web.test_key_rights import bearer, key_file
from trouper.web.http.client_paths import Adaptation
from trouper.web.http.content_encoding import ENCODINGS, decoded, zstd
from trouper.web.responses import routes

MB = 2**20
BUDGET: dict[str, Any] = {"request_memory": 12 * MB, "max_body_bytes": 8 * MB}
LARGE = {"prompt": "x", "max_tokens": 1, "user": "a" * (MB * 5 // 4)}
"""Holds 3.75 MB, so that a second one is beyond the share."""
SMALL = {"prompt": "x", "max_tokens": 1}


def large(**more: Any) -> bytes:
    return json.dumps(LARGE | more).encode()


def head(size: int, headers: str = "") -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n{headers}\r\n"
    ).encode()


@asynccontextmanager
async def announced(
    served: Served, size: int, headers: str = ""
) -> AsyncIterator[trio.SocketStream]:
    """A request whose body does not come. Another one is answered before it, when the file of keys
    was read, and one after it."""
    await code_of(served, b"{}", headers)
    async with await served.connect() as stream:
        await stream.send_all(head(size, headers))
        await code_of(served, b"{}", headers)
        yield stream


async def code_of(served: Served, data: bytes, headers: str = "") -> tuple[int, str | None]:
    status, _, body = await exchange(served, post("/v1/completions", data, headers))
    return status, json.loads(body).get("error", {}).get("code")


async def refused(served: Served, data: bytes, headers: str = "") -> str | None:
    """Ask until it is refused, which is when the server has read the head of another request."""
    with trio.fail_after(PATIENCE_S):
        while (got := await code_of(served, data, headers))[0] == 200:
            pass
    return got[1]


async def served_again(served: Served, data: bytes) -> None:
    with trio.fail_after(PATIENCE_S):
        while (await code_of(served, data))[0] != 200:
            pass


async def test_a_body_counts_before_it_comes_and_small_requests_go_on() -> None:
    async with serving(FakeEngine(), **BUDGET) as served:
        async with announced(served, 5 * MB // 2):
            assert await refused(served, large()) == "request_memory_share"
            assert (await ask(served, SMALL))[0] == 200
        await served_again(served, large())
        assert await code_of(served, large(user="a" * (3 * MB))) == (
            413,
            "request_memory_too_small",
        )


async def test_clients_have_shares(tmp_path: Path) -> None:
    file = key_file(tmp_path, "sk-a name=alice\nsk-b name=bob\n")
    async with (
        serving(FakeEngine(), api_key_file=file, **BUDGET) as served,
        announced(served, 5 * MB // 2, bearer("sk-a")),
    ):
        assert await refused(served, large(), bearer("sk-a")) == "request_memory_share"
        assert await code_of(served, large(user="a" * MB), bearer("sk-b")) == (200, None)
        async with announced(served, 3 * MB // 2, bearer("sk-b")):
            other = large(user="a" * (MB * 3 // 2))
            assert await refused(served, other, bearer("sk-b")) == "request_memory_share"


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_bomb_ends_where_its_memory_does(encoding: str) -> None:
    data = b'{"prompt": "' + b"x" * (7 * MB) + b'"}'
    packed = gzip.compress(data) if encoding == "gzip" else zstd.compress(data)
    async with serving(FakeEngine(), **BUDGET) as served:
        code = (413, "request_memory_too_small")
        assert await code_of(served, packed, f"Content-Encoding: {encoding}\r\n") == code
        await served_again(served, large())


def test_no_more_is_decompressed_than_was_taken() -> None:
    taken: list[int] = []

    def take(size: int) -> None:
        if sum(taken) > 3 * MB:
            raise MemoryError
        taken.append(size)

    with pytest.raises(MemoryError):
        decoded(gzip.compress(b"\0" * (64 * MB)), "gzip", 64 * MB, take)
    assert sum(taken) < 5 * MB


async def test_a_chunked_body_counts_as_it_comes() -> None:
    chunk = b"%x\r\n%b\r\n" % (MB, b"a" * MB)
    start = head(0).replace(
        b"Content-Length: 0", b"Connection: close\r\nTransfer-Encoding: chunked"
    )
    async with serving(FakeEngine(), **BUDGET) as served, await served.connect() as stream:
        await stream.send_all(start + b'8\r\n{"user":\r\n' + 3 * chunk)
        with trio.fail_after(PATIENCE_S):
            assert b" 413 " in await stream.receive_some()
        await served_again(served, large())


async def test_limits_of_a_key_come_before_the_body(tmp_path: Path) -> None:
    """The body never comes, and every refusal does."""
    file = key_file(
        tmp_path, "sk-a name=alice requests_per_minute=1\nsk-w observability=true inference=false\n"
    )
    async with serving(FakeEngine(), api_key_file=file, **BUDGET) as served:
        assert await code_of(served, b"{}", bearer("sk-a")) == (400, "missing_required_parameter")
        for headers, status in (
            ("", 401),
            (bearer("sk-none"), 401),
            (bearer("sk-w"), 403),
            (bearer("sk-a"), 429),
            (bearer("sk-a") + "Content-Encoding: gzip\r\n", 429),
        ):
            async with await served.connect() as stream:
                await stream.send_all(head(4 * MB, headers))
                with trio.fail_after(PATIENCE_S):
                    assert (await stream.receive_some()).split()[1] == str(status).encode()


async def test_little_of_a_body_is_received_before_somebody_reads_it() -> None:
    """A request without a body of its own leaves what is sent with it where it is."""
    async with serving(FakeEngine(), **BUDGET) as served:
        status, _, _ = await exchange(served, post("/v1/responses/resp_none/cancel", b"a" * 1000))
        assert status == 404
        assert (await exchange(served, get("/livez")))[0] == 200


async def test_what_runs_is_given_back_however_it_ends() -> None:
    async with serving(FakeEngine(before_step=pace), **BUDGET) as served:
        for _ in range(3):
            async with await served.connect() as stream:
                await stream.send_all(
                    post("/v1/completions", large(max_tokens=200, ignore_eos=True, stream=True))
                )
                await stream.receive_some()
                assert await refused(served, large()) == "request_memory_share"
            await served_again(served, large())


async def test_answers_that_nobody_has_yet_are_counted() -> None:
    """Choices with 20 log-probabilities a token, of which each is a few words of a request."""
    wish = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 8, "logprobs": 20}
    async with serving(FakeEngine(), **BUDGET) as served:
        assert (await ask(served, wish))[1]["error"]["code"] == "request_memory_too_small"
        await eventually(lambda: not served.busy)
        assert (await ask(served, wish | {"n": 1, "max_tokens": 40}))[0] == 200


async def test_a_text_of_many_tokens_is_counted_before_it_is_made() -> None:
    async with serving(FakeEngine(), **BUDGET) as served:
        status, answer = await ask(served, {"tokens": [65] * 300}, "/detokenize")
        assert (status, answer) == (200, {"prompt": "A" * 300})
        got = await ask(served, {"tokens": [65] * 45_000}, "/detokenize")
        assert got[0] == 413 and got[1]["error"]["code"] == "request_memory_too_small"


async def test_pairs_repeat_their_query() -> None:
    many = {"query": "q" * 8000, "documents": ["d"] * 300}
    async with serving(FakeEngine(), **BUDGET) as served:
        status, answer = await ask(served, many, "/v1/rerank")
        assert status in (400, 413), answer


async def test_a_conversation_that_is_stored_counts_again_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It becomes a prompt for each small request that goes on with it."""
    wish = {"input": "a" * 300, "max_output_tokens": 1}
    async with serving(FakeEngine(), **BUDGET) as served:
        _, first = await ask(served, wish, "/v1/responses")
        monkeypatch.setattr(routes, "PROMPT_FACTOR", 6 * MB)
        status, _ = await ask(served, wish, "/v1/responses")
        assert status == 200
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        for more in ({"previous_response_id": first["id"]}, {"input": [item]}):
            _, answer = await ask(served, wish | more, "/v1/responses")
            assert answer["error"]["code"] == "request_memory_too_small", answer


async def test_a_stream_keeps_no_body() -> None:
    """Bodies are kept until no fault of them can follow; a stream may take hours."""
    body = {"messages": [{"role": "user", "content": "x"}], "extra_body": {"min_p": 0.5}}
    more = {"stream": True, "max_tokens": 4000, "ignore_eos": True}
    earlier = {id(one): one for one in gc.get_objects() if isinstance(one, Adaptation)}
    async with serving() as served, await served.connect() as stream:
        await stream.send_all(post("/v1/chat/completions", body | more))
        received = b""
        while b"data:" not in received:
            received += bytes(await stream.receive_some())
        kept = [one for one in gc.get_objects() if isinstance(one, Adaptation)]
        # Other tests' bodies lie in cycles that nobody has collected yet.
        assert not [one for one in kept if id(one) not in earlier]
