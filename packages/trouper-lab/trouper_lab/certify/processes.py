"""Processes of a certificate: servers, and measurements of the engine.

No process outlives its section: HTTP answers and rows then fail at once.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import attrs

from trouper.system.lifeline import LAUNCHER, lifeline
from trouper_lab.certify.certificate import Json

UNSET = "TROUPER_"
"""Withheld from children: defaults are certified."""
Stopped = Literal["", "out of time", "interrupted"]


class SectionStopped(Exception):
    """Out of time, or interrupted."""


def last_line(written: str) -> str:
    """The last non-blank line, or ""."""
    return next((line.strip() for line in reversed(written.splitlines()) if line.strip()), "")


def last_words(errors: str, code: int) -> str:
    """Why a process ended, by stderr and exit code."""
    line = last_line(errors)
    if code == -signal.SIGKILL:
        return (
            "the system killed it, as it does when memory is short; a smaller model, or fewer bits "
            "a weight, needs less"
        )
    if code < 0:
        return f"it crashed ({signal.Signals(-code).name})" + (f": {line}" if line else "")
    return line or f"it ended with {code} and wrote nothing"


@attrs.define(eq=False)
class ChildProcesses:
    """end: a descriptor that children watch. stopped: why nothing may start."""

    end: int
    stopped: Stopped = ""
    deadline: float = math.inf
    running: set[subprocess.Popen[str]] = attrs.field(factory=set)
    lock: threading.RLock = attrs.field(
        factory=threading.RLock
    )  # A signal's handler may come while this thread holds it.

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def start(
        self, command: Sequence[str], environment: dict[str, str], **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process without Trouper's variables or Ctrl-C. Raises `SectionStopped`."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(UNSET)
        }
        with self.lock:
            self.check()
            process = subprocess.Popen(  # noqa: S603 - our own programs
                command,
                text=True,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(self.end,),
                env=inherited | {LAUNCHER: str(self.end)} | environment,
                **options,
            )
            self.running.add(process)
        if self.stopped:
            process.kill()
        return process

    def ended(self, process: subprocess.Popen[str]) -> None:
        with self.lock:
            self.running.discard(process)

    def check(self) -> None:
        """Raises `SectionStopped`."""
        if self.stopped:
            raise SectionStopped(self.stopped)

    def stop(self, reason: Stopped) -> None:
        """The first reason counts; interruptions are final."""
        with self.lock:
            self.stopped = "interrupted" if reason == "interrupted" else self.stopped or reason
            for process in self.running:
                process.kill()

    @contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """End all processes after `limit_s` seconds; a new limit clears "out of time"."""
        with self.lock:
            self.stopped = "interrupted" if self.stopped == "interrupted" else ""
        timer = threading.Timer(max(limit_s, 0.0), self.stop, ("out of time",))
        timer.daemon = True
        self.deadline = time.monotonic() + limit_s
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


@contextmanager
def child_processes() -> Iterator[ChildProcesses]:
    with lifeline() as end:
        yield ChildProcesses(end)


class ProgramFailed(Exception):
    """The message is the last line."""


class CutShort(Exception):
    """Out of time. Earlier rows are known."""


def program_rows(
    children: ChildProcesses,
    name: str,
    given: Mapping[str, Any],
    limit_s: float,
    **environment: str,
) -> Iterator[Json]:
    """Yield rows. Raises `CutShort` after `limit_s` seconds, `ProgramFailed`, and
    `SectionStopped`."""
    command = [sys.executable, "-P", "-m", "trouper_lab.engine_programs", name, json.dumps(given)]
    with tempfile.TemporaryFile() as errors:
        process = children.start(command, environment, stdout=subprocess.PIPE, stderr=errors)
        cut = threading.Event()

        def cut_short() -> None:
            cut.set()
            process.kill()

        timer = threading.Timer(max(limit_s, 1.0), cut_short)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            children.ended(process)
            assert process.stdout is not None
            process.stdout.close()
        children.check()
        if cut.is_set():
            raise CutShort
        if code:
            errors.seek(0)
            raise ProgramFailed(last_words(errors.read().decode(errors="replace"), code))
