"""Two bounded pools of worker threads: quick work has threads of its own and never waits for slow work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal, TypeVar, TypeVarTuple, Unpack

import trio

Lane = Literal["quick", "slow"]
AT_ONCE: dict[Lane, int] = {"quick": 2, "slow": 2}
"""Number of threads of each lane. Each thread takes a core from an engine that computes on the CPU."""
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Lanes:
    """The two lanes of one model. Each is first come, first served."""

    def __init__(self) -> None:
        self._turns = {lane: trio.CapacityLimiter(threads) for lane, threads in AT_ONCE.items()}
        self._threads = trio.CapacityLimiter(sum(AT_ONCE.values()))

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a turn, in both lanes."""
        return sum(turns.statistics().tasks_waiting for turns in self._turns.values())

    @asynccontextmanager
    async def turn(self, lane: Lane) -> AsyncIterator[None]:
        async with self._turns[lane]:
            yield

    async def run(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Run `work` on a thread. On cancellation the thread is abandoned: it owns nothing but its result, and ends by itself."""
        return await trio.to_thread.run_sync(work, *arguments, abandon_on_cancel=True, limiter=self._threads)
