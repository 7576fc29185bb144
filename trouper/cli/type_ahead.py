"""Keys that are typed while a command prints."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

LOCAL_FLAGS = 3  # Place in what tcgetattr returns


@contextmanager
def kept_for_the_next_prompt() -> Iterator[None]:
    """Let the terminal show no keys, and keep them for whoever reads next. Ctrl-C stays a
    signal."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    changed = [*before]
    changed[LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON)
    changed[LOCAL_FLAGS] |= termios.NOFLSH  # Else Ctrl-C would drop what was typed before it.
    # TCSAFLUSH would drop what was typed already.
    termios.tcsetattr(terminal, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
