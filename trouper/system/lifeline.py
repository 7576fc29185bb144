"""Child processes that end with their parent, also by SIGKILL.

Children read from a pipe, which the system closes when the parent dies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

LAUNCHER = "TROUPER_LAUNCHER"
"""A child's variable: the descriptor of the reading end."""


@contextmanager
def lifeline() -> Iterator[int]:
    """Yield a descriptor that ends with this process."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def watch_launcher(ended: Callable[[], None]) -> None:
    """Call `ended` on a thread when the launcher ends. Children do not inherit the descriptor."""
    if launcher := os.environ.pop(LAUNCHER, ""):
        Thread(target=_watch, args=(int(launcher), ended), name="launcher", daemon=True).start()


def _watch(descriptor: int, ended: Callable[[], None]) -> None:
    while os.read(descriptor, 64):
        pass
    ended()


def end_with_launcher() -> None:
    """For programs without state to close."""
    watch_launcher(lambda: os.kill(os.getpid(), signal.SIGKILL))
