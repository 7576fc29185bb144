"""Two scripted servers behind a router, for agents and clients, and the death of one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from examples.replicas import free_ports, healthy
from tests.replicas.recording_server import router_before
from tests.scripted.process import recorded, scripted_server
from tests.test_process import until

ROUTERS = ("haproxy", "smg")


@contextmanager
def scripted_servers(
    router: str, *flags: str, record: Path, policy: str = "cache_aware", kill_after: int = 0
) -> Iterator[str]:
    """The URL of a router before two scripted servers, which write into one record; without a
    router, of one server. `kill_after`: so many requests, after which the server of the last one is
    killed."""
    flags = (*flags, "--record", str(record))
    with ExitStack() as stack:
        urls = [stack.enter_context(scripted_server(*flags)) for _ in range(2 if router else 1)]
        if kill_after:
            stack.enter_context(_killer(record, kill_after))
        if not router:
            yield urls[0]
            return
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="router-"))
        port = stack.enter_context(router_before(urls, Path(directory), router, policy))
        if router == "smg":
            port = stack.enter_context(_answering_connect(port, urls[0], Path(directory)))
        yield f"http://127.0.0.1:{port}"


QUESTIONS = """\
defaults
    mode http
    timeout connect 5s
    timeout client 10m
    timeout server 10m
frontend here
    bind 127.0.0.1:{port}
    use_backend server if {{ path /tokenize /health /v1/models }}
    default_backend router
backend server
    server one {server}
backend router
    server one 127.0.0.1:{router}
"""


@contextmanager
def _answering_connect(router: int, server: str, directory: Path) -> Iterator[int]:
    """The port of a proxy that asks a server what `trouper connect` wants to know, for smg says
    nothing of contexts; and the router all else."""
    [port] = free_ports(1)
    file = directory / "questions.cfg"
    text = QUESTIONS.format(port=port, server=server.removeprefix("http://"), router=router)
    file.write_text(text, "utf-8")
    with subprocess.Popen(["haproxy", "-f", str(file)], stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: healthy(port) > 0)
            yield port
        finally:
            process.kill()


@contextmanager
def _killer(record: Path, kill_after: int) -> Iterator[None]:
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.05):
            posts = [line for line in recorded(record) if line["method"] == "POST"]
            if len(posts) >= kill_after:
                os.kill(posts[kill_after - 1]["pid"], signal.SIGKILL)
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
