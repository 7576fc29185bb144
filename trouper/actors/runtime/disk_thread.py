"""The thread on which SSDWriter uses the file system. Tests use one with virtual time or
failures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio

from trouper.actors.runtime.worker_threads import run_on_thread

T = TypeVar("T")
# A file is written in less than a second.
LAST_WORK_S = 2.0


class DiskThread:
    """One thread with a limiter of its own: a slow disk takes no thread from others."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread. Cancellation waits up to LAST_WORK_S, lest a write be left
        halfway, then abandons the thread. Raises what `work` raises, and `OSError` if no thread can
        be started."""
        # A file system that does not answer (NFS, FUSE) cannot be interrupted, and must not keep
        # the process or the model alive.
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
