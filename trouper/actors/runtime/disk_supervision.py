"""Supervision of SSDWriter: forgotten orders are answered after a crash, and after too many crashes
the server goes on without a disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import attrs
import trio

from trouper.actors.runtime.supervision import RestartLimit, supervise
from trouper.protocol.health import ActorStats, DirectoryStats
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskNews, DiskOrder, OrdersForgotten


@attrs.frozen(kw_only=True, eq=False)
class WriterSupervision:
    """`orders`, `news`: channels of the writer. `stats`: of the actor; `directory`: of its
    directory."""

    orders: trio.MemoryReceiveChannel[DiskOrder]
    news: trio.MemorySendChannel[DiskNews]
    stats: Watch[ActorStats]
    directory: Watch[DirectoryStats]

    async def supervise(self, run: Callable[[], Awaitable[None]], limit: RestartLimit) -> None:
        begun = False

        async def begin() -> None:
            nonlocal begun
            if begun:
                await self._forget()
            begun = True
            await run()

        await supervise(begin, self.stats, limit, needed=False)
        if self.stats.latest.state == "degraded":
            self.orders.close()  # Further orders are refused at once.
            reason = f"its writer has crashed too often: {self.stats.latest.last_error}"
            self.directory.publish(
                attrs.evolve(self.directory.latest, attached=False, reason=reason)
            )
            await self._forget()

    async def _forget(self) -> None:
        with suppress(trio.BrokenResourceError):  # The scheduler has ended, and nobody waits.
            await self.news.send(OrdersForgotten())
