"""A connection that can fail or stall without hurting its siblings.

Hypercorn's connection handlers share a nursery in which only OSError is caught, writes are shielded
without a deadline, and timers depend on events that Quart-Trio cancels. Here one client can neither
end the server nor hold its shutdown:

- whatever a connection raises ends that connection only (late h2c DATA, an upgrade with a trailing byte);
- HTTP/1.1 only: `Upgrade` is ignored, as RFC 9110 (7.8) allows, and an HTTP/2 preface is refused. An LLM
  stream gains nothing from either, and both let a client crash or wedge the handlers;
- one clock a connection: for a request's head, for idling between requests, and for each write;
- at shutdown idle connections end at once, busy ones after their response, stalled ones when their socket closes.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from socket import SHUT_WR

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

from trouper.protocol.settings import ServerSettings

log = logging.getLogger("trouper.web")
MAX_RECEIVE = 2**16


class NotHttp1(Exception):
    """The client speaks HTTP/2 without having been asked to."""


class PlainHttp(H11Protocol):
    """HTTP/1.1 without upgrades."""

    async def handle(self, event: Event) -> None:
        try:
            await super().handle(event)
        except NotHttp1:
            await self._send_error_response(505)
            await self.send(Closed())

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.http_version[:1] != b"1":
            raise NotHttp1

    async def _create_stream(self, request: h11.Request) -> None:
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        await super()._create_stream(
            h11.Request(
                method=request.method, target=request.target, headers=headers, http_version=request.http_version
            )
        )


class Connection:
    """One client. `run` returns when it is over, whatever happened."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        settings: ServerSettings,
        stream: trio.SocketStream,
    ) -> None:
        self._app, self._config, self._context, self._settings = app, config, context, settings
        self._stream = stream
        self._send_lock = trio.Lock()
        self._lifetime = trio.CancelScope()
        self._patience = trio.CancelScope()
        self._idle = True
        self._fresh = True
        """Between requests: the next byte begins a head."""

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
        state = ConnectionState({})
        async with TaskGroup() as group:
            self._protocol = PlainHttp(
                self._app, self._config, self._context, group, state, False, client, server, self._send
            )
            self._wait_at_most(self._settings.header_timeout_s)
            with self._patience:
                await self._read()
            await self._protocol.handle(Closed())
            self._close()

    async def _read(self) -> None:
        while True:
            try:
                data = await self._stream.receive_some(MAX_RECEIVE)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if self._idle and self._fresh:
                self._fresh = False
                self._wait_at_most(self._settings.header_timeout_s)
            await self._protocol.handle(RawData(bytes(data)))
            if not data:
                return

    def _wait_at_most(self, seconds: float) -> None:
        self._patience.deadline = trio.current_time() + seconds

    async def _send(self, event: Event) -> None:
        """What the protocol tells its transport."""
        match event:
            case RawData(data=data):
                await self._write(data)
            case Updated(idle=idle):
                self._idle = self._fresh = idle
                self._wait_at_most(self._settings.keep_alive_timeout_s if idle else float("inf"))
                if idle and self._context.terminated.is_set():
                    self._patience.cancel()
            case Closed():
                self._close()
                await self._protocol.handle(Closed())

    async def _write(self, data: bytes) -> None:
        """All of it within the timeout, or the connection is over: the peer is gone or reads nothing, and only
        cancelling everything ends a reader that h11 has paused."""
        async with self._send_lock:
            with trio.move_on_after(self._settings.write_timeout_s):
                try:
                    await self._stream.send_all(data)
                    return
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                except trio.Cancelled:
                    self._lifetime.cancel()
                    raise
        self._lifetime.cancel()

    def _close(self) -> None:
        """Say goodbye, then close. Synchronous: trio's send_eof would collide with a write in progress."""
        with suppress(OSError):
            self._stream.socket.shutdown(SHUT_WR)
        self.cut()

    def retire(self) -> None:
        """The server is closing: an idle connection ends now, a busy one after its response."""
        if self._idle:
            self._patience.cancel()

    def cut(self) -> None:
        """Close the socket, which also ends a write that nobody reads. Synchronous, idempotent."""
        self._stream.socket.close()
