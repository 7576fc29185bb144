"""The processes of a certificate: servers, and measurements of the engine.

No process outlives its section, or this process. When a section has used its time, or the user
interrupts, all of them end. An answer through HTTP or a row of a measurement that is waited for
then fails at once: nothing in a section needs a time limit of its own.
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

from trouper.lifeline import LAUNCHER, lifeline
from trouper_lab.certify.certificate import Json

UNSET = "TROUPER_"
"""Prefix of variables that children do not inherit: a certificate is about the defaults."""
Stopped = Literal["", "out of time", "interrupted"]


class SectionStopped(Exception):
    """The section has used its time, or was interrupted."""


def last_line(written: str) -> str:
    """Return the last line that is not blank; "" if there is none."""
    return next((line.strip() for line in reversed(written.splitlines()) if line.strip()), "")


def last_words(errors: str, code: int) -> str:
    """Say why a process ended, by its stderr and exit code."""
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
    """Starts processes, and ends them. end: the descriptor that children watch. stopped: why
    nothing more may be started."""

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
        """Start a process without Trouper's variables, in a session of its own: Ctrl-C of a
        terminal comes here only. Raises `SectionStopped`."""
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
        """Forget a process that was waited for."""
        with self.lock:
            self.running.discard(process)

    def check(self) -> None:
        """Raises `SectionStopped`."""
        if self.stopped:
            raise SectionStopped(self.stopped)

    def stop(self, reason: Stopped) -> None:
        """End everything. The first reason counts, but after an interruption nothing goes on."""
        with self.lock:
            self.stopped = "interrupted" if reason == "interrupted" else self.stopped or reason
            for process in self.running:
                process.kill()

    @contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """End all processes when `limit_s` seconds have passed. A new limit ends "out of time", but
        no interruption."""
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
    """Yield a starter of processes. They end with this process, however it ends."""
    with lifeline() as end:
        yield ChildProcesses(end)


class ProgramFailed(Exception):
    """The process ended with an error. The message is its last line."""


class CutShort(Exception):
    """The time of the program has passed. Rows before that are known."""


def program_rows(
    children: ChildProcesses,
    name: str,
    given: Mapping[str, Any],
    limit_s: float,
    **environment: str,
) -> Iterator[Json]:
    """Yield rows as they come. Raises `CutShort` after `limit_s` seconds, `ProgramFailed`, and
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
