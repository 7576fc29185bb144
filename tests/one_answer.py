"""A server on this machine that answers one request, and a proxy of the environment that nobody can
reach."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import attrs

UNREACHABLE_PROXY: Mapping[str, str] = dict.fromkeys(
    ("http_proxy", "HTTP_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
)


@attrs.define
class Asked:
    port: int
    paths: list[str] = attrs.field(factory=list)


@contextmanager
def one_answer(status: int, body: bytes = b"") -> Iterator[Asked]:
    """At the end it has answered: itself asks, if nobody has."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.paths.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        asked = Asked(server.server_port)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            yield asked
        finally:
            if not asked.paths:
                own = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with suppress(OSError):  # As the status has it.
                    own.open(f"http://127.0.0.1:{asked.port}/nobody-asked").close()
            thread.join()
