"""Servers that sections measure, each a process: Trouper as `trouper serve` starts it, and
mlx_lm.server."""

from __future__ import annotations

import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs
import httpx2

from trouper.cli.commands.bench.load import random_words
from trouper.cli.commands.certify.answers import ProbeQuestion
from trouper.cli.commands.certify.certificate import Json
from trouper.cli.commands.certify.child_processes import ChildProcesses, last_line, last_words

GOODBYE_S = 20.0
READY = " is ready at "
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Nothing here speaks TLS, and each client would read the certificates of this machine: 55 ms of
the CPU that is measured."""
PATIENT = (
    "--queue-timeout-s",
    "--first-token-timeout-s",
    "--token-timeout-s",
    "--request-timeout-s",
)
"""Limits that are lifted: a slow machine shall be measured, not refused."""
MLX_LM_SERVER = """
from trouper import connection_queue, lifeline
lifeline.end_with_launcher()
connection_queue.lengthen()
from trouper.process import prepare_process
prepare_process()
from mlx_lm.server import main
main()
"""
"""OpenBLAS is loaded before MLX, so that both servers multiply by the same library."""


class ServerFailed(Exception):
    """A server did not start, or refused a request. The message says what it wrote."""


@attrs.define(eq=False)
class ServerRun:
    """A server process. url: without /v1. killed: whether `kill` ended it."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    children: ChildProcesses
    killed: bool = False

    def client(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.url, timeout=None, trust_env=False, verify=NO_CERTIFICATES
        )

    def health(self) -> Json:
        with self.client() as client:
            return dict(client.get("/health").raise_for_status().json())

    def text(self, path: str) -> str:
        with self.client() as client:
            return client.get(path).raise_for_status().text

    def post(self, path: str, body: Json) -> Json:
        """Raises `ServerFailed`, or httpx2's errors when the server is killed meanwhile."""
        with self.client() as client:
            response = client.post(path, json=body)
        if response.is_error:
            raise ServerFailed(
                f"a request was answered {response.status_code}: {response.text[:300]}"
            )
        return dict(response.json())

    def complete(self, body: Json) -> Json:
        """Send one completion. Raises as `post` does."""
        return self.post("/v1/completions", body)

    def complete_all(self, bodies: Sequence[Json]) -> list[Json]:
        """Send all at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.complete, bodies))

    def last_line(self) -> str:
        """The last line that the process wrote, of at most 300 characters; "" if it wrote
        nothing."""
        return last_line(self.log.read_text(errors="replace"))[:300]

    def kill(self) -> None:
        """End the process without any warning, as a crash or a power cut does."""
        self.killed = True
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.children.ended(self.process)
        if self.process.stdout is not None:
            self.process.stdout.close()


@attrs.define(eq=False)
class ServerStarter:
    """Starts servers of one model. commands: what was started, to be repeated by others. directory:
    the model's, also of one that is named by its hub id, and of the embedded one. crashes: why
    servers ended that nobody had ended."""

    model: str | None
    scratch: Path
    children: ChildProcesses
    directory: str = ""
    commands: list[str] = attrs.field(factory=list)
    crashes: list[str] = attrs.field(factory=list)
    count: int = 0

    @contextmanager
    def trouper(self, *flags: str) -> Iterator[ServerRun]:
        """Run `trouper serve` with its defaults and these flags. Settings files and variables of
        the user do not count."""
        named = () if self.model is None else ("--model", self.model)
        patient = [part for flag in PATIENT for part in (flag, "0")]
        arguments = ["serve", *named, *flags]
        self._note("trouper", *arguments)
        options = ["--host", "127.0.0.1", "--port", "0", "--log-level", "warning", *patient]
        server = self._started([sys.executable, "-P", "-m", "trouper", *arguments, *options])
        try:
            assert server.process.stdout is not None
            ready = server.process.stdout.readline()
            if READY not in ready:
                self.children.check()
                raise ServerFailed(f"the server did not start: {_why_ended(server)}")
            server.url = ready.rsplit(READY, 1)[1].strip().removesuffix("/v1")
            yield server
        finally:
            self._note_crash(server)
            server.stop()

    @contextmanager
    def mlx_lm(self, model: str, streams: int, limit_s: float) -> Iterator[ServerRun]:
        try:
            port = _free_port()
        except OSError as error:
            raise ServerFailed(
                f"there is no free port for mlx_lm.server: {error.strerror}"
            ) from error
        flags = [
            "--model",
            model,
            "--port",
            str(port),
            "--decode-concurrency",
            str(streams),
            "--log-level",
            "WARNING",
        ]
        self._note("mlx_lm.server", *flags)
        server = self._started([sys.executable, "-P", "-c", MLX_LM_SERVER, *flags])
        server.url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_it_answers(server, limit_s)
            yield server
        finally:
            server.stop()

    def _started(self, command: list[str]) -> ServerRun:
        self.count += 1
        log = self.scratch / f"server-{self.count}.log"
        configs = self.scratch / "no-settings"
        configs.mkdir(exist_ok=True)
        with log.open("w") as errors:
            output = subprocess.PIPE if "serve" in command else errors
            environment = {"XDG_CONFIG_HOME": str(configs)}
            process = self.children.start(
                command, environment, stdout=output, stderr=errors, cwd=configs
            )
        return ServerRun(process, "", log, self.children)

    def _note_crash(self, server: ServerRun) -> None:
        """Note why a server is gone that had started: what waited for it only knows that a
        connection broke."""
        if (
            server.url
            and not server.killed
            and not self.children.stopped
            and server.process.poll() is not None
        ):
            self.crashes.append(f"trouper serve had ended: {_why_ended(server)}")

    def _note(self, *command: str) -> None:
        names = {
            str(self.scratch): "SCRATCH",
            self.directory: Path(self.directory).name,
            self.model or "": Path(self.model or "").name,
        }
        shown = shlex.join(_without(part, names) for part in command)
        if shown not in self.commands:
            self.commands.append(shown)


def probe_question(
    server: ServerRun, index: int, prompt_tokens: int, answer_tokens: int
) -> ProbeQuestion:
    """Make a question whose prompt has exactly so many tokens of the model, and begins as that of
    no other index."""
    text = f"{index}. Tell a story of {random_words(prompt_tokens)}"
    tokens = server.post("/tokenize", {"prompt": text})["tokens"]
    return ProbeQuestion(tuple(tokens[:prompt_tokens]), answer_tokens)


def _without(text: str, names: Mapping[str, str]) -> str:
    """Replace directories of the user by names. A hub id stays as it is."""
    for directory, name in names.items():
        if directory.startswith("/"):
            text = text.replace(directory, name)
    return text


def _wait_until_it_answers(server: ServerRun, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        server.children.check()
        if server.process.poll() is not None:
            raise ServerFailed(f"mlx_lm.server did not start: {_why_ended(server)}")
        try:
            server.complete({"prompt": "Hello", "max_tokens": 2, "temperature": 0})
        except (httpx2.HTTPError, ServerFailed):
            time.sleep(0.2)
        else:
            return
    raise ServerFailed(f"mlx_lm.server did not answer within {limit_s:.0f} s")


def _why_ended(server: ServerRun) -> str:
    return last_words(server.log.read_text(errors="replace"), server.process.wait())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
