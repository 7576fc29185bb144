"""The queue of SSDWriter's orders: reads precede writes, since requests wait, and writes rest while
rows decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from typing import TypeAlias

import attrs
import trio

from trouper.protocol.health import DirectoryStats, SchedulerStats
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskNews, DiskOrder, Poll, Read, Write

# Names of thousands of files are listed in some milliseconds.
POLL_EVERY_S = 2.0


class DiskOrders:
    def __init__(
        self, channel: trio.MemoryReceiveChannel[DiskOrder], poll_every_s: float = POLL_EVERY_S
    ) -> None:
        """`poll_every_s`: how often `Poll` comes by itself, while nobody waits for a read."""
        self._channel, self._poll_every_s = channel, poll_every_s
        self._poll_at = trio.current_time() + poll_every_s
        self._orders: deque[DiskOrder] = deque()
        # Whether more orders may arrive.
        self._open = True
        self._writes_rest_until = 0.0

    async def next(self) -> DiskOrder | None:
        while True:
            self._receive_waiting()
            order = self._pop()
            if order is not None:
                return order
            if not self._open:
                return None
            await self._wait()

    def rest_writes(self, seconds: float) -> None:
        """Delay the next write, unless no more orders arrive."""
        self._writes_rest_until = trio.current_time() + seconds

    def _receive_waiting(self) -> None:
        while self._open:
            try:
                self._orders.append(self._channel.receive_nowait())
            except trio.WouldBlock:
                return
            except trio.EndOfChannel:
                self._open = False

    def _pop(self) -> DiskOrder | None:
        for index, order in enumerate(self._orders):
            if isinstance(order, Read):
                del self._orders[index]
                return order
        if self._open and trio.current_time() >= self._poll_at:
            self._poll_at = trio.current_time() + self._poll_every_s
            return Poll()
        resting = self._open and trio.current_time() < self._writes_rest_until
        if not self._orders or (resting and isinstance(self._orders[0], Write)):
            return None
        return self._orders.popleft()

    async def _wait(self) -> None:
        rest_until = self._writes_rest_until if self._orders else inf
        with trio.move_on_at(min(rest_until, self._poll_at)):
            try:
                self._orders.append(await self._channel.receive())
            except trio.EndOfChannel:
                self._open = False


@attrs.frozen(eq=False)
class WriterEdges:
    """Channels and watches, closed by the graph, since they outlive a crash."""

    orders: trio.MemoryReceiveChannel[DiskOrder]
    news: trio.MemorySendChannel[DiskNews]
    stats: Watch[DirectoryStats]
    scheduler: Watch[SchedulerStats]
    reads_in_parts: bool = False
    """Whether blocks are sent run by run. Other ranks' disks are compared by complete answers."""


DiskWriter: TypeAlias = Callable[[WriterEdges, Path | None, str, Settings], Awaitable[None]]
