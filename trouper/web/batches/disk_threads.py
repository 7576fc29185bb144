"""Threads of files and batches for their disk. They are their own, so that a file system that does not answer (NFS, FUSE) takes none from
answers, which are formatted on the other ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

import trio

AT_ONCE = 16
"""Number of threads. Each batch, upload and download has one at a time."""
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_limiter = trio.lowlevel.RunVar[trio.CapacityLimiter]("threads of files and batches")


async def on_disk(
    function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments, abandon_on_cancel: bool = False
) -> T:
    """Call a function on one of the threads, once one is free."""
    try:
        limiter = _limiter.get()
    except LookupError:
        _limiter.set(limiter := trio.CapacityLimiter(AT_ONCE))
    return await trio.to_thread.run_sync(function, *arguments, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
