"""A model hub with one repository, on a real socket: as much of its HTTP API as downloading a
snapshot takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.http_threads import served_in_thread

COMMIT = "0123456789" * 4
TORN = "torn.json"
"""A file of this name is sent in part, and then the connection ends."""


@contextmanager
def hub_of(repository: str, directory: Path, asked: list[str] | None = None) -> Iterator[str]:
    """The URL of a hub that has the files of `directory` as `repository`. `asked` gets the path of
    each request."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def do_GET(self, *, body: bool = True) -> None:
            path = self.path.partition("?")[0]
            if asked is not None:
                asked.append(path)
            name = path.rpartition("/")[2]
            if (
                path.startswith(f"/api/models/{repository}/revision/")
                or path == f"/api/models/{repository}"
            ):
                siblings = [{"rfilename": each} for each in files]
                self._answer(
                    json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode(),
                    body,
                )
            elif path.startswith(f"/api/models/{repository}/tree/"):
                tree = [
                    {
                        "type": "file",
                        "path": each,
                        "size": len(files[each]),
                        "oid": digest(files[each]),
                    }
                    for each in files
                ]
                self._answer(json.dumps(tree).encode(), body)
            elif path.startswith(f"/{repository}/resolve/") and name == TORN:
                self._answer(files[name], body, sent=1)
            elif path.startswith(f"/{repository}/resolve/") and name in files:
                self._answer(files[name], body)
            else:
                self._answer(b'{"error": "Repository not found"}', body, 404)

        def _answer(
            self, data: bytes, body: bool, status: int = 200, sent: int | None = None
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{digest(data)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if body:
                self.wfile.write(data[:sent])
                self.close_connection = sent is not None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with served_in_thread(server):
        yield f"http://127.0.0.1:{server.server_port}"


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()[:40]
