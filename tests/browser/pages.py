"""Pages of other origins: `python -m tests.browser.pages` serves an empty page, and a JavaScript
package below /openai/.

A process of its own: a browser's spare connections to it are no files of the tests' process, which
counts those that it has open.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import attrs

from tests.browser.npm_packages import OPENAI

PAGE = b"<!doctype html><title>a page</title><link rel=icon href=data:,><iframe name=frame hidden></iframe>"


class Pages(SimpleHTTPRequestHandler):
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
def page_server() -> Iterator[PageServer]:
    command = [sys.executable, "-m", "tests.browser.pages"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield PageServer(int(process.stdout.readline()))
        finally:
            process.kill()


def main() -> None:
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Pages, directory=str(OPENAI.directory))
    ) as server:
        sys.stdout.write(f"{server.server_address[1]}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
