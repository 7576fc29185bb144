"""HTTP/1.1 between h11, which parses and frames, and Hypercorn's stream of a request. Upgrades are
ignored (RFC 9110, 7.8), and HTTP/2 prefaces refused."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import msgspec
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import events as stream_events
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import ConnectionState, H11SendableEvent

from trouper.protocol.problems import Problem
from trouper.web.http.json_response import error_body, http_problem

CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
FOLDED = re.compile(rb"\n[ \t]")
MAX_JOINED = 2**16  # Bytes of a body beyond which the body is not joined to the head.
STEPS_OF_A_BODY = 8
"""Runs of the event loop for reading a small body's rest before a response."""
REFUSALS = {431: "the head of the request is too large"}

# A supervisor's paths: answered beyond --max-connections, and without a turn.
HEALTH_PATHS = ("/livez", "/readyz")
WRITER = "trouper.writer"
"""Key of the connection's `SocketWriter` in a request's state, if the app may write directly."""
STREAM_ID = 1
CHUNKS_AT_ONCE = 64
"""Chunks of a body parsed in one run of the event loop."""
NOT_HTTP1 = http_problem(505, "this is not HTTP/1.1", "invalid_http")


class StrictHttp(h11.Connection):
    """Refuses ambiguous heads like invalid ones (RFC 9112, 2.2, 5.2, 6.1 and 11.2)."""

    # A proxy that sees another end of a request would take one client's bytes for another's head.

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        """As in h11. Raises `h11.RemoteProtocolError` also for an ambiguous head."""
        if self.their_state is not h11.IDLE:
            return super().next_event()
        unread, _ = self.trailing_data
        event = super().next_event()
        if isinstance(event, h11.Request):
            head = unread[: len(unread) - len(self.trailing_data[0])]
            if fault := fault_of(head, event):
                raise h11.RemoteProtocolError(fault)
        return event


def fault_of(head: bytes, request: h11.Request) -> str:
    if head.count(b"\n") != head.count(b"\r\n"):
        return "a line ends without CR"
    if FOLDED.search(head):
        return "a header is folded into several lines"
    if CONTROLS.search(head):
        return "a header has a control character"
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return ""
    if b"content-length" in names:
        return "it has both Content-Length and Transfer-Encoding"
    return "Transfer-Encoding is not of HTTP/1.0" if request.http_version < b"1.1" else ""


def _is_for_health(request: h11.Request) -> bool:
    return request.target.partition(b"?")[0].decode("latin-1") in HEALTH_PATHS


class PlainHttp:
    """A connection's protocol: bytes in by `handle`, bytes out by `send`. The last response has
    `Connection: close`."""

    def __init__(
        self,
        *,
        excess: Callable[[], Problem | None],
        begin: Callable[[], Awaitable[None]],
        connection_state: ConnectionState,
        send: Callable[[Event], Any],
        **stream: Any,
    ) -> None:
        """`excess` returns the refusal of a surplus request. `begin` is awaited before the first
        request, except for health. `connection_state` is each request's ASGI state. `stream` is
        `HTTPStream`'s."""
        self.config, self.context = stream["config"], stream["context"]
        self.connection = StrictHttp(h11.SERVER, self.config.h11_max_incomplete_size)
        self._state, self._send = connection_state, send
        self._excess, self._begin = excess, begin
        self._stream_arguments = stream
        self._stream: HTTPStream | None = None
        self._requests = 0
        self._may_read = trio.Event()
        self._ends = False
        self._held = b""
        """A head that is sent with the body."""

    @property
    def listening(self) -> bool:
        """Whether the client's next bytes belong to the current request, or begin one."""
        return self.connection.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def is_interrupted(self) -> bool:
        return self._ends or self._more_to_come or self.request_waits

    @property
    def _more_to_come(self) -> bool:
        return self.connection.their_state in (h11.IDLE, h11.SEND_BODY, h11.ERROR)

    @property
    def request_waits(self) -> bool:
        return bool(self.connection.trailing_data[0])

    # -- from the client --------------------------------------------------------------------------

    async def handle(self, event: Event) -> None:
        match event:
            case RawData(data=data):
                self.connection.receive_data(data)
                await self._handle_events()
            case Closed():
                await self._close_stream()

    async def _handle_events(self) -> None:
        """Handle received events; a request blocks until the response is sent."""
        while True:
            if self.connection.they_are_waiting_for_100_continue:
                headers = self.config.response_headers("h11")
                await self._send_event(h11.InformationalResponse(status_code=100, headers=headers))
            try:
                event = await self._next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse_invalid(error)
                return
            if isinstance(event, h11.Request):
                await self._send(Updated(idle=False))
                if not (self._requests or _is_for_health(event)):
                    await self._begin()
                if (problem := self._refusal(event)) is not None:
                    await self._send_problem(problem)
                    await self._send(Closed())
                    return
                await self._begin_request(event)
            elif event is h11.PAUSED:
                self._may_read = trio.Event()
                await self._may_read.wait()
            elif isinstance(event, h11.EndOfMessage) and self._stream is not None:
                await self._stream.handle(stream_events.EndBody(stream_id=STREAM_ID))
            else:
                return

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        """Return the next event, after the body's received chunks were passed on together."""
        event = self.connection.next_event()
        joined, chunks = bytearray(), 0
        while isinstance(event, h11.Data) and self._stream is not None:
            joined += event.data
            chunks += 1
            # A client may send each byte as a chunk.
            if chunks % CHUNKS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            event = self.connection.next_event()
        if joined and self._stream is not None:
            await self._stream.handle(stream_events.Body(stream_id=STREAM_ID, data=bytes(joined)))
        return event

    async def _refuse_invalid(self, error: h11.RemoteProtocolError) -> None:
        if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            status = error.error_status_hint
            message = REFUSALS.get(status, f"this is no valid request of HTTP/1.1: {error}")
            await self._send_problem(http_problem(status, message, "invalid_http"))
        await self._send(Closed())

    def _refusal(self, request: h11.Request) -> Problem | None:
        if request.http_version[:1] != b"1":
            return NOT_HTTP1
        if (problem := self._excess()) is None:
            return None
        self._ends = True
        return None if _is_for_health(request) else problem

    async def _begin_request(self, request: h11.Request) -> None:
        self._stream = HTTPStream(
            **self._stream_arguments, send=self._send_response, stream_id=STREAM_ID
        )
        await self._stream.handle(
            stream_events.Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self._state,
            )
        )
        self._requests += 1
        await self.context.mark_request()

    # -- to the client ----------------------------------------------------------------------------

    async def _send_response(self, event: stream_events.Event) -> None:
        match event:
            case stream_events.Response():
                headers = [*event.headers, *self.config.response_headers("h11")]
                await self._send_head(event.status_code, headers)
            case stream_events.Body(data=data):
                await self._send_event(h11.Data(data=data))
            case stream_events.EndBody():
                await self._send_event(h11.EndOfMessage())
            case stream_events.StreamClosed():
                await self._end_request()

    async def _send_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if await self._closes() or self._requests >= self.config.keep_alive_max_requests:
            headers.append((b"connection", b"close"))
        await self._send_event(h11.Response(status_code=status, headers=headers))

    async def _send_event(self, event: H11SendableEvent) -> None:
        """Send an event. A head with a length waits for the body, for a single write."""
        try:
            data = self.connection.send(event) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        if len(data) > MAX_JOINED:
            await self._send_held()
        elif type(event) is h11.Response and any(
            name == b"content-length" for name, _ in event.headers
        ):
            self._held = data
            return
        held, self._held = self._held, b""
        if held or data:
            await self._send(RawData(data=held + data))

    async def _closes(self) -> bool:
        """Whether this response ends the connection. A received body is read first."""
        for _ in range(STEPS_OF_A_BODY):
            if self.connection.their_state is not h11.SEND_BODY:
                break
            await trio.lowlevel.checkpoint()
        return self._ends or self._more_to_come or bool(self.context.terminated.is_set())

    async def _send_held(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            await self._send(RawData(data=held))

    async def _end_request(self) -> None:
        await self._send_held()  # The app has failed before the body.
        await self._close_stream()
        done = self.connection.our_state is h11.DONE and self.connection.their_state is h11.DONE
        if done and not self.context.terminated.is_set():
            self.connection.start_next_cycle()
            self._may_read.set()
            await self._send(Updated(idle=True))
        else:
            self._may_read.set()
            await self._send(Closed())

    async def _close_stream(self) -> None:
        if self._stream is not None:
            await self._stream.handle(stream_events.StreamClosed(stream_id=STREAM_ID))
            self._stream = None

    async def _send_problem(self, problem: Problem) -> None:
        self._ends = True
        body = msgspec.json.encode(error_body(problem))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self.config.response_headers("h11"),
        ]
        if problem.retry_after_s is not None:
            headers.append((b"retry-after", str(problem.retry_after_s).encode()))
        await self._send_head(problem.status, headers)
        await self._send_event(h11.Data(data=body))
        await self._send_event(h11.EndOfMessage())
