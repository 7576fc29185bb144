"""Exit codes, ends of commands, and signals on which a server leaves."""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn, TextIO

import click

from trouper.cli.terminal_text import line_shown

USAGE_ERROR = 2  # click's own code
DEVICE_STUCK = 70  # EX_SOFTWARE: restart the process.
ENGINE_FAILED = 70  # EX_SOFTWARE: restart the process.
RANK_LOST = 75  # EX_TEMPFAIL: restart all ranks.
INTERRUPTED = 130  # Ctrl-C, as in shells
DAMAGE_FOUND = 1  # By `trouper cache verify`


def refuse(message: str) -> NoReturn:
    _print_last(message)
    sys.exit(USAGE_ERROR)


def give_up(message: str) -> NoReturn:
    """Print one line, and exit without unwinding: MLX's destructors abort while threads of a
    crashed engine run."""
    _print_last(message)
    end_at_once(ENGINE_FAILED)


def _print_last(message: str) -> None:
    """Print a line after the log, which a thread writes."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    click.secho(f"trouper: {line_shown(message)}", fg="red", err=True)


def end_at_once(code: int) -> NoReturn:
    """Exit without unwinding, which would wait for a thread that does not end."""
    logging.shutdown()
    with suppress(OSError, ValueError, AttributeError):  # stdout may be full, closed, or None.
        sys.stdout.flush()
    os._exit(code)


def escape_unencodable() -> None:
    """Let stdout escape characters that the encoding lacks."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def forget(stream: TextIO) -> None:
    """Redirect stdout or stderr to nowhere: buffered output would fail at exit."""
    _to_nowhere(stream.fileno())


def forget_terminal() -> None:
    """Redirect stdout and stderr to nowhere where they were the closed terminal."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                _to_nowhere(descriptor)


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def echo_if_possible(text: str, *, err: bool) -> None:
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        forget(sys.stderr if err else sys.stdout)
    except OSError:
        pass


def leaving_signals() -> list[signal.Signals]:
    """Return the signals that begin to drain. `nohup` ignores SIGHUP."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def insists(number: int) -> bool:
    """Whether a second signal asks to end at once, unlike a repeated SIGHUP."""
    if number == signal.SIGHUP:
        forget_terminal()
    return number != signal.SIGHUP
