"""Requests that two programs may read differently are refused (RFC 9112), and each answer behind
which the server closes says so."""

from __future__ import annotations

import json

import pytest
import trio

from tests.web.serving import eventually, exchange, get, post, receive_all, serving
from trouper.web.http.paced_body import PacedBody

BODY = b'{"prompt":"a","max_tokens":1}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
IDENTITY = CHUNKED.replace(b"chunked", b"chunked, identity")
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "said"),
    [
        (POST + b"Content-Length: 4\r\n" + CHUNKED + b"\r\n" + CHUNKS, "both Content-Length and"),
        (POST.replace(b"1.1", b"1.0", 1) + CHUNKED + b"\r\n" + CHUNKS, "is not of HTTP/1.0"),
        ((POST + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY, "ends without CR"),
        (POST + b"X-A: b\n" + LENGTH + b"\r\n" + BODY, "ends without CR"),
        (POST + LENGTH + b"X-A: b\r\n\n" + BODY, "ends without CR"),
        (POST + b"X-A: b\r\n " + LENGTH + LENGTH + b"\r\n" + BODY, "folded"),
        (POST + b"X-A: b\r\n\t" + CHUNKED + LENGTH + b"\r\n" + BODY, "folded"),
        (POST + b"X-A: b\x1bc\r\n" + LENGTH + b"\r\n" + BODY, "control character"),
        (POST + b"X-A: \x7f\r\n" + LENGTH + b"\r\n" + BODY, "control character"),
        (POST + b"X-A: b\x00c\r\n" + LENGTH + b"\r\n" + BODY, "illegal header line"),
        (POST + b"X-A: b\rContent-Length: 3\r\n" + LENGTH + b"\r\n" + BODY, "illegal header line"),
        (POST + LENGTH.replace(b":", b" :") + b"\r\n" + BODY, "illegal header line"),
        (POST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY, "conflicting Content-Length"),
        (POST + IDENTITY + b"\r\n" + CHUNKS, "Only Transfer-Encoding"),
        (POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS, "multiple Transfer-Encoding"),
        (POST + CHUNKED + b"\r\n1d;a\nb\r\n", "illegal chunk header"),
    ],
)
async def test_what_is_read_in_two_ways_is_refused_with_what_is_behind(
    request_bytes: bytes,
    said: str,
) -> None:
    async with serving() as served, await served.connect() as client:
        await client.send_all(request_bytes + SMUGGLED)
        answer = await receive_all(client)
        is_unknown = IDENTITY in request_bytes or CHUNKED * 2 in request_bytes
        assert answer.startswith(b"HTTP/1.1 501" if is_unknown else b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1 ") == 1 and said.encode() in answer
        assert b"connection: close" in answer.lower()


BAD_HEADS = (SMUGGLED[:-2] + b"X-A: b\r\n c: d\r\n\r\n", SMUGGLED.replace(b"\r", b""))


@pytest.mark.parametrize("head", BAD_HEADS)
async def test_a_head_behind_a_body_is_looked_at_too(head: bytes) -> None:
    async with serving() as served, await served.connect() as client:
        await client.send_all(POST + LENGTH + b"\r\n" + BODY + head + SMUGGLED)
        answers = (await receive_all(client)).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"400"]


@pytest.mark.parametrize("head", BAD_HEADS)
async def test_a_head_that_comes_byte_by_byte_is_looked_at_as_a_whole(head: bytes) -> None:
    async with serving() as served, await served.connect() as client:
        for place in range(len(head)):
            await client.send_all(head[place : place + 1])
        assert (await receive_all(client)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + LENGTH + LENGTH + b"\r\n" + BODY,
        POST + CHUNKED.replace(b" ", b"\t") + b"\r\n" + CHUNKS,
        POST + "X-A: \tä b\t c \r\n".encode("latin1") + LENGTH + b"\r\n" + BODY,
        POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";a=b\r\n", 1),
        POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"0\r\n", b"0\r\nX: y\r\n"),
        POST.replace(b" /", b" http://localhost/", 1) + LENGTH + b"\r\n" + BODY,
        POST + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY,
    ],
)
async def test_what_the_rfc_allows_is_answered(request_bytes: bytes) -> None:
    """And the connection goes on."""
    async with serving() as served, await served.connect() as client:
        await client.send_all(request_bytes + get("/livez"))
        answers = (await receive_all(client)).split(b"HTTP/1.1 ")
        first, last = [one for one in answers if one[:3] not in (b"", b"100")]
        assert first.startswith(b"200") and b'"alive"' in last


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (POST + b"Content-Length: 99999999\r\n\r\n" + b"x" * 200_000, 413),
        (POST.replace(b"application/json", b"text/plain") + b"Content-Length: 90000\r\n\r\n", 415),
        (POST.replace(b"/completions", b"/nothing") + b"Content-Length: 90000\r\n\r\n", 404),
        (POST.replace(b"/completions", b"/models") + b"Content-Length: 90000\r\n\r\n", 405),
        (POST + b"Content-Length: 90000\r\n\r\n{", 408),
        (POST + LENGTH + b"X: " + b"x" * 200_000, 431),
    ],
)
async def test_an_answer_before_the_end_of_a_body_says_that_the_connection_closes(
    request_bytes: bytes, status: int
) -> None:
    async with serving(body_timeout_s=0.1) as served, await served.connect() as client:
        await client.send_all(request_bytes)
        answer = await receive_all(client)
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert answer.lower().count(b"connection: close") == 1


async def test_who_needs_no_key_for_an_error_needs_no_new_connection_either() -> None:
    """A refusal with its whole body read leaves the connection as it is."""
    async with serving(api_key=("k",)) as served, await served.connect() as client:
        for _ in range(2):
            await client.send_all(POST + LENGTH + b"\r\n" + BODY)
            answer = b""
            while not answer.endswith(b"}"):
                answer += await client.receive_some()
            assert answer.startswith(b"HTTP/1.1 401") and b"connection: close" not in answer.lower()


async def test_answers_while_the_server_drains_say_that_the_connection_closes() -> None:
    async with serving() as served, await served.connect() as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.runtime.drain, 0)
            await eventually(lambda: served.runtime.draining)
        await client.send_all(POST + LENGTH + b"\r\n" + BODY)
        answer = await receive_all(client)
        assert answer.startswith(b"HTTP/1.1 503") and b"connection: close" in answer.lower()


LONG = "x\x1b\n" + "a" * 60_000
PARTS = [{"role": "user", "content": [{"type": LONG}]}]
CLOSE = b"Host: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", LONG: 1}),
        ("/v1/completions", {"prompt": "a", "model": LONG}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {LONG: 1}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}),
        ("/v1/chat/completions", {"messages": PARTS}),
        ("/v1/messages", {"max_tokens": 1, "messages": PARTS}),
        ("/v1/messages", {"max_tokens": 1, "tools": [{"type": LONG}], "messages": []}),
        ("/v1/responses", {"input": [{"type": LONG}]}),
        ("/v1/responses", {"input": "a", "previous_response_id": LONG}),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": LONG}}),
        ("/v1/embeddings", {"input": "a", "encoding_format": LONG}),
        ("/v1/load_lora_adapter", {"lora_name": LONG, "lora_path": LONG}),
    ],
)
async def test_no_error_repeats_a_long_value(path: str, body: object) -> None:
    async with serving(strict=True) as served:
        status, headers, answer = await exchange(served, post(path, body))
        assert 400 <= status < 500
        assert len(answer) < 2000 and sum(map(len, headers.values())) < 1000, answer[:3000]
        assert json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"A" * 60_000 + b" /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        get("/" + "v1/" * 20_000),
        get("/v1/models/" + "m" * 60_000),
        get("/v1/files/" + "m" * 60_000),
        get("/v1/files?after=" + "m" * 60_000),
        get("/v1/files?" + "m" * 60_000 + "=1"),
        get("/v1/responses/" + "m" * 60_000),
        get("/v1/models", "x" * 30_000 + " : y\r\n"),
        get("/v1/models", "Origin: http://" + "o" * 60_000 + "\r\n"),
        get("/v1/models", "X-Request-Id: " + "o" * 60_000 + "\r\n"),
        get("/v1/models").replace(b"localhost", b"h" * 60_000),
        post("/v1/completions", BODY, "Content-Encoding: " + "g" * 60_000 + "\r\n"),
        post("/v1/completions", BODY, "Content-Type: text/" + "g" * 60_000 + "\r\n"),
        post("/v1/requests/" + "r" * 60_000 + "/cancel", {}),
        b"OPTIONS /v1/models HTTP/1.1\r\n" + CLOSE + b"Origin: http://localhost\r\n"
        b"Access-Control-Request-Method: "
        + b"P" * 9000
        + b"\r\nAccess-Control-Request-Headers: "
        + b"h" * 50_000
        + b"\r\n\r\n",
    ],
)
async def test_no_answer_repeats_a_long_part_of_a_head(request_bytes: bytes) -> None:
    async with serving(strict=True) as served, await served.connect() as client:
        if CLOSE not in request_bytes:
            request_bytes = request_bytes.replace(b"Host: localhost\r\n", CLOSE)
        await client.send_all(request_bytes)
        assert len(await receive_all(client)) < 2500


async def test_chunks_of_a_byte_reach_the_body_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, append = [], PacedBody.append

    def count(body: PacedBody, data: bytes) -> None:
        pieces.append(len(data))
        append(body, data)

    monkeypatch.setattr(PacedBody, "append", count)
    blanks = b"".join(b"1\r\n \r\n" for _ in range(5000))
    async with serving() as served, await served.connect() as client:
        await client.send_all(POST + b"Connection: close\r\n" + CHUNKED + b"\r\n" + blanks + CHUNKS)
        assert (await receive_all(client)).startswith(b"HTTP/1.1 200")
    assert sum(pieces) == 5000 + len(BODY) and len(pieces) < 20
