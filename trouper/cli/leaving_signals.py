"""Signals on which a server leaves."""

from __future__ import annotations

import signal

from trouper.cli.exits import forget_terminal


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
