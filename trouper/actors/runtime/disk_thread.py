"""The worker thread on which SSDWriter uses the file system. Tests replace it by one that takes virtual time or fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


class DiskThread:
    """One thread at a time, with a limiter of its own: a slow disk takes no thread from tokenizing or from another model's disk."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread. Cancellation waits for its end, so that a write is not left halfway. Raises what `work` raises."""
        return await trio.to_thread.run_sync(work, limiter=self._limiter)
