"""Connections beyond --max-connections: who gives way, who is refused, and the limit on open
files."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any, cast

import attrs
import pytest
import trio
import trio.testing
from hypercorn.config import Config

from tests.fakes import FakeEngine
from tests.web.serving import (
    PATIENCE_S,
    STREAM,
    Served,
    ask,
    eventually,
    exchange,
    get,
    post,
    receive_all,
    serving,
)
from trouper import ServerSettings, SettingsInvalid
from trouper.protocol.plans import Plan
from trouper.web import server
from trouper.web.http import connections
from trouper.web.http.connections import (
    RESERVED,
    SPARE,
    answer_to,
    connection_limit,
    in_order_of_leaving,
    network_of,
)
from trouper.web.server import _Server

KEPT = get("/livez").replace(b"Connection: close\r\n", b"")


@attrs.frozen
class Held:
    name: str
    network: str
    idle_since: float | None


def test_who_holds_most_leaves_first_and_among_these_the_longest_idle() -> None:
    held = [
        Held("old", "a", 1),
        Held("b3", "b", 9),
        Held("b1", "b", 2),
        Held("busy", "b", None),
        Held("b2", "b", 5),
        Held("new", "c", 7),
    ]
    assert [one.name for one in in_order_of_leaving(held)] == ["b1", "b2", "b3", "old", "new"]


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:0db8:0001:0002"),
        ("fe80::1%eth0", "fe80:0000:0000:0000"),
        ("", ""),
    ],
)
def test_an_address_of_ipv6_counts_by_its_network(address: str, network: str) -> None:
    """A client of IPv6 has as many addresses as it wants."""
    assert network_of(address) == network


async def all_idle(served: Served, connections: list[trio.SocketStream], half: bytes) -> None:
    """Make the server handle one request of each, and receive the beginning of another."""
    for connection in connections:
        await connection.send_all(KEPT)
        assert b'"alive"' in await connection.receive_some()
        if half:
            await connection.send_all(half)


@pytest.mark.parametrize("half", [b"", b"GET /livez HTTP/1.1\r\nHost: loc"])
async def test_the_longest_idle_gives_way_to_a_new_one(half: bytes) -> None:
    """Also one whose next head does not come to its end, however new its last byte is."""
    async with serving(max_connections=3, header_timeout_s=60) as served, AsyncExitStack() as stack:
        held = [await stack.enter_async_context(await served.connect()) for _ in range(3)]
        await all_idle(served, held, half)
        assert (await exchange(served, get("/livez")))[0] == 200
        assert await receive_all(held[0]) == b""
        for connection in held[1:]:
            rest = b"alhost\r\n\r\n" if half else KEPT
            await connection.send_all(rest)
            assert b'"alive"' in await connection.receive_some()


async def test_silent_ones_give_way() -> None:
    """Hundreds that never send a byte, each accepted at once, and still one more client is
    answered."""
    async with serving(max_connections=20) as served, AsyncExitStack() as stack:
        for _ in range(200):
            await stack.enter_async_context(await served.connect())
        assert (await exchange(served, get("/livez")))[0] == 200
        assert served.connections <= 20


async def test_those_that_give_way_before_they_began_are_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(max_connections=2) as served:
        silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(30)]
        assert (await exchange(served, get("/livez")))[0] == 200
        for one in silent:
            one.close()
    assert "a connection failed" not in caplog.text


@asynccontextmanager
async def all_busy(
    count: int, spare: int = 0
) -> AsyncIterator[tuple[Served, list[trio.SocketStream]]]:
    """As many connections as there may be, or `spare` fewer, each with a request that waits for the
    engine."""
    still = trio.Event()

    async def before(_: Plan) -> None:
        await still.wait()

    engine = FakeEngine(before_step=before)
    async with serving(engine, max_connections=count + spare) as served, AsyncExitStack() as stack:
        held = [await stack.enter_async_context(await served.connect()) for _ in range(count)]
        for connection in held:
            await connection.send_all(post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        await eventually(lambda: served.busy == count)
        try:
            yield served, held
        finally:
            still.set()


async def test_where_all_have_requests_health_is_answered_and_others_are_refused() -> None:
    async with all_busy(2) as (served, _):
        for _ in range(2 * RESERVED):
            async with await served.connect() as client:  # Keeps its connection, if it may.
                await client.send_all(KEPT.replace(b"livez", b"readyz"))
                assert b"connection: close" in (answer := (await receive_all(client)).lower())
                assert answer.startswith(b"http/1.1 200")
        status, headers, body = await exchange(served, post("/v1/completions", STREAM))
        assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
        assert b'"code":"too_many_connections"' in body and b"--max-connections" in body
        assert served.busy == 2


async def test_where_only_spare_descriptors_are_left_a_request_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with all_busy(2, spare=10) as (served, _):
        monkeypatch.setattr(server, "is_spare", lambda descriptor: True)
        assert (await exchange(served, get("/livez")))[0] == 200
        await eventually(lambda: served.connections == 2)
        await trio.testing.wait_all_tasks_blocked()  # Otherwise that connection may give way.
        status, headers, body = await exchange(served, post("/v1/completions", STREAM))
        assert (status, headers["connection"]) == (503, "close")
        assert b'"code":"system_shortage"' in body and b"ulimit -n" in body


async def test_a_flood_beyond_busy_connections_does_not_keep_health_out() -> None:
    """Those who come later and are silent, and those who send half of a body, give way, too."""
    async with all_busy(2) as (served, _), AsyncExitStack() as stack:
        for place in range(4 * RESERVED):
            client = await stack.enter_async_context(await served.connect())
            if place % 2:
                await client.send_all(post("/v1/completions", STREAM)[:-10])
        assert (await exchange(served, get("/livez")))[0] == 200
        assert served.busy == 2


async def test_a_place_that_is_free_again_is_given_to_who_waits_in_the_reserve() -> None:
    """What counts are requests in progress, not who came first."""
    async with all_busy(2) as (served, held), await served.connect() as third:
        await held[0].aclose()
        await eventually(lambda: served.connections == 2)
        await trio.testing.wait_all_tasks_blocked()  # The socket is closed before its room is free.
        await third.send_all(KEPT)
        answer = await third.receive_some()
        assert b"200" in answer and b"connection: close" not in answer.lower()


async def test_a_request_that_nobody_has_read_yet_is_not_lost() -> None:
    """Its connection does not give way, as many as come at the same moment."""
    async with serving(max_connections=3) as served, AsyncExitStack() as stack:
        address = ("127.0.0.1", served.port)
        sockets = [socket.create_connection(address) for _ in range(3 + RESERVED)]
        for one in sockets:  # The server runs only when this task waits.
            one.sendall(get("/livez"))
        for one in sockets:
            one.setblocking(False)
            client = trio.SocketStream(trio.socket.from_stdlib_socket(one))
            await stack.enter_async_context(client)
            assert b'"alive"' in await receive_all(client)


async def test_a_burst_of_requests_takes_no_more_than_connections_and_reserve() -> None:
    """None gives way before its request was read."""
    async with all_busy(3) as (served, _), AsyncExitStack() as stack:
        sockets = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(50)]
        for one in sockets:  # The server runs only when this task waits.
            one.sendall(post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        clients = []
        for one in sockets:
            one.setblocking(False)
            client = trio.SocketStream(trio.socket.from_stdlib_socket(one))
            clients.append(await stack.enter_async_context(client))
        for client in clients:
            assert b'"code":"too_many_connections"' in await receive_all(client)
            assert served.connections <= 3 + RESERVED


async def test_a_crowd_needs_no_descriptor_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(max_connections=3) as served, AsyncExitStack() as stack:
        assert (await exchange(served, get("/livez")))[0] == 200
        monkeypatch.setattr(socket, "dup", lambda _: os.dup(-1))
        clients = [await stack.enter_async_context(await served.connect()) for _ in range(3)]
        for client in clients:
            await client.send_all(get("/livez"))
        for client in clients:
            assert b'"alive"' in await receive_all(client)


@asynccontextmanager
async def crowd(count: int, request: bytes) -> AsyncIterator[tuple[list[str], str, int]]:
    """Make so many connections with this request, before the server accepts any. Yields the paths
    that its app is requested, and the server's address."""
    requested = list[str]()

    async def answer(scope: Any, _receive: Any, send: Any, *_: Any) -> None:
        requested.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = _Server(cast(Any, answer), Config(), ServerSettings(), direct=True)
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
    host, port = listener.socket.getsockname()
    with trio.fail_after(PATIENCE_S), ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.create_connection((host, port)))
            client.sendall(request)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.accept, listener, nursery)
            yield requested, host, port
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("path", ["/v1/models", "/livez"])
async def test_a_probe_behind_a_crowd_is_answered_before_it(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Also where others of the crowd ask the same."""
    monkeypatch.setattr(server, "CROWD", 8)
    async with crowd(96, get(path)) as (requested, host, port):
        async with await trio.open_tcp_stream(host, port) as probe:
            await probe.send_all(get("/livez"))
            assert (await receive_all(probe)).startswith(b"HTTP/1.1 20")
        assert len(requested) <= 48


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /livez HTTP/1.1\r\nHost: a\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\nB: c\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nb",
        get("/livez") + get("/livez"),
    ],
)
def test_a_crowd_leaves_to_the_app_what_is_no_plain_probe(request_: bytes) -> None:
    assert answer_to(request_, []) is None


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """A limit on open files of the test's own, soft and hard, for a process that has 10 open."""
    limits = {"now": (256, 256)}

    def set_limit(_: int, pair: tuple[int, int]) -> None:
        limits["now"] = pair

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    monkeypatch.setattr(connections, "open_files", lambda: 10)
    return limits


OTHERS = 10 + SPARE + RESERVED


@pytest.mark.parametrize(
    ("limit", "left", "raised"),
    [
        ((2000, 2000), 1000, 2000),
        ((256, 2000), 1000, 1000 + OTHERS),
        ((256, 512), 512 - OTHERS, 512),
        ((64, 64), 64 - 10 - 16 - RESERVED, 64),
        ((256, resource.RLIM_INFINITY), 1000, 1000 + OTHERS),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000, resource.RLIM_INFINITY),
    ],
)
def test_connections_fit_the_limit_on_open_files(
    limits: dict[str, tuple[int, int]], limit: tuple[int, int], left: int, raised: int
) -> None:
    limits["now"] = limit
    connections, told = connection_limit(1000)
    assert (connections, limits["now"]) == (left, (raised, limit[1]))
    needed = f"--max-connections 1000 needs {1000 + OTHERS} descriptors"
    so_many = f"the limit is {raised}: {left} connections; raise it with ulimit -n {1000 + OTHERS}"
    assert told == ("" if left == 1000 else f"{needed}, {so_many}")


def test_a_limit_without_room_for_any_is_refused(limits: dict[str, tuple[int, int]]) -> None:
    limits["now"] = (24, 24)
    with pytest.raises(SettingsInvalid, match=r"connections 5 .* no room for any; .*ulimit -n"):
        connection_limit(5)


async def test_the_last_descriptors_are_not_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the process runs, whatever else has taken those that were counted on."""
    async with serving(max_connections=50) as served, AsyncExitStack() as stack:
        held = [await stack.enter_async_context(await served.connect()) for _ in range(3)]
        await all_idle(served, held, b"")
        monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
        assert (await exchange(served, get("/livez")))[0] == 200
        assert await receive_all(held[0]) == b""
        monkeypatch.undo()


class NoneLeft(trio.abc.Listener[trio.SocketStream]):
    """Fails as `accept` does when the process has as many files open as it may, until one was
    closed."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self._listener = listener
        self.full = False

    async def accept(self) -> trio.SocketStream:
        if self.full:
            self.full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return await self._listener.accept()

    async def aclose(self) -> None:
        await self._listener.aclose()


async def test_an_idle_connection_gives_way_also_to_one_that_cannot_be_accepted() -> None:
    async def answer(_scope: Any, _receive: Any, send: Any, *_: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = _Server(cast(Any, answer), Config(), ServerSettings())
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address, failing = listener.socket.getsockname(), NoneLeft(listener)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.accept, failing, nursery)
            async with await trio.open_tcp_stream(*address) as idle:
                await idle.send_all(KEPT)
                assert b"204" in await idle.receive_some()
                failing.full = True
                async with await trio.open_tcp_stream(*address) as waker:
                    await waker.send_all(KEPT)
                    assert b"204" in await waker.receive_some()
                    async with await trio.open_tcp_stream(*address) as client:
                        assert await receive_all(idle) == b""
                        await client.send_all(get("/"))
                        assert (await receive_all(client)).startswith(b"HTTP/1.1 204")
            nursery.cancel_scope.cancel()


async def test_the_limit_holds_for_what_a_stream_has() -> None:
    """A stream is never closed for a new connection."""
    async with all_busy(3) as (served, _):
        for _ in range(3):
            assert (await ask(served, STREAM))[0] == 503
        assert served.busy == 3
