"""The worker thread on which SSDWriter uses the file system. Tests replace it by one that takes
virtual time or fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio

from trouper.actors.runtime.worker_threads import run_on_thread

T = TypeVar("T")
LAST_WORK_S = 2.0
"""Longest wait, once cancelled, for the work that runs. A file is written in less than a second."""


class DiskThread:
    """One thread at a time, with a limiter of its own: a slow disk takes no thread from tokenizing
    or from another model's disk."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread. Cancellation waits up to LAST_WORK_S for its end, so that a
        write is not left halfway. Then the thread is abandoned: a file system that does not answer
        (NFS, FUSE) cannot be interrupted, and must neither keep the process from ending nor a model
        from being unloaded. Raises what `work` raises, and `OSError` if no thread can be
        started."""
        token, begun, ended = trio.lowlevel.current_trio_token(), list[bool](), trio.Event()

        def noted() -> T:
            begun.append(True)
            try:
                return work()
            finally:
                # Abandoned, and the program has gone on without it.
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(ended.set)

        try:
            return await run_on_thread(noted, self._limiter, thread_name="cache directory")
        except trio.Cancelled:
            if begun:
                with trio.move_on_after(LAST_WORK_S, shield=True):
                    await ended.wait()
            raise
