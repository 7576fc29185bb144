"""Work on a thread, where a system that starts no further thread is one that lacks something for
the moment."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import trio

T = TypeVar("T")


async def run_on_thread(
    work: Callable[[], T],
    limiter: trio.CapacityLimiter,
    *,
    abandon_on_cancel: bool = True,
    thread_name: str | None = None,
) -> T:
    """Run `work` as `trio.to_thread.run_sync` does. Raises what `work` raises, and `OSError`
    (EAGAIN) if no thread can be started."""
    begun = False

    @wraps(getattr(work, "func", work))  # Its name is the thread's.
    def begin() -> T:
        nonlocal begun
        begun = True
        return work()

    try:
        return await trio.to_thread.run_sync(
            begin, abandon_on_cancel=abandon_on_cancel, limiter=limiter, thread_name=thread_name
        )
    except RuntimeError as error:
        if begun:
            raise
        raise OSError(errno.EAGAIN, "the system starts no further thread") from error
