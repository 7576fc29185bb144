"""Child processes that end when the process that started them does, in whatever way: also by
SIGKILL, on Linux as on macOS.

The parent keeps the writing end of a pipe, and children get the reading end. The system closes the
writing end when the parent dies, so a child that reads there sees the end of the file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from threading import Thread

LAUNCHER = "TROUPER_LAUNCHER"
"""Variable of a child: the descriptor of the reading end."""


@contextmanager
def lifeline() -> Iterator[int]:
    """Yield a descriptor to read from, which ends when this process does. Children get it by
    `pass_fds` and the variable `LAUNCHER`."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def watch_launcher(
    ended: Callable[[], None], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Call `ended` on a thread when the launcher of this process has ended. Nothing happens if none
    is named. The variable is removed: this process' own children do not inherit the descriptor."""
    if launcher := environment.pop(LAUNCHER, ""):
        Thread(target=_watch, args=(int(launcher), ended), name="launcher", daemon=True).start()


def _watch(descriptor: int, ended: Callable[[], None]) -> None:
    while os.read(descriptor, 64):
        pass
    ended()


def end_with_launcher() -> None:
    """End this process at once when its launcher ends: for programs that keep nothing which must be
    closed."""
    watch_launcher(lambda: os.kill(os.getpid(), signal.SIGKILL))
