"""One client can neither end the server nor hold its shutdown. Each fault happens beside another client's stream."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

import h2.config
import h2.connection
import h2.events
import pytest
import trio
import trio.testing

from tests.web.serving import STREAM, a_stream_that_goes_on, eventually, exchange, get, post, receive_all, serving
from trouper import ServerSettings, SettingsInvalid
from trouper.web.server import serve_http


async def test_a_reader_that_never_reads_is_cut_off() -> None:
    """R11. Its row is freed, although the socket stays open."""
    async with serving(write_timeout_s=0.3) as served, a_stream_that_goes_on(served):
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", served.port))
        prompts = ["a"] * 16
        stalled.sendall(post("/v1/completions", STREAM | {"prompt": prompts, "logprobs": 20}))
        await eventually(lambda: served.busy == 17)
        await eventually(lambda: served.busy == 1)
        stalled.close()


async def test_a_stalled_writer_does_not_hold_shutdown() -> None:
    async with serving(write_timeout_s=60) as served:
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", served.port))
        stalled.sendall(post("/v1/completions", STREAM | {"prompt": ["a"] * 16, "logprobs": 20}))
        await eventually(lambda: served.busy == 16)
    stalled.close()


async def test_slow_loris() -> None:
    async with (
        serving(header_timeout_s=0.2) as served,
        a_stream_that_goes_on(served),
        await served.connect() as silent,
        await served.connect() as slow,
    ):
        await slow.send_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert await receive_all(slow) == b""
        assert await receive_all(silent) == b""


async def test_a_half_sent_body_is_408() -> None:
    async with serving(body_timeout_s=0.2) as served, a_stream_that_goes_on(served), await served.connect() as half:
        await half.send_all(post("/v1/completions", STREAM)[:-10])
        answer = await receive_all(half)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"body_timeout"' in answer


@pytest.mark.parametrize(
    "junk", [b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000, b"\r\n" * 100 + b"junk"]
)
async def test_junk(junk: bytes) -> None:
    async with (
        serving(header_timeout_s=1) as served,
        a_stream_that_goes_on(served),
        await served.connect() as client,
    ):
        with suppress(trio.BrokenResourceError):
            await client.send_all(junk)
        assert (await receive_all(client))[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 505")


async def test_pipelined_junk_behind_a_stream_and_a_disconnect() -> None:
    """Bytes behind a request pause the reader; only the heartbeat or the next write finds out that the client left."""
    async with (
        serving(heartbeat_s=0.1) as served,
        a_stream_that_goes_on(served),
        await served.connect() as client,
    ):
        await client.send_all(post("/v1/completions", STREAM) + b"\x00junk\r\n\r\n")
        await eventually(lambda: served.busy == 2)
        await eventually(lambda: served.busy == 1)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as served:
        async with await served.connect() as client:
            await client.send_all(get("/livez").replace(b"Connection: close\r\n", b"") + get("/v1/models"))
            answer = await receive_all(client)
        assert answer.index(b'"alive"') < answer.index(b'"object":"list"')


async def test_late_h2c_data() -> None:
    """With Hypercorn's own handlers this KeyError ends the process. HTTP/2 is refused as a whole."""
    async with serving() as served, a_stream_that_goes_on(served), await served.connect() as client:
        http2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        http2.initiate_connection()
        headers = [(":method", "POST"), (":path", "/"), (":authority", "x"), (":scheme", "http")]
        http2.send_headers(1, headers)
        await client.send_all(http2.data_to_send())
        http2.send_data(1, b"late body", end_stream=True)
        with suppress(trio.BrokenResourceError):
            await client.send_all(http2.data_to_send())
        assert (await receive_all(client))[:12] in (b"", b"HTTP/1.1 505")


async def test_h2c_upgrade_is_ignored() -> None:
    async with serving() as served, a_stream_that_goes_on(served):
        upgrade = "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        status, _, _ = await exchange(served, get("/livez", upgrade))
        assert status == 200


async def test_websocket_upgrade_and_one_byte() -> None:
    async with (
        serving(header_timeout_s=0.5) as served,
        a_stream_that_goes_on(served),
        await served.connect() as client,
    ):
        upgrade = "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: bKdPyn3u98cTfZJSh4TNeQ==\r\n"
        await client.send_all(get("/", upgrade).replace(b"Connection: close", b"Connection: Upgrade") + b"x")
        assert (await receive_all(client)).startswith(b"HTTP/1.1 404")


async def test_1000_connects_and_drops() -> None:
    """Half of them with a reset. Nothing is left: the fixture counts files, the nursery tasks."""
    async with serving() as served, a_stream_that_goes_on(served):
        for _ in range(20):
            clients = [await served.connect() for _ in range(50)]
            for place, client in enumerate(clients):
                if place % 2:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.socket.close()
        assert (await exchange(served, get("/livez")))[0] == 200


async def test_an_idle_connection_is_closed_also_after_its_first_request() -> None:
    async with serving(keep_alive_timeout_s=0.2) as served, await served.connect() as client:
        await client.send_all(get("/livez").replace(b"Connection: close\r\n", b""))
        assert b'"alive"' in await receive_all(client)


async def test_an_idle_connection_does_not_hold_shutdown() -> None:
    async with serving(keep_alive_timeout_s=60) as served:
        client = await served.connect()
        await client.send_all(get("/livez").replace(b"Connection: close\r\n", b""))
        assert b"200" in await client.receive_some()
    await client.aclose()


async def test_more_connections_than_there_is_room_for_wait() -> None:
    async with serving(max_connections=2) as served:
        first, second = await served.connect(), await served.connect()
        async with trio.open_nursery() as nursery:
            answers: list[int] = []

            async def third() -> None:
                answers.append((await exchange(served, get("/livez")))[0])

            nursery.start_soon(third)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not answers
            first.socket.close()
            await eventually(lambda: answers == [200])
        second.socket.close()


async def test_a_taken_port_is_one_clear_error() -> None:
    async with serving() as served:
        with pytest.raises(SettingsInvalid, match="--port"):
            await serve_http(served.runtime, ServerSettings(port=served.port), shutdown=trio.Event())
