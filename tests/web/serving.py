"""The whole graph with a fake engine behind real sockets, and a raw client to be rude with."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import psutil
import trio

from tests.fakes import FakeEngine
from trouper import ModelManager, Runtime, ServerSettings, Settings, run_runtime
from trouper.web.observability.exchange import ExchangeObserver
from trouper.web.observability.request_log import RequestObserver
from trouper.web.server import serve_http

PATIENCE_S = 60.0
STEP_S = 0.002
SHUTDOWN_S = 8.0


@attrs.frozen
class Served:
    port: int
    runtime: Runtime
    engine: FakeEngine
    shutdown: trio.Event

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def busy(self) -> int:
        facts = self.runtime.health().scheduler
        return facts.active_sequences + facts.queued_requests

    @property
    def connections(self) -> int:
        """How many the server holds: sockets of this process that are bound to its port and
        connected."""
        return sum(
            connection.laddr.port == self.port and connection.status != psutil.CONN_LISTEN
            for connection in psutil.Process().net_connections("tcp")
        )

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)


async def pace(_: object) -> None:
    """A step takes a little time, as on a device; otherwise the fake engine never lets a client in
    between."""
    await trio.sleep(STEP_S)


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    settings: dict[str, Any] | None = None,
    observers: Sequence[RequestObserver] = (),
    clock: Callable[[], float] = trio.current_time,
    exchange_observers: Sequence[ExchangeObserver] = (),
    **server: Any,
) -> AsyncIterator[Served]:
    """Shut down at the end, which must end by itself and leave no task and no file behind. It takes
    well under two seconds; the limit here leaves room for a busy machine."""
    engine = engine or FakeEngine(before_step=pace)
    shutdown = trio.Event()
    before = open_files()
    with TemporaryDirectory() as state:
        server = {"port": 0, "batch_dir": Path(state) / "state", **server}
        async with trio.open_nursery() as nursery:
            chosen = Settings(**{"no_ssd": True, "gather_ms": 0} | (settings or {}))
            runtime: Runtime = await nursery.start(partial(run_runtime, chosen, engine=engine))
            chosen_server = ServerSettings(**server)
            start = partial(
                serve_http,
                runtime,
                chosen_server,
                shutdown=shutdown,
                observers=observers,
                exchange_observers=exchange_observers,
                clock=clock,
            )
            [url] = await nursery.start(start)
            yield Served(int(url.rsplit(":", 1)[1]), runtime, engine, shutdown)
            with trio.fail_after(SHUTDOWN_S):
                await runtime.drain(0)
                shutdown.set()
                while nursery.child_tasks:  # noqa: ASYNC110 - they end without a word
                    await trio.sleep(0.005)
    assert open_files() <= before + 1


@asynccontextmanager
async def serving_manager(
    manager: ModelManager, settings: ServerSettings | None = None
) -> AsyncIterator[int]:
    """The port at which `manager` is served."""
    settings = settings or ServerSettings(port=0)
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        [url] = await nursery.start(partial(serve_http, manager, settings, shutdown=shutdown))
        yield int(url.rsplit(":", 1)[1])
        shutdown.set()


def open_files() -> int:
    """Number of open files and sockets, without those of a GPU's driver, which opens some whenever
    a thread has new work for it."""
    own = Path("/proc/self/fd")
    return sum(not opened_by_driver(each) for each in own.iterdir()) if own.is_dir() else 0


def opened_by_driver(descriptor: Path) -> bool:
    with suppress(OSError):  # The one of the directory itself is gone.
        return str(descriptor.readlink()).startswith(("/dev/nvidia", "/proc/driver/nvidia"))
    return False


async def eventually(condition: Callable[[], bool]) -> None:
    """Look until it is so; the clock is real and sockets announce nothing."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - that is what this is for
            await trio.sleep(0.005)


def post(path: str, body: object, headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if data and "content-type:" not in headers.lower():
        headers += "Content-Type: application/json\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    )
    return head.encode() + data


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n".encode()


async def receive_all(stream: trio.SocketStream) -> bytes:
    received = b""
    with trio.fail_after(PATIENCE_S):
        try:
            while data := await stream.receive_some():
                received += data
        except trio.BrokenResourceError:
            pass
    return received


async def exchange(served: Served, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own: status, headers, body (as it came, chunked or
    not)."""
    async with await served.connect() as stream:
        await stream.send_all(
            request.replace(b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n", 1)
        )
        head, _, body = (await receive_all(stream)).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


async def ask(
    served: Served, body: object, path: str = "/v1/completions", headers: str = ""
) -> tuple[int, Any]:
    """Status and JSON."""
    status, _, data = await exchange(served, post(path, body, headers))
    return status, json.loads(data)


STREAM = {"prompt": "hello", "max_tokens": 4000, "stream": True, "ignore_eos": True}


class Listener:
    """A client that reads one stream after another, each to its end."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._heard = trio.Event()

    async def run(self) -> None:
        while True:
            async with await self._served.connect() as stream:
                await stream.send_all(post("/v1/completions", STREAM))
                await self._listen(stream)

    async def _listen(self, stream: trio.SocketStream) -> None:
        last = b""
        while b"data: [DONE]" not in last:
            said = await stream.receive_some()
            assert said, f"the stream ended in the middle: {last!r}"
            last = last[-100:] + said
            if b"data: " in said:
                self._heard.set()
                self._heard = trio.Event()

    async def hears(self) -> None:
        with trio.fail_after(PATIENCE_S):
            await self._heard.wait()


@asynccontextmanager
async def a_stream_that_goes_on(served: Served) -> AsyncIterator[None]:
    """Another client, whose stream must go on all the time, and when the body is over."""
    listener = Listener(served)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listener.run)
        await listener.hears()
        yield
        for _ in range(3):
            await listener.hears()
        nursery.cancel_scope.cancel()
