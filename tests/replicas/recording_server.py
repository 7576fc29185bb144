"""A server that answers anything and keeps what arrived, and routers before several servers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import attrs
import pytest

from examples.replicas import haproxy, healthy, smg
from tests.http_threads import served_in_thread
from tests.test_process import until
from trouper.system.ports import free_ports

MODEL = "tiny"
NAME_OF_SERVER = "x-trouper-server"
needs_haproxy = pytest.mark.skipif(which("haproxy") is None, reason="haproxy is not installed")
needs_smg = pytest.mark.skipif(
    which("haproxy") is None or not find_spec("smg"),
    reason="haproxy is not installed, or smg for this Python",
)
ANSWERS: Mapping[str, Any] = {
    "/readyz": {"status": "ok"},
    "/health": {"status": "ok"},
    "/server_info": {"served_model_name": MODEL},
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]},
}


@attrs.frozen
class Arrival:
    """`server`: the name that the router gave."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    server: str


@attrs.define
class RecordingServer:
    """`status`: of each answer to a POST."""

    port: int
    arrived: list[Arrival] = attrs.field(factory=list)
    status: int = 200
    ready: bool = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, arrival: Arrival) -> tuple[int, bytes]:
        if arrival.path == "/readyz" and not self.ready:
            return 503, b"{}"
        if arrival.path in ANSWERS:
            return 200, json.dumps(ANSWERS[arrival.path]).encode()
        self.arrived.append(arrival)
        return self.status, b"{}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        arrival = Arrival(self.command, self.path, headers, body, headers.get(NAME_OF_SERVER, ""))
        status, answer = vars(self.server)["recording"].answer(arrival)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_DELETE = _handle  # noqa: N815 - names of http.server

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def recording_server() -> Iterator[RecordingServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    recording = RecordingServer(server.server_port)
    vars(server)["recording"] = recording
    with served_in_thread(server):
        yield recording


@contextmanager
def router_before(
    urls: Sequence[str], directory: Path, router: str, policy: str = "cache_aware"
) -> Iterator[int]:
    """The port of a router that has seen all servers ready: HAProxy, "smg" behind it, or "smg
    alone". `policy` "round_robin": in turns."""
    port, smg_port, metrics_port = free_ports(3)
    with ExitStack() as stack:
        if router != "haproxy":
            command = smg(smg_port, metrics_port, urls, policy)
            stack.enter_context(running(command, smg_port, len(urls)))
        if router == "smg alone":
            yield smg_port
            return
        command = haproxy(port, urls, directory, smg_port if router == "smg" else None)
        if policy == "round_robin":
            file = directory / "haproxy.cfg"
            text = file.read_text("utf-8").replace(
                "balance hash var(txn.session)", "balance roundrobin"
            )
            file.write_text(text, "utf-8")
        stack.enter_context(running(command, port, len(urls)))
        yield port


@contextmanager
def running(command: Sequence[str], port: int, count: int) -> Iterator[None]:
    """A router, from when it has seen so many servers ready."""
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: healthy(port) == count)
            yield
        finally:
            process.kill()


@contextmanager
def behind(
    directory: Path, router: str, count: int = 2
) -> Iterator[tuple[int, list[RecordingServer]]]:
    """Recording servers, and the port of a router before them."""
    with ExitStack() as stack:
        servers = [stack.enter_context(recording_server()) for _ in range(count)]
        port = stack.enter_context(router_before([one.url for one in servers], directory, router))
        yield port, servers
