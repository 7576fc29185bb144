"""The listening server. At the limit, a connection without a request gives way to a new one. If all
have requests, a few more are accepted for health and refusals. Under a crowd, first requests begin
one by one, health first."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ASGIFramework
from hypercorn.utils import wrap_app

from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import Models
from trouper.protocol.problems import SYSTEM_SHORTAGE, Problem, SettingsInvalid, is_shortage
from trouper.protocol.settings import ServerSettings
from trouper.web.app import create_app
from trouper.web.http.connections import (
    AT_ONCE,
    RESERVED,
    accept_now,
    answer_probe,
    connection_limit,
    in_order_of_leaving,
    is_spare,
)
from trouper.web.http.guard import Connection
from trouper.web.observability.exchange import ExchangeObserver
from trouper.web.observability.request_log import RequestObserver

log = logging.getLogger("trouper.web")

LAST_BYTES_S = 1.0
"""Time for the last writes at shutdown, after the runtime has drained."""


CROWD = 64
"""Open connections beyond which new ones begin one by one."""


async def serve_http(
    models: Runtime | Models,
    settings: ServerSettings,
    *,
    shutdown: trio.Event,
    observers: Sequence[RequestObserver] = (),
    exchange_observers: Sequence[ExchangeObserver] = (),
    clock: Callable[[], float] = trio.current_time,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `shutdown`, then end within two seconds. Started with the URLs. `observers`,
    `exchange_observers` and `clock` are `create_app`'s. Raises `SettingsInvalid` for a taken port,
    a key that cannot be sent, or a name without effect."""
    listeners = await _listen(settings)
    with ExitStack() as owned:
        for listener in listeners:
            owned.callback(listener.socket.close)
        async with trio.open_nursery() as background:
            app = create_app(
                models,
                settings,
                background,
                observers,
                clock,
                exchange_observers=exchange_observers,
            )
            background.start_soon(app.delivery.run)
            await _serve(app, listeners, settings, shutdown, task_status, direct=True)
            # A drained runtime has ended this work already; nothing outlives the server.
            background.cancel_scope.cancel()


async def serve_app(
    app: ASGIFramework,
    settings: ServerSettings,
    *,
    shutdown: trio.Event,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an app that mounts `create_app`'s. Only the address and the connection limits of
    `settings` count. The app gets no lifespan events."""
    await _serve(app, await _listen(settings), settings, shutdown, task_status)


async def _serve(
    app: ASGIFramework,
    listeners: list[trio.SocketListener],
    settings: ServerSettings,
    shutdown: trio.Event,
    task_status: trio.TaskStatus[list[str]],
    *,
    direct: bool = False,
) -> None:
    """`direct` is `Connection`'s; only for an app that is all ours."""
    config = Config()
    config.h11_max_incomplete_size = 64 * 1024
    # Without it Hypercorn adds a handler of its own; the program sets up logging.
    config.errorlog = log
    config.include_server_header = False
    server = _Server(
        wrap_app(app, config.wsgi_max_body_size, "asgi"), config, settings, direct=direct
    )
    async with trio.open_nursery() as connections, trio.open_nursery() as accepting:
        for listener in listeners:
            accepting.start_soon(server.accept, listener, connections)
        connections.start_soon(server.cut_when_cancelled)
        urls = dict.fromkeys(_url(settings.host, listener) for listener in listeners)
        task_status.started([*urls])
        await shutdown.wait()
        accepting.cancel_scope.cancel()
        connections.start_soon(partial(server.finish, connections.cancel_scope))


TOO_MANY_CONNECTIONS = Problem(
    503,
    "all connections that --max-connections allows have requests in progress; try again soon",
    "server_error",
    code="too_many_connections",
    retry_after_s=1,
)


class _Server:
    def __init__(
        self, app: AppWrapper, config: Config, settings: ServerSettings, *, direct: bool = False
    ) -> None:
        self._app, self._config, self._settings, self._direct = app, config, settings, direct
        self._context = WorkerContext(None)
        self._open: set[Connection] = set()
        self._on_spare: set[Connection] = set()
        self._left = trio.lowlevel.ParkingLot()
        self._turn = trio.Lock()
        self._limit, lowered = connection_limit(settings.max_connections)
        if lowered:
            log.warning("%s", lowered)

    async def accept(
        self, listener: trio.abc.Listener[trio.SocketStream], connections: trio.Nursery
    ) -> None:
        async with listener:
            while True:
                await self._wait_for_reserve()
                self._take(await self._accepted(listener), connections)
                self._take_waiting(listener, connections)

    async def _accepted(self, listener: trio.abc.Listener[trio.SocketStream]) -> trio.SocketStream:
        """Accept one client, as soon as descriptors and memory permit."""
        fault = ""
        while True:
            try:
                return await listener.accept()
            except OSError as error:
                if not _passes(error):
                    raise
                if fault != (fault := str(error)):
                    log.warning("cannot accept connections, which is tried again: %s", error)
                if not self._give_way():
                    await trio.sleep(0.1)

    async def _wait_for_reserve(self) -> None:
        """Wait until a connection of the reserve, too, is free, or gives way."""
        while self._is_full():
            if not self._give_way():
                await self._left.park()

    def _take_waiting(
        self, listener: trio.abc.Listener[trio.SocketStream], connections: trio.Nursery
    ) -> None:
        """Accept the connections queued behind the last one, perhaps a supervisor's."""
        for _ in range(AT_ONCE):
            if self._is_full() or (client := accept_now(listener)) is None:
                return
            headers = self._config.response_headers("h11")
            if self._direct and self._is_crowded() and answer_probe(client, headers):
                continue
            self._take(trio.SocketStream(trio.socket.from_stdlib_socket(client)), connections)

    def _is_crowded(self) -> bool:
        return len(self._open) > CROWD

    async def _begin(self) -> None:
        """Wait for the turn of a connection's first request. A crowd begins one per run of the
        event loop, between streams and health."""
        if self._is_crowded():
            async with self._turn:
                await trio.lowlevel.checkpoint()

    def _is_full(self) -> bool:
        return len(self._open) >= self._limit + RESERVED or len(self._on_spare) >= RESERVED

    def _take(self, stream: trio.SocketStream, connections: trio.Nursery) -> None:
        is_last = is_spare(stream.socket.fileno())
        gave_way = (is_last or len(self._open) >= self._limit) and self._give_way()
        on_spare = is_last and not gave_way
        connection = Connection(
            self._app,
            self._config,
            self._context,
            self._settings,
            stream,
            direct=self._direct,
            excess=(lambda: SYSTEM_SHORTAGE) if on_spare else self._excess,
            begin=self._begin,
            idled=self._left.unpark_all,
        )
        self._open.add(connection)
        if on_spare:
            self._on_spare.add(connection)
        connections.start_soon(self._hold, connection)

    def _give_way(self) -> bool:
        for connection in in_order_of_leaving(self._open):
            if connection.give_way():
                self._forget(connection)
                return True
        return False

    def _excess(self) -> Problem | None:
        if len(self._open) <= self._limit:
            return None
        busy = sum(connection.idle_since is None for connection in self._open)
        return TOO_MANY_CONNECTIONS if busy > self._limit else None

    async def _hold(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            connection.cut()
            self._forget(connection)
            self._left.unpark_all()

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._on_spare.discard(connection)

    async def cut_when_cancelled(self) -> None:
        """Close all sockets when the server is cancelled: nothing else ends a response's shielded
        last write."""
        try:
            await trio.sleep_forever()
        finally:
            self._cut()

    def _cut(self) -> None:
        for connection in tuple(self._open):
            connection.cut()

    async def finish(self, scope: trio.CancelScope) -> None:
        """Close idle connections now, busy ones after the response, and all at the end of the time
        limit."""
        await self._context.terminated.set()
        for connection in tuple(self._open):
            connection.retire()
        with trio.move_on_after(LAST_BYTES_S):
            while self._open:  # noqa: ASYNC110 - a second at most, once in a server's life
                await trio.sleep(0.01)
        self._cut()
        scope.cancel()


def _passes(error: OSError) -> bool:
    return is_shortage(error) or error.errno in (errno.ECONNABORTED, errno.EPROTO)


async def _listen(settings: ServerSettings) -> list[trio.SocketListener]:
    connection_limit(settings.max_connections)
    try:
        if settings.host not in ("127.0.0.1", "localhost"):
            return await trio.open_tcp_listeners(settings.port, host=settings.host, backlog=1024)
        listeners = await trio.open_tcp_listeners(settings.port, host="127.0.0.1", backlog=1024)
        return [*listeners, *await _listen_at_ipv6(listeners[0])]
    except OSError as error:
        raise SettingsInvalid(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; choose "
            "another --port or --host"
        ) from None


async def _listen_at_ipv6(listener: trio.SocketListener) -> list[trio.SocketListener]:
    """Listen at ::1 too: some clients try no other address of localhost."""
    port = listener.socket.getsockname()[1]
    try:
        return await trio.open_tcp_listeners(port, host="::1", backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            log.warning(
                "another program listens on [::1]:%d: clients that ask localhost may reach it; "
                "http://127.0.0.1:%d is this server",
                port,
                port,
            )
        return []  # Most others have no IPv6.


def _url(host: str, listener: trio.SocketListener) -> str:
    port = listener.socket.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"
