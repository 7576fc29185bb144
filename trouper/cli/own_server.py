"""A server process for a command that is given a model instead of a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import NoReturn

import attrs
import click

from trouper.cli.client import Where, refused_in_one_line
from trouper.cli.exits import refuse
from trouper.cli.settings_file import only_this
from trouper.system.lifeline import LAUNCHER, lifeline

GOODBYE_S = 15.0
KILLED_S = 1.0
READY = " is ready at "


@contextmanager
def reach(where: Where, own_model: str | None, *flags: str) -> Iterator[Where]:
    """Start a server if there is a model for it, and say which server is used. Errors of the
    connection end the command with one line."""
    with ExitStack() as stack:
        if own_model is not None:
            flags = (*only_this(click.get_current_context()), *flags)
            url = stack.enter_context(
                serving("--model", own_model, "--log-level", "warning", *flags)
            )
            where = attrs.evolve(where, url=url, url_from="")
        stack.enter_context(refused_in_one_line(where))
        where.say()
        yield where


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Run `trouper serve` in a process group that Ctrl-C does not reach, and yield the URL. The
    server ends with this process."""
    address = ("--host", "127.0.0.1", "--port", "0")
    command = [sys.executable, "-P", "-m", "trouper", "serve", *address, *flags]
    with lifeline() as end, _started(command, end) as process, _signals_end(process):
        assert process.stdout is not None
        # Libraries and plugins may print lines of their own before.
        ready = next((line for line in process.stdout if READY in line), "")
        if not ready:
            process.wait()
            refuse(f"the server ended with {process.returncode}; it said why above")
        yield ready.rsplit(READY, 1)[1].strip().removesuffix("/v1")


@contextmanager
def _started(command: list[str], end: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(  # noqa: S603 - our own server
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=(end,),
        env=os.environ | {LAUNCHER: str(end)},
    )
    try:
        yield process
    finally:
        _end(process)
        assert process.stdout is not None
        process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate the server, and kill one that drains for long."""
    process.terminate()
    try:
        process.wait(GOODBYE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        # A signal's handler cannot wait for a process that the main program waits for already.
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)


@contextmanager
def _signals_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """End the server and this process without unwinding: a handler must not raise within Trio."""
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
