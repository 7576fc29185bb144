"""Exit codes, and the ways in which a command ends when it cannot do its work."""

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

USAGE_ERROR = 2
"""Exit code when what was asked for cannot be: a flag, a model, a port. (click's own, too.)"""
DEVICE_STUCK = 70
"""Exit code when the device never finished a step (EX_SOFTWARE): a supervisor should start the
process again."""
ENGINE_FAILED = 70
"""Exit code when the engine crashed too often (EX_SOFTWARE): a supervisor should start the process
again."""
RANK_LOST = 75
"""Exit code when the group of ranks has ended (EX_TEMPFAIL): a supervisor should start all of them
again."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
DAMAGE_FOUND = 1
"""Exit code of `trouper cache verify` when a file is not sound."""


def refuse(message: str) -> NoReturn:
    """Print one line, and exit."""
    _print_last(message)
    sys.exit(USAGE_ERROR)


def give_up(message: str) -> NoReturn:
    """Print one line, and exit after everything that could still be served has been. At once: MLX's
    threads of an engine that has crashed may still run, and its destructors would abort the process
    (`terminate called without an active exception`), with another exit code."""
    _print_last(message)
    end_at_once(ENGINE_FAILED)


def _print_last(message: str) -> None:
    """Print a line after everything that was logged: the log is written on a thread of its own, and
    what led to this may still wait there."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    click.secho(f"trouper: {line_shown(message)}", fg="red", err=True)


def end_at_once(code: int) -> NoReturn:
    """Exit without unwinding, which would wait for the very thing that did not end."""
    logging.shutdown()
    with suppress(OSError, ValueError, AttributeError):  # stdout may be full, closed, or None.
        sys.stdout.flush()
    os._exit(code)


def escape_unencodable() -> None:
    """Let stdout escape what its encoding lacks, as stderr does: bars where a locale is not UTF-8,
    names of files that are not."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def forget(stream: TextIO) -> None:
    """Redirect stdout or stderr to nowhere because its reader is gone. Buffered output would
    otherwise be an error again when the process ends."""
    _to_nowhere(stream.fileno())


def forget_terminal() -> None:
    """Redirect stdout and stderr to nowhere, as far as they are the terminal that was closed: the
    system does not call it one any more."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                _to_nowhere(descriptor)


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def echo_if_possible(text: str, *, err: bool = False) -> None:
    """Print a line. One that cannot be written, to a full disk or because nobody reads any more, is
    dropped."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        forget(sys.stderr if err else sys.stdout)
    except OSError:
        pass


def leaving_signals() -> list[signal.Signals]:
    """Return the signals that begin to drain: SIGHUP, too, which comes when a terminal is closed,
    unless it is ignored, as `nohup` asks for."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def insists(number: int) -> bool:
    """Whether a signal asks once more to end at once if it is not the first. A closed terminal may
    send SIGHUP several times, as the kernel and the shell each do; and what was printed there has
    no place any more."""
    if number == signal.SIGHUP:
        forget_terminal()
    return number != signal.SIGHUP
