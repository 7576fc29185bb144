"""Open WebUI with a picture, by the requests that its page makes: the file is uploaded, and the
message names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import attrs

from tests.agents import image_task
from tests.agents.image_sessions import RECORD, SCRIPT, ImageSession, ended_session, new_home
from tests.agents.install import binaries, install_program
from tests.agents.programs import Program
from tests.agents.sessions import QUIET
from tests.agents.trained_model import PICTURES, QUESTION, SIDE, TrainedAnswer
from tests.image_session import Server
from tests.pictures import one, png
from tests.scripted.process import ROOT, scripted_server
from trouper.system.ports import free_ports

NAME = "open-webui"
# torch is for models of its own, and has gigabytes.
PROGRAM = Program(("open-webui",), is_javascript=False, without=("torch", "accelerate"))
START_S = 300.0
SETTINGS = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "of a test",
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",
    "ENABLE_TITLE_GENERATION": "False",
}
"""One user without a password, nothing fetched, no models of its own."""


@attrs.frozen
class OpenWebUI:
    url: str
    token: str = ""

    @classmethod
    @contextmanager
    def running(cls, server_url: str, home: Path) -> Iterator[OpenWebUI]:
        """By `trouper connect open-webui --run`, until the block ends."""
        install_program(NAME, PROGRAM)
        port = str(free_ports(1)[0])
        connect = "import sys; from trouper.cli import main; main()"
        line = [sys.executable, "-c", connect, "connect", "--url", server_url, "--run", NAME, "--"]
        environment = os.environ | QUIET | SETTINGS
        environment |= {"HOME": str(home), "DATA_DIR": str(home / "data"), "PYTHONPATH": str(ROOT)}
        environment["PATH"] = f"{binaries(NAME, PROGRAM)}:{os.environ['PATH']}"
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                [*line, "--host", "127.0.0.1", "--port", port],
                cwd=home,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            one = cls(f"http://127.0.0.1:{port}")
            one._wait(process, home / "log")
            signed_in = one.post("/api/v1/auths/signin", {"email": "", "password": ""})
            yield attrs.evolve(one, token=signed_in["token"])
        finally:
            os.killpg(process.pid, SIGTERM)
            process.wait()

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._read(Request(self.url + "/health"))
            except URLError:
                is_late = time.monotonic() > deadline
                assert process.poll() is None and not is_late, log.read_text()[-3000:]
                time.sleep(0.5)
            else:
                return

    def ask(self, question: str, picture: bytes) -> str:
        """Upload a PNG file and ask about it."""
        uploaded = self._upload("picture.png", "image/png", picture, "process=false")
        [model] = json.loads(self._read(Request(self.url + "/api/models", headers=self._key())))[
            "data"
        ]
        image = {"type": "image_url", "image_url": {"url": uploaded}}
        content = [{"type": "text", "text": question}, image]
        messages = [{"role": "user", "content": content}]
        body = {"stream": False, "model": model["id"], "messages": messages}
        answer = self.post("/api/chat/completions", body)
        return str(answer["choices"][0]["message"]["content"])

    def index(self, text: str) -> str:
        """Upload a text file, and name the collection of its chunks. Raises `ValueError` with the
        page's reason for not indexing it."""
        data, query = text.encode(), "process_in_background=false"
        name = self._upload("text.txt", "text/plain", data, query)
        file = json.loads(
            self._read(Request(f"{self.url}/api/v1/files/{name}", headers=self._key()))
        )
        if error := file["data"].get("error"):
            raise ValueError(error)
        return f"file-{name}"

    def nearest(self, collection: str, query: str) -> list[str]:
        """The chunks next to a query, the best first."""
        body = {"collection_name": collection, "query": query}
        result = self.post("/api/v1/retrieval/query/doc", body)
        return list(result["documents"][0]) if result else []

    def _upload(self, name: str, kind: str, data: bytes, query: str) -> str:
        edge = "of-parts"
        head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="{name}"'
        form = f"{head}\r\nContent-Type: {kind}\r\n\r\n".encode()
        body = form + data + f"\r\n--{edge}--\r\n".encode()
        path = f"/api/v1/files/?{query}"
        return str(self._send(path, body, f"multipart/form-data; boundary={edge}")["id"])

    def post(self, path: str, body: Any) -> Any:
        return self._send(path, json.dumps(body).encode(), "application/json")

    def _send(self, path: str, data: bytes, kind: str) -> Any:
        headers = {"Content-Type": kind} | self._key()
        return json.loads(self._read(Request(self.url + path, data, headers)))

    def _key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def _read(self, request: Request) -> bytes:
        with urlopen(request, timeout=START_S) as response:
            return bytes(response.read())


def run(family: str) -> ImageSession:
    """With a scripted model."""
    with new_home() as home:
        data = image_task.write_picture(home / "work")
        flags = ("--family", family, "--script", SCRIPT, "--record", str(home / RECORD))
        with scripted_server(*flags) as url, OpenWebUI.running(url, home) as page:
            output = page.ask(image_task.TASK, data)
        return ended_session(NAME, family, "prompt", home, (0, output))


def answers() -> list[TrainedAnswer]:
    """Of the model of examples/shapes, one for each picture."""
    with (
        new_home() as home,
        Server.running(home / "cache", home / "server-log") as server,
        OpenWebUI.running(server.url, home) as page,
    ):
        return [
            TrainedAnswer(shape, page.ask(QUESTION, png(one(shape, color, SIDE, SIDE))))
            for shape, color in PICTURES
        ]
