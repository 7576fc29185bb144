"""The command as a process: real sockets, real signals, a real (tiny) model."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.families import save
from trouper.cli.exits import leaving_signals
from trouper.system.ports import free_ports

PATIENCE_S = 60.0
RUN = "from trouper.cli import main; main()"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save("llama", directory)
    return directory


def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Look again and again: a process announces its states only in /health. Between two looks the
    processor is its."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def serving(
    model: Path | None,
    port: int,
    *flags: str,
    stderr: int = subprocess.PIPE,
    ssd: Path | None = None,
    run: str = RUN,
) -> Iterator[subprocess.Popen[str]]:
    """No model: the embedded one. `ssd`: the cache directory; None: without one."""
    command = [sys.executable, "-c", run, "serve", "--port", str(port)]
    command += (
        ["--no-ssd"] if ssd is None else ["--ssd-cache-dir", str(ssd), "--ssd-keep-free", "0"]
    )
    command += ["--model", str(model)] if model is not None else []
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        env=buffered,
    )
    assert process.stdout is not None
    try:
        assert "is ready at" in process.stdout.readline(), process.stderr and process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def get(port: int, path: str) -> tuple[int, Any]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", path)
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())


class Client(Thread):
    """One completion; what came of it is read after `join`. A connection that breaks leaves the
    status 0."""

    def __init__(self, port: int, path: str = "/v1/completions", **body: object) -> None:
        super().__init__(daemon=True)
        self._port, self._path, self._body = port, path, body
        self.status = 0
        self.text = ""
        self.start()

    def run(self) -> None:
        with (
            suppress(OSError, HTTPException),
            closing(HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)) as connection,
        ):
            connection.request(
                "POST",
                self._path,
                json.dumps(self._body | {"temperature": 0, "ignore_eos": True}),
                {"Content-Type": "application/json"},
            )
            with connection.getresponse() as response:  # One that breaks off would keep the socket.
                self.status = response.status
                self.text = response.read().decode()

    @property
    def failed(self) -> bool:
        return self.status >= 500 or '"error"' in self.text


def stats(port: int) -> dict[str, int]:
    return dict(get(port, "/health")[1]["cache_stats"])


def end(process: subprocess.Popen[str], number: signal.Signals) -> int:
    process.send_signal(number)
    return process.wait(PATIENCE_S)


def test_sigterm_with_a_request_in_each_state_ends_each_with_an_error_and_the_process_with_0(
    model: Path,
) -> None:
    """R13, F18. Decoding, prefilling and queued requests, streamed and not; the port is free at
    once."""
    [port] = free_ports(1)
    flags = ("--completion-batch-size", "3", "--prefill-step-size", "1", "--drain-timeout-s", "0.3")
    with serving(model, port, *flags) as process:
        decoding = [
            Client(port, prompt="a", max_tokens=1900, stream=stream) for stream in (True, False)
        ]
        until(lambda: stats(port)["tokens_generated"] > 4)
        prefilling = Client(port, prompt="b" * 1500, max_tokens=8, stream=True)
        until(lambda: stats(port)["active_sequences"] == 3)
        queued = Client(port, prompt="c", max_tokens=8, stream=True)
        until(lambda: stats(port)["queued_requests"] == 1)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "requests finished: 0, cut off: 4 " in log.splitlines()[-1]
        for client in (*decoding, prefilling, queued):
            client.join(PATIENCE_S)
            assert client.failed, (client.status, client.text[-300:])
            assert "[DONE]" not in client.text
    parsers = ("--tool-parser", "openai", "--reasoning-parser", "gpt_oss")
    with serving(model, port, *parsers, "--drain-timeout-s", "600") as process:
        assert get(port, "/readyz")[0] == 200
        assert_parsers_are_harmony(get(port, "/health")[1])
        assert_a_second_signal_ends_at_once(process, port)


def assert_a_second_signal_ends_at_once(process: subprocess.Popen[str], port: int) -> None:
    Client(port, prompt="a", max_tokens=1900, stream=True)
    until(lambda: stats(port)["tokens_generated"] > 4)
    process.send_signal(signal.SIGINT)
    until(lambda: get(port, "/readyz")[0] == 503)
    assert end(process, signal.SIGTERM) == 128 + signal.SIGTERM


def assert_parsers_are_harmony(health: dict[str, Any]) -> None:
    """Parsers that are named are used."""
    named = (health["tool_parser"], health["reasoning_parser"], health["tool_calls"])
    assert named == ("harmony", "harmony", True)


def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(model: Path) -> None:
    """It begins with a terminal that is closed. Kernel and shell both send SIGHUP, and nothing can
    be printed any more."""
    [port] = free_ports(1)
    reader, writer = pty.openpty()
    try:
        with serving(model, port, "--drain-timeout-s", "60", stderr=writer) as process:
            running = Client(port, prompt="a", max_tokens=400, stream=True)
            until(lambda: stats(port)["tokens_generated"] > 4)
            os.close(reader)
            process.send_signal(signal.SIGHUP)
            until(lambda: get(port, "/readyz")[0] == 503)
            process.send_signal(signal.SIGHUP)
            late = Client(port, prompt="b", max_tokens=4)
            late.join(PATIENCE_S)
            assert late.status == 503
            assert process.wait(PATIENCE_S) == 0
            running.join(PATIENCE_S)
            assert "[DONE]" in running.text
    finally:
        os.close(writer)


def test_nohup_is_heeded() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in leaving_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in leaving_signals()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.long
def test_a_log_that_nobody_reads_holds_nobody_up(model: Path, terminal: bool) -> None:
    """A paused terminal (Ctrl-S) and a pipe whose reader stands still: some kilobytes, and a write
    waits. The short version is in tests/cli/test_logs.py."""
    [port] = free_ports(1)
    reader, writer = pty.openpty() if terminal else os.pipe()
    try:
        with serving(model, port, "--log-level", "debug", stderr=writer) as process:
            os.set_blocking(writer, False)
            with suppress(BlockingIOError):
                while os.write(writer, b"."):
                    pass
            os.set_blocking(writer, True)
            for _ in range(20):
                assert get(port, "/v1/models/nobody-knows")[0] == 404
            running = Client(port, prompt="a", max_tokens=40, stream=True)
            running.join(PATIENCE_S)
            assert "[DONE]" in running.text
            assert end(process, signal.SIGTERM) == 0
    finally:
        os.close(reader)
        os.close(writer)
