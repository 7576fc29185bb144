"""Pages of other origins: a small server on another port, whose pages run what a test tells the browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import attrs

from tests.browser.openai_js import MODULES

PAGE = b"<!doctype html><title>a page</title><link rel=icon href=data:,><iframe name=frame hidden></iframe>"


class Pages(SimpleHTTPRequestHandler):
    """An empty page at /, the JavaScript package below /openai/."""

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def guess_type(self, path: object) -> str:
        return "text/javascript"

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.removeprefix("/openai"))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@attrs.frozen
class PageServer:
    port: int

    def origin(self, name: str) -> str:
        return f"http://{name}:{self.port}"


@contextmanager
def page_server(directory: Path = MODULES) -> Iterator[PageServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(directory)))
    server.daemon_threads = True
    with server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield PageServer(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
