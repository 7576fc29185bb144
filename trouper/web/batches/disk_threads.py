"""Threads of files and batches for their disk. They are their own, so that a file system that does
not answer (NFS, FUSE) takes none from answers, which are formatted on the other ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack

import trio

from trouper.actors.runtime.worker_threads import run_on_thread

AT_ONCE = 16
"""Number of threads. Each batch, upload and download has one at a time."""
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_limiter = trio.lowlevel.RunVar[trio.CapacityLimiter]("threads of files and batches")


async def on_disk(
    function: Callable[[Unpack[Arguments]], T],
    *arguments: *Arguments,
    abandon_on_cancel: bool = False,
) -> T:
    """Call a function on one of the threads, once one is free. Raises what it raises, and `OSError`
    if no thread can be started."""
    try:
        limiter = _limiter.get()
    except LookupError:
        _limiter.set(limiter := trio.CapacityLimiter(AT_ONCE))
    return await run_on_thread(
        partial(function, *arguments), limiter, abandon_on_cancel=abandon_on_cancel
    )
