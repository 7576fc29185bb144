"""A connection whose faults and stalls hurt neither others nor the shutdown."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from socket import SHUT_WR

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

from trouper.protocol.problems import Problem
from trouper.protocol.settings import ServerSettings
from trouper.web.http.connections import network_of
from trouper.web.http.plain_http import WRITER, PlainHttp
from trouper.web.http.socket_writer import SocketWriter

log = logging.getLogger("trouper.web")
MAX_RECEIVE = 2**16
MAX_PIPELINED = 16  # Reads that may wait behind a response; more is a flood.
# Time for which a refused client's bytes are dropped: closing a socket with unread bytes would
# reset the connection and lose the response.
LINGER_S = 5.0


class Connection:
    """A client's connection. An exception ends only this one."""

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
        idled: Callable[[], object] = lambda: None,
    ) -> None:
        """`direct`: the app may write body chunks (`SocketWriter.write_now`). `excess`, `begin`: as
        for `PlainHttp`. `idled` is called after each request."""
        self._direct, self._excess, self._begin, self._idled = direct, excess, begin, idled
        self._app, self._config, self._context, self._settings = app, config, context, settings
        self._stream = stream
        self._lifetime = trio.CancelScope()
        self._writer = SocketWriter(stream, settings.write_timeout_s, self._lifetime.cancel)
        # One clock runs for a request's head and for idling, another (the writer's) for each write.
        self._patience = trio.CancelScope()
        self._idle, self._since = True, trio.current_time()
        self._fresh = True
        self._unhandled = 0
        self._lingers = False
        """Whether the last response was sent; further bytes are dropped."""
        self.network = _network(stream)

    @property
    def idle_since(self) -> float | None:
        """Time since the last request; None during a request."""
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
        with suppress(AttributeError):
            del self._protocol  # Each refers to the other.

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
        """Read until the client disconnects or ends the sending side."""
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
        self._idled()
        self._fresh = not self._protocol.request_waits
        self._wait_at_most(
            self._settings.keep_alive_timeout_s if self._fresh else self._settings.header_timeout_s
        )
        if self._context.terminated.is_set():
            self._patience.cancel()

    def _finish(self) -> None:
        if not self._protocol.is_interrupted or self._context.terminated.is_set():
            self._close()
            return
        self._lingers, self._since = True, trio.current_time()
        self._idled()
        with suppress(OSError):
            self._stream.socket.shutdown(SHUT_WR)
        self._wait_at_most(LINGER_S)

    def _close(self) -> None:
        """Shut down the sending side, then close. Synchronous: Trio's send_eof would collide with a
        write."""
        if self._stream.socket.fileno() < 0:
            return
        with suppress(OSError):
            self._stream.socket.shutdown(SHUT_WR)
        self.cut()

    def retire(self) -> None:
        """Close an idle connection now, a busy one after the response."""
        if self._idle or self._lingers:
            self._patience.cancel()

    def give_way(self) -> bool:
        """Close the connection unless a request is in progress or waits unread. Returns whether
        closed."""
        if self.idle_since is None or (not self._lingers and self._has_unread()):
            return False
        self._patience.cancel()
        self._close()
        return True

    def _has_unread(self) -> bool:
        if (descriptor := self._stream.socket.fileno()) < 0:
            return False
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        return bool(ready.poll(0))

    def cut(self) -> None:
        """Close the socket, ending also a stalled write. Synchronous and idempotent."""
        self._stream.socket.close()


def _network(stream: trio.SocketStream) -> str:
    try:
        return network_of(str(stream.socket.getpeername()[0]))
    except OSError:
        return ""
