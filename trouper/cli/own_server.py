"""A server of one's own, for a command that brings a model along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)  # noqa: S603
    assert process.stdout is not None
    try:
        with _signals_end(process):
            ready = process.stdout.readline()
            if READY not in ready:
                process.wait()
                refuse(f"the server ended with {process.returncode}; it said why above")
            yield ready.rsplit(READY, 1)[1].strip().removesuffix("/v1")
    finally:
        _end(process)
        process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    """It drains, but nobody waits for long."""
    process.terminate()
    try:
        process.wait(GOODBYE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _signals_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """The server first, then us, without unwinding: a handler must not raise in the middle of Trio. The terminal gets back
    the modes that it has now."""
    terminal = sys.stdin.fileno() if sys.stdin.isatty() else None
    modes = None if terminal is None else termios.tcgetattr(terminal)

    def leave(number: int, _: FrameType | None) -> NoReturn:
        _end(process)
        if terminal is not None and modes is not None:
            with suppress(termios.error):
                termios.tcsetattr(terminal, termios.TCSANOW, modes)
        os._exit(128 + number)

    before = [(number, signal.signal(number, leave)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
