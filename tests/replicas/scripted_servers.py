"""Two scripted servers behind a router, for agents and clients, and the death of one of them."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.replicas.recording_server import router_before
from tests.scripted.process import recorded, scripted_server

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
        yield f"http://127.0.0.1:{port}"


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
