"""One client can neither end the server nor hold its shutdown. Each fault happens beside another
client's stream."""

from __future__ import annotations

import errno
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import pytest
import trio
from hypercorn.config import Config
from quart import Response

from tests.fakes import FakeEngine
from tests.web.serving import (
    PATIENCE_S,
    STREAM,
    a_stream_that_goes_on,
    eventually,
    exchange,
    get,
    open_files,
    pace,
    post,
    receive_all,
    serving,
)
from trouper import ServerSettings, SettingsInvalid
from trouper.protocol.plans import Plan
from trouper.web.app import create_app
from trouper.web.http import guard
from trouper.web.http.plain_http import MAX_JOINED
from trouper.web.http.socket_writer import SocketWriter
from trouper.web.server import _Server, serve_http


@contextmanager
def stalled_reader(port: int) -> Iterator[None]:
    """A client that asks for much and reads nothing."""
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", port))
        stalled.sendall(post("/v1/completions", STREAM | {"prompt": ["a"] * 16, "logprobs": 20}))
        yield


async def test_a_reader_that_never_reads_is_cut_off() -> None:
    """R11. Its row is freed, although the socket stays open."""
    async with serving(write_timeout_s=0.3) as served, a_stream_that_goes_on(served):
        with stalled_reader(served.port):
            await eventually(lambda: served.busy == 17)
            await eventually(lambda: served.connections == 1)
            await eventually(lambda: served.busy == 1)


async def test_a_stalled_writer_does_not_hold_shutdown() -> None:
    with ExitStack() as stack:
        async with serving(write_timeout_s=60) as served:
            stack.enter_context(stalled_reader(served.port))
            await eventually(lambda: served.busy == 16)


async def test_slow_loris() -> None:
    async with (
        serving(header_timeout_s=0.2) as served,
        a_stream_that_goes_on(served),
        await served.connect() as silent,
        await served.connect() as slow,
    ):
        await slow.send_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert await receive_all(slow) == b""
        assert await receive_all(silent) == b""


async def test_a_half_sent_body_is_408() -> None:
    async with (
        serving(body_timeout_s=0.2) as served,
        a_stream_that_goes_on(served),
        await served.connect() as half,
    ):
        await half.send_all(post("/v1/completions", STREAM)[:-10])
        answer = await receive_all(half)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"body_timeout"' in answer


@pytest.mark.parametrize(
    "junk",
    [b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000, b"\r\n" * 100 + b"junk"],
)
async def test_junk(junk: bytes) -> None:
    async with (
        serving(header_timeout_s=1) as served,
        a_stream_that_goes_on(served),
        await served.connect() as client,
    ):
        with suppress(trio.BrokenResourceError):
            await client.send_all(junk)
        assert (await receive_all(client))[:12] in (
            b"",
            b"HTTP/1.1 400",
            b"HTTP/1.1 431",
            b"HTTP/1.1 505",
        )


@pytest.mark.parametrize(
    ("request_bytes", "status", "said"),
    [
        (
            b"GET /livez HTTP/1.1\r\n\r\n",
            400,
            b"no valid request of HTTP/1.1: Missing mandatory Host: header",
        ),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, b"Found multiple Host: headers"),
        (b"\x16\x03\x01" + b"\x00" * 2000 + b"\r\n\r\n", 400, b"illegal request line"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200_000, 431, b"too large"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, b"this is not HTTP/1.1"),
    ],
)
async def test_a_refusal_of_the_protocol_says_why(
    request_bytes: bytes, status: int, said: bytes
) -> None:
    async with serving() as served, await served.connect() as client:
        with suppress(trio.BrokenResourceError):
            await client.send_all(request_bytes)
        answer = await receive_all(client)
        assert answer.startswith(b"HTTP/1.1 %d" % status) and said in answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "behind"),
    [("", b"\x00junk\r\n\r\n"), ("", get("/livez")), ("Upgrade: h2c\r\n", b"")],
)
async def test_pipelined_junk_and_a_disconnect(stream: bool, headers: str, behind: bytes) -> None:
    """Bytes behind a request pause the protocol, and so does an `Upgrade` (Java's client sends
    one). The engine is held still here: no token and no heartbeat tells that the client left."""
    still = trio.Event()

    async def before(plan: Plan) -> None:
        await (still.wait() if len(plan.decode) == 1 else pace(plan))

    async with serving(FakeEngine(before_step=before), heartbeat_s=60) as served:
        async with await served.connect() as client:
            await client.send_all(
                post("/v1/completions", STREAM | {"stream": stream}, headers) + behind
            )
            await eventually(lambda: served.runtime.health().scheduler.active_sequences == 1)
            assert served.connections == 1
        await eventually(lambda: served.connections == 0)
        still.set()
        await eventually(lambda: served.busy == 0)


async def test_a_flood_behind_a_request_is_cut_off() -> None:
    async with serving() as served, a_stream_that_goes_on(served), await served.connect() as client:
        with suppress(trio.BrokenResourceError), trio.fail_after(PATIENCE_S):
            await client.send_all(post("/v1/completions", STREAM))
            while True:
                await client.send_all(b"x" * 2**16)
        await eventually(lambda: served.busy == 1)
        # Counted when the engine has dropped the row; an answer that went on to its end is never
        # counted so.
        await eventually(lambda: served.runtime.health().scheduler.requests_withdrawn == 1)


FORM_START = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'


async def test_who_is_refused_while_sending_can_read_why() -> None:
    """The socket is not closed over unread bytes, which would reset it; nor read for ever."""
    async with (
        serving(max_body_bytes=2000) as served,
        a_stream_that_goes_on(served),
        await served.connect() as client,
    ):
        whole = post("/v1/completions", {"prompt": "x" * 4_000_000})
        half = len(whole) // 2
        await client.send_all(whole[:half])
        await eventually(lambda: served.connections == 2)
        await client.send_all(whole[half:])
        assert (await receive_all(client)).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("request_line", "kind"),
    [
        (b"POST /v1/completions", b"application/json"),
        (b"POST /v1/files", b"multipart/form-data; boundary=x"),
        (b"POST /v1/files", b"text/plain"),
        (b"POST /v1/nothing", b"application/json"),
        (b"GET /v1/models", b"application/json"),
        (b"DELETE /v1/files/none", b"application/json"),
    ],
)
async def test_who_never_stops_sending_is_cut_off(
    request_line: bytes, kind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody reads the body: its chunks stood before the end of the stream, for which a
    handler waited that nothing could cancel."""
    monkeypatch.setattr(guard, "LINGER_S", 0.2)
    async with (
        serving(max_body_bytes=2000, max_file_bytes=2000) as served,
        await served.connect() as client,
    ):
        with suppress(trio.BrokenResourceError), trio.fail_after(PATIENCE_S):
            await client.send_all(
                request_line
                + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                + kind
                + b"\r\nContent-Length: 999999999\r\n\r\n"
                + FORM_START
            )
            while True:
                await client.send_all(b"x" * 2**16)
        await eventually(lambda: served.connections == 0)


async def test_slow_loris_on_a_later_request() -> None:
    async with serving(header_timeout_s=0.2) as served, await served.connect() as client:
        await client.send_all(get("/livez").replace(b"Connection: close\r\n", b"") + b"GET /li")
        assert b'"alive"' in await receive_all(client)


async def test_the_gap_between_a_handler_and_its_body() -> None:
    """A client that leaves after the handler returned and before the body began: nobody but the
    request owns the answer."""
    async with serving() as served:
        app, gap = create_app(served.runtime, ServerSettings()), trio.Event()
        body = json.dumps(STREAM).encode()

        async def hold(_: Response) -> Response:
            gap.set()
            await trio.sleep_forever()

        async def receive() -> Any:
            if not requested:
                requested.append(True)
                return {"type": "http.request", "body": body, "more_body": False}
            await gap.wait()
            assert served.runtime.health().scheduler.total_requests == 1
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError(f"{message} to a client that left")

        requested: list[bool] = []
        app.after_request(hold)
        scope: Any = {
            "type": "http",
            "asgi": {},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "headers": [],
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "client": None,
            "server": None,
            "extensions": {},
        }
        with trio.fail_after(PATIENCE_S):
            await app(scope, receive, send)
        await eventually(lambda: served.runtime.health().scheduler.requests_withdrawn == 1)


async def test_a_stalled_reader_does_not_hold_a_cancel() -> None:
    """A program that embeds the server may cancel it, also while a shielded last write waits for
    the reader."""
    writing = trio.Event()

    async def flood(_scope: Any, _receive: Any, send: Any, *_: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with trio.CancelScope(shield=True):
            writing.set()
            await send({"type": "http.response.body", "body": b"x" * 2**26})

    server = _Server(cast(Any, flood), Config(), ServerSettings(write_timeout_s=60))
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(PATIENCE_S), socket.socket() as stalled:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.accept, listener, nursery)
            nursery.start_soon(server.cut_when_cancelled)
            stalled.connect(listener.socket.getsockname())
            stalled.sendall(get("/"))
            await writing.wait()
            nursery.cancel_scope.cancel()


class NoFileLeft(trio.abc.Listener[trio.SocketStream]):
    """Fails three times, as accept does when the process has as many files open as it may."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self._listener = listener
        self._failed = 0

    async def accept(self) -> trio.SocketStream:
        if self._failed < 3:
            self._failed += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await self._listener.accept()

    async def aclose(self) -> None:
        await self._listener.aclose()


async def test_no_file_left_to_accept_with(caplog: pytest.LogCaptureFixture) -> None:
    """Who knocks waits until there is one, and the log says it once: it would have ten lines a
    second."""

    async def answer(_scope: Any, _receive: Any, send: Any, *_: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = _Server(cast(Any, answer), Config(), ServerSettings())
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.accept, NoFileLeft(listener), nursery)
            async with await trio.open_tcp_stream(*listener.socket.getsockname()) as client:
                await client.send_all(get("/"))
                assert (await receive_all(client)).startswith(b"HTTP/1.1 204")
            nursery.cancel_scope.cancel()
    assert caplog.text.count("cannot accept") == 1


@pytest.mark.parametrize(
    ("sent", "writes"),
    [
        ([b"ab"], [b"ab"]),
        ([b"a", b"b"], [b"a", b"b"]),
        ([b"a" * (MAX_JOINED + 1)], [b"", b"a" * (MAX_JOINED + 1)]),
        ([], [b""]),
    ],
)
async def test_the_head_of_a_response_with_a_length_goes_out_with_its_body(
    monkeypatch: pytest.MonkeyPatch, sent: list[bytes], writes: list[bytes]
) -> None:
    """And before a connection ends whose app has failed in between."""
    length = len(b"".join(sent)) or 9
    written, write = list[bytes](), SocketWriter.write

    async def noted(writer: SocketWriter, data: bytes) -> None:
        written.append(data)
        await write(writer, data)

    async def answer(_scope: Any, _receive: Any, send: Any, *_: Any) -> None:
        headers = [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for data in sent:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        if sent:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    monkeypatch.setattr(SocketWriter, "write", noted)
    server = _Server(cast(Any, answer), Config(), ServerSettings())
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.accept, listener, nursery)
            async with await trio.open_tcp_stream(*listener.socket.getsockname()) as client:
                await client.send_all(get("/"))
                head, _, body = (await receive_all(client)).partition(b"\r\n\r\n")
            nursery.cancel_scope.cancel()
    assert (head[:12], body) == (b"HTTP/1.1 200", b"".join(sent))
    assert [data.removeprefix(head + b"\r\n\r\n") for data in written] == writes


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as served:
        async with await served.connect() as client:
            await client.send_all(
                get("/livez").replace(b"Connection: close\r\n", b"") + get("/v1/models")
            )
            answer = await receive_all(client)
        assert answer.index(b'"alive"') < answer.index(b'"object":"list"')


async def test_late_h2c_data() -> None:
    """With Hypercorn's own handlers this KeyError ends the process. HTTP/2 is refused as a
    whole."""
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
        upgrade = (
            "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
            "bKdPyn3u98cTfZJSh4TNeQ==\r\n"
        )
        await client.send_all(
            get("/none", upgrade).replace(b"Connection: close", b"Connection: Upgrade") + b"x"
        )
        assert (await receive_all(client)).startswith(b"HTTP/1.1 404")


async def test_1000_connects_and_drops() -> None:
    """Half of them with a reset. Nothing is left, while the server runs on."""
    async with serving() as served, a_stream_that_goes_on(served):

        def held() -> tuple[int, int, int]:
            return served.connections, trio.lowlevel.current_statistics().tasks_living, open_files()

        before = held()
        for _ in range(20):
            clients = [await served.connect() for _ in range(50)]
            for place, client in enumerate(clients):
                if place % 2:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.socket.close()
        assert (await exchange(served, get("/livez")))[0] == 200
        # At one moment: the other client connects anew for each stream.
        await eventually(lambda: held() == before)


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


async def test_a_taken_port_is_one_clear_error() -> None:
    async with serving() as served:
        clear = f"^cannot listen on .*:{served.port}: Address already in use; choose another --port"
        with pytest.raises(SettingsInvalid, match=clear):
            await serve_http(
                served.runtime, ServerSettings(port=served.port), shutdown=trio.Event()
            )


async def test_a_server_that_cannot_start_leaves_no_socket() -> None:
    """A warning of one that was not closed is an error in these tests; here the listener is asked
    for by its number."""
    with trio.socket.socket() as probe:
        await probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with serving() as served:
        with pytest.RaisesGroup(SettingsInvalid, flatten_subgroups=True, allow_unwrapped=True):
            await serve_http(
                served.runtime, ServerSettings(port=port, api_key=("ä",)), shutdown=trio.Event()
            )
        with pytest.raises(OSError):
            await trio.open_tcp_stream("127.0.0.1", port)
