"""A server of one's own, for a command that brings a model along."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from trouper.cli.exits import refuse

GOODBYE_S = 15.0
READY = " is ready at "


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The URL of `trouper serve` with these flags, on a free port of this machine, in a process (and a group: Ctrl-C is not
    for it) of its own. Its log, and the bars of its start, go to our stderr. It ends with us, also when the terminal is
    closed."""
    command = [sys.executable, "-m", "trouper", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    with _ended_by_signals():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)  # noqa: S603
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            if READY not in ready:
                process.wait()
                refuse(f"the server ended with {process.returncode}; it said why above")
            yield ready.rsplit(READY, 1)[1].strip().removesuffix("/v1")
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """It drains, but nobody waits for long."""
    process.terminate()
    try:
        process.wait(GOODBYE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """So that `finally` is reached."""
    numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
