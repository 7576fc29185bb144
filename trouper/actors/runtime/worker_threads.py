"""Work on a thread, where the system may start none."""

from __future__ import annotations

import errno
from collections.abc import Callable
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

    def begin() -> T:
        nonlocal begun
        begun = True
        return work()

    if thread_name is None:  # As Trio would name a thread that runs `work` itself.
        name = getattr(getattr(work, "func", work), "__name__", "work")
        thread_name = f"{name} from {trio.lowlevel.current_task().name}"
    try:
        return await trio.to_thread.run_sync(
            begin, abandon_on_cancel=abandon_on_cancel, limiter=limiter, thread_name=thread_name
        )
    except RuntimeError as error:
        if begun:
            raise
        raise OSError(errno.EAGAIN, "the system starts no further thread") from error
