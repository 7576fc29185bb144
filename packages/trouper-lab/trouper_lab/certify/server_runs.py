"""Server processes under measurement."""

from __future__ import annotations

import shlex
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs
import httpx2

from trouper.cli.own_server import READY
from trouper.system.ports import free_ports
from trouper_lab.certify.certificate import Json
from trouper_lab.certify.processes import ChildProcesses, last_line, last_words
from trouper_lab.load import PATIENT

GOODBYE_S = 20.0
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Reading the machine's certificates would take measured CPU time."""
MLX_LM_SERVER = """
from http.server import ThreadingHTTPServer
from trouper.system.lifeline import end_with_launcher
end_with_launcher()
ThreadingHTTPServer.request_queue_size = 1024
from trouper.process import prepare_process
prepare_process()
from mlx_lm.server import main
main()
"""
"""OpenBLAS is loaded before MLX, as in Trouper. Linux resets connections beyond 5 queued."""


class ServerFailed(Exception):
    """The message quotes the server."""


@attrs.define(eq=False)
class ServerRun:
    """url: without /v1. killed: by `kill`."""

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

    def metric(self, name: str) -> int:
        """Return a counter of /metrics, summed over its labels."""
        lines = [line for line in self.text("/metrics").splitlines() if line.startswith(name)]
        return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))

    def post(self, path: str, body: Json) -> Json:
        """Raises `ServerFailed`, or httpx2's errors when the server is killed."""
        with self.client() as client:
            response = client.post(path, json=body)
        if response.is_error:
            raise ServerFailed(
                f"a request was answered {response.status_code}: {response.text[:300]}"
            )
        return dict(response.json())

    def complete(self, body: Json) -> Json:
        """Send one completion. Raises as `post`."""
        return self.post("/v1/completions", body)

    def complete_all(self, bodies: Sequence[Json]) -> list[Json]:
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.complete, bodies))

    def last_line(self) -> str:
        """The process's last line, cut to 300 characters, or ""."""
        return last_line(self.log.read_text(errors="replace"))[:300]

    def kill_amid(
        self, send: Callable[[Json], object], bodies: Sequence[Json], after_s: float
    ) -> None:
        """Kill the server while it answers bodies, each sent by `send`."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            running = [pool.submit(send, body) for body in bodies]
            time.sleep(after_s)
            self.kill()
            for each in running:
                error = each.exception()
                if error is not None and not isinstance(error, httpx2.HTTPError | ServerFailed):
                    raise error

    def kill(self) -> None:
        """Like a crash."""
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
    """commands: for readers. directory: the model's, also of a hub id. crashes: unexpected ends."""

    model: str | None
    scratch: Path
    children: ChildProcesses
    directory: str = ""
    commands: list[str] = attrs.field(factory=list)
    crashes: list[str] = attrs.field(factory=list)
    count: int = 0

    @contextmanager
    def trouper(self, *flags: str) -> Iterator[ServerRun]:
        """With defaults and flags, without the user's settings."""
        named = () if self.model is None else ("--model", self.model)
        arguments = ["serve", *named, *flags]
        self._note("trouper", *arguments)
        options = ["--host", "127.0.0.1", "--port", "0", "--log-level", "warning", *PATIENT]
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
            [port] = free_ports(1)
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
        """Note an end that clients see as broken connections."""
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


def _without(text: str, names: Mapping[str, str]) -> str:
    """A hub id stays."""
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
