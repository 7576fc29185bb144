"""A connection that can fail or stall without hurting its siblings.

Hypercorn's connection handlers share a nursery in which only OSError is caught, writes are shielded
without a deadline, and timers depend on events that Quart-Trio cancels. Here one client can neither
end the server nor hold its shutdown:

- whatever a connection raises ends that connection only (late h2c DATA, an upgrade with a trailing
  byte);
- the socket is read also while the protocol pauses (behind pipelined bytes, or an `Upgrade` that
  h11 thinks about), so that a client which leaves is noticed whatever it sent before;
- heads that a proxy may read otherwise are refused (see `StrictHttp`);
- HTTP/1.1 only: `Upgrade` is ignored, as RFC 9110 (7.8) allows, and an HTTP/2 preface is refused.
  An LLM stream gains nothing from either, and both let a client crash or wedge the handlers;
- one clock a connection, for a request's head and for idling between requests; another for each
  write;
- a client that is still sending when it is refused can read why: what it sends is read and dropped
  for a moment, because closing a socket with unread bytes resets it, which can cost the client the
  response;
- each response behind which the server closes says `Connection: close`, so that no request is lost;
- a connection without a request gives way where there are too many (see `trouper.web.server`);
- at shutdown idle connections end at once, busy ones after their response, stalled ones when their
  socket closes.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from socket import SHUT_WR
from typing import Any

import h11
import msgspec
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState, H11SendableEvent
from hypercorn.utils import parse_socket_addr

from trouper.protocol.problems import Problem
from trouper.protocol.settings import ServerSettings
from trouper.web.http.connection_order import network_of
from trouper.web.http.socket_writer import SocketWriter
from trouper.web.http.strict_http import StrictHttp
from trouper.web.openai.errors import error_body, http_problem

log = logging.getLogger("trouper.web")
MAX_RECEIVE = 2**16
MAX_JOINED = 2**16
"""Number of bytes of a body beyond which it is not copied behind its head."""
MAX_PIPELINED = 16
"""Maximum number of reads that wait behind a response; a client that sends more does not pipeline
but floods."""
LINGER_S = 5.0
"""Time for which a client that is refused may go on sending."""
STEPS_OF_A_BODY = 8
"""Runs of the event loop in which the rest of a small body is read, before a response that did not
wait for it."""
REFUSALS = {431: "the head of the request is too large"}
"""Why a request is refused before an app sees it, by the status."""
HEALTH_PATHS = ("/livez", "/readyz")
"""Paths that a supervisor asks: answered also beyond --max-connections, and without a turn."""
WRITER = "trouper.writer"
"""Key of the connection's `SocketWriter` in the state of a request, where its app may write
directly."""


NOT_HTTP1 = http_problem(505, "this is not HTTP/1.1", "invalid_http")


class Refused(Exception):
    """A request is refused before the app sees it, and the connection ends."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class PlainHttp(H11Protocol):
    """An HTTP/1.1 protocol without upgrades."""

    def __init__(
        self,
        *,
        excess: Callable[[], Problem | None],
        begin: Callable[[], Awaitable[None]],
        **parts: Any,
    ) -> None:
        """`excess`: returns the refusal of the request at hand if it is one too many. `begin`: is
        awaited before the first request, except one for health. `parts`: as for `H11Protocol`."""
        super().__init__(**parts)
        self.connection = StrictHttp(h11.SERVER, self.config.h11_max_incomplete_size)
        self._excess, self._begin = excess, begin
        self._ends = False
        """Whether the connection ends with the next response."""
        self._held = b""
        """What goes out with what is sent next: the head of a response whose body comes at once, or
        the last events of a stream."""

    @property
    def listening(self) -> bool:
        """Whether the client's next bytes belong to the request at hand, or begin one."""
        return self.connection.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def is_interrupted(self) -> bool:
        """Whether the client may be sending: more of a request, invalid data, or another
        request."""
        return self._ends or self._more_to_come or self.request_waits

    @property
    def _more_to_come(self) -> bool:
        return self.connection.their_state in (h11.IDLE, h11.SEND_BODY, h11.ERROR)

    @property
    def request_waits(self) -> bool:
        """Whether bytes of another request came after the last one."""
        return bool(self.connection.trailing_data[0])

    async def handle(self, event: Event) -> None:
        try:
            await super().handle(event)
        except Refused as refused:
            await self._send_problem(refused.problem)
            await self.send(Closed())

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        """Send an event. The head of a response that has a length waits for the body, so that both
        are one write, and so does what the app says that something follows at once
        (`SocketWriter.more_follows`)."""
        if type(event) is h11.Response and await self._closes():
            headers = [*event.headers, (b"connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers)
        try:
            data = self.connection.send(event) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        if len(data) > MAX_JOINED:
            await self._send_held()
        elif self._takes_more_follows() or (
            type(event) is h11.Response
            and any(name == b"content-length" for name, _ in event.headers)
        ):
            self._held += data
            return
        held, self._held = self._held, b""
        if held or data:
            await self.send(RawData(data=held + data))

    async def _closes(self) -> bool:
        """Whether the server closes the connection behind the response that begins now. A body that
        has come is read first."""
        for _ in range(STEPS_OF_A_BODY):
            if self.connection.their_state is not h11.SEND_BODY:
                break
            await trio.lowlevel.checkpoint()
        return self._ends or self._more_to_come or bool(self.context.terminated.is_set())

    def _takes_more_follows(self) -> bool:
        """Whether the app has said that something follows at once, of what is sent now."""
        writer: SocketWriter | None = self.connection_state.get(WRITER)
        if writer is None or not writer.more_follows:
            return False
        writer.more_follows = False
        return True

    async def _send_held(self) -> None:
        """Send what waits for what comes next, if anything does."""
        if self._held:
            held, self._held = self._held, b""
            await self.send(RawData(data=held))

    async def _maybe_recycle(self) -> None:
        await self._send_held()  # The app has failed before the body.
        await super()._maybe_recycle()

    async def _send_error_response(self, status_code: int) -> None:
        error = sys.exception()  # Hypercorn calls this where it has caught it.
        why = f": {error}" if isinstance(error, h11.RemoteProtocolError) else ""
        message = REFUSALS.get(status_code, f"this is no valid request of HTTP/1.1{why}")
        await self._send_problem(http_problem(status_code, message, "invalid_http"))

    async def _send_problem(self, problem: Problem) -> None:
        """Send an error of this layer, behind which the connection ends."""
        self._ends = True
        body = msgspec.json.encode(error_body(problem))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self.config.response_headers("h11"),
        ]
        if problem.retry_after_s is not None:
            headers.append((b"retry-after", str(problem.retry_after_s).encode()))
        await self._send_h11_event(h11.Response(status_code=problem.status, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.http_version[:1] != b"1":
            raise Refused(NOT_HTTP1)
        for_health = event.target.partition(b"?")[0].decode("latin-1") in HEALTH_PATHS
        if not (for_health or self.keep_alive_requests):
            await self._begin()
        if (problem := self._excess()) is not None:
            self._ends = True
            if not for_health:
                raise Refused(problem)

    async def _create_stream(self, request: h11.Request) -> None:
        if any(name.lower() == b"upgrade" for name, _ in request.headers.raw_items()):
            headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
            request = h11.Request(
                method=request.method,
                target=request.target,
                headers=headers,
                http_version=request.http_version,
            )
        await super()._create_stream(request)


class Connection:
    """The connection of one client. `run` returns when it is over, whatever happened."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        settings: ServerSettings,
        stream: trio.SocketStream,
        *,
        direct: bool = False,
        excess: Callable[[], Problem | None] = lambda: None,
        begin: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """`direct`: the app may write chunks of a response's body around the layers between
        (`SocketWriter.write_now`). `excess`, `begin`: as for `PlainHttp`."""
        self._direct, self._excess, self._begin = direct, excess, begin
        self._app, self._config, self._context, self._settings = app, config, context, settings
        self._stream = stream
        self._lifetime = trio.CancelScope()
        self._writer = SocketWriter(stream, settings.write_timeout_s, self._lifetime.cancel)
        self._patience = trio.CancelScope()
        self._idle, self._since = True, trio.current_time()
        self._fresh = True
        """Whether the connection is between requests: the next byte begins a head."""
        self._unhandled = 0
        """Reads that the protocol has not handled yet."""
        self._lingers = False
        """Whether the last response was sent; what the client still sends is read and dropped."""
        self.network = _network(stream)
        """As in `network_of`."""

    @property
    def idle_since(self) -> float | None:
        """Time since which no request is in progress, or a part of a head is all there is of one;
        None: one is in progress. Bytes of a head that goes on make nothing younger."""
        return self._since if self._lingers or (self._idle and not self._unhandled) else None

    async def run(self) -> None:
        with self._lifetime:
            try:
                await self._serve()
            except* OSError:
                pass
            except* Exception:
                log.exception("a connection failed; the others go on")
        self.cut()

    async def _serve(self) -> None:
        socket = self._stream.socket
        client = parse_socket_addr(socket.family, socket.getpeername())
        server = parse_socket_addr(socket.family, socket.getsockname())
        state = ConnectionState({WRITER: self._writer} if self._direct else {})
        async with TaskGroup() as group:
            self._protocol = PlainHttp(
                app=self._app,
                config=self._config,
                context=self._context,
                task_group=group,
                connection_state=state,
                excess=self._excess,
                begin=self._begin,
                ssl=False,
                client=client,
                server=server,
                send=self._send,
            )
            self._wait_at_most(self._settings.header_timeout_s)
            with self._patience:
                await self._converse()
            await self._protocol.handle(Closed())
            self._close()

    async def _converse(self) -> None:
        heard, hearing = trio.open_memory_channel[bytes](MAX_PIPELINED)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, heard)
            with hearing:
                async for data in hearing:
                    await self._protocol.handle(RawData(data))
                    self._unhandled -= 1

    async def _listen(self, heard: trio.MemorySendChannel[bytes]) -> None:
        """Wait until the client disconnects or ends its sending side (treated alike): then no
        response is worth waiting for."""
        with heard:
            while data := await self._receive():
                if self._lingers:
                    continue
                if self._idle and self._fresh:
                    self._fresh = False
                    self._wait_at_most(self._settings.header_timeout_s)
                self._unhandled += 1
                try:
                    heard.send_nowait(data)
                except trio.WouldBlock:
                    if not self._protocol.listening:
                        break
                    await heard.send(data)
        self._patience.cancel()

    async def _receive(self) -> bytes:
        """Return what has come; empty: the client has ended its sending side, or disconnected.
        Trio's own would hold what it has read while other tasks run, who would take the connection
        for an idle one."""
        while self._stream.socket.fileno() >= 0:  # It may have given way.
            try:
                await trio.lowlevel.wait_readable(self._stream.socket)
                return os.read(self._stream.socket.fileno(), MAX_RECEIVE)
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                break
        return b""

    def _wait_at_most(self, seconds: float) -> None:
        self._patience.deadline = trio.current_time() + seconds

    async def _send(self, event: Event) -> None:
        """Handle an event that the protocol sends to its transport."""
        match event:
            case RawData(data=data):
                await self._writer.write(data)
            case Updated(idle=idle):
                self._update(idle=idle)
            case Closed():
                self._finish()
                await self._protocol.handle(Closed())

    def _update(self, *, idle: bool) -> None:
        self._idle = idle
        if not idle:
            self._wait_at_most(inf)
            return
        self._since = trio.current_time()
        self._fresh = not self._protocol.request_waits
        self._wait_at_most(
            self._settings.keep_alive_timeout_s if self._fresh else self._settings.header_timeout_s
        )
        if self._context.terminated.is_set():
            self._patience.cancel()

    def _finish(self) -> None:
        """Finish after the protocol's last event: close, or first let a client that is still
        sending read the response."""
        if not self._protocol.is_interrupted or self._context.terminated.is_set():
            self._close()
            return
        self._lingers, self._since = True, trio.current_time()
        with suppress(OSError):
            self._stream.socket.shutdown(SHUT_WR)
        self._wait_at_most(LINGER_S)

    def _close(self) -> None:
        """Shut down the sending side, then close, unless that was done. Synchronous: trio's
        send_eof would collide with a write in progress."""
        if self._stream.socket.fileno() < 0:
            return
        with suppress(OSError):
            self._stream.socket.shutdown(SHUT_WR)
        self.cut()

    def retire(self) -> None:
        """Retire the connection because the server is closing: an idle one ends now, a busy one
        after its response."""
        if self._idle or self._lingers:
            self._patience.cancel()

    def give_way(self) -> bool:
        """Close the connection if no request is in progress. Returns whether it was closed: a
        request may have come that nobody has read."""
        if self.idle_since is None or (not self._lingers and self._has_unread()):
            return False
        self._patience.cancel()
        self._close()
        return True

    def _has_unread(self) -> bool:
        """Whether the socket has bytes, or the end of them."""
        if (descriptor := self._stream.socket.fileno()) < 0:
            return False
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        return bool(ready.poll(0))

    def cut(self) -> None:
        """Close the socket, which also ends a write that the client does not read. Synchronous and
        idempotent."""
        self._stream.socket.close()


def _network(stream: trio.SocketStream) -> str:
    """Return the client's network; empty if it has disconnected."""
    try:
        return network_of(str(stream.socket.getpeername()[0]))
    except OSError:
        return ""
