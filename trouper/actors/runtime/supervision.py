from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import attrs
import trio

from trouper.actors.scheduling.crash_attribution import UNEXPLAINED, Content, Verdict
from trouper.protocol.health import ActorStats, DirectoryStats
from trouper.protocol.problems import ActorFailed, leaves
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskNews, DiskOrder, OrdersForgotten

log = logging.getLogger("trouper.supervision")

Judge = Callable[[BaseException], Verdict]
ENDS_OF_CHANNELS = (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError)
"""Exceptions by which other actors of a group observe a crash."""


@attrs.frozen
class RestartLimit:
    """At most `max_crashes` crashes in `within_s`; each restart waits twice as long as the one
    before."""

    max_crashes: int = 3
    within_s: float = 60.0
    pause_s: float = 0.25


@attrs.define
class CrashCount:
    """The crashes that count towards a limit, without those explained by a conviction. Pure."""

    limit: RestartLimit
    _counted: list[tuple[float, frozenset[Content]]] = attrs.field(factory=list)

    def add(self, verdict: Verdict, now: float) -> None:
        self._counted = [
            (at, suspects)
            for at, suspects in self._counted
            if now - at < self.limit.within_s and verdict.convicted not in suspects
        ]
        if verdict.counts:
            self._counted.append((now, verdict.suspects))

    @property
    def too_many(self) -> bool:
        return len(self._counted) > self.limit.max_crashes

    @property
    def pause_s(self) -> float:
        return self.limit.pause_s * 2.0 ** max(0, len(self._counted) - 1)

    def __len__(self) -> int:
        return len(self._counted)


async def supervise(
    run: Callable[[], Awaitable[None]],
    stats: Watch[ActorStats],
    limit: RestartLimit,
    *,
    needed: bool,
    judge: Judge = lambda _: UNEXPLAINED,
) -> None:
    """Run an actor until it returns, with restarts after crashes. After too many, raises
    `ActorFailed` if the actor is `needed`; else the server goes on in the state "degraded"."""
    crashes = CrashCount(limit)
    while True:
        stats.publish(attrs.evolve(stats.latest, state="running"))
        try:
            await run()
        except* Exception as group:  # noqa: BLE001 - supervision is what a crash ends in.
            crashes.add(note_crash(innermost(group), stats, judge), trio.current_time())
        else:
            stats.publish(attrs.evolve(stats.latest, state="stopped"))
            return
        if crashes.too_many:
            break
        await trio.sleep(crashes.pause_s)
    stats.publish(attrs.evolve(stats.latest, state="failed" if needed else "degraded"))
    if needed:
        last, name = stats.latest.last_error, stats.latest.name
        raise ActorFailed(
            f"{name} crashed {len(crashes)} times within {limit.within_s:g} s, at last with {last}"
        )


def note_crash(cause: BaseException, stats: Watch[ActorStats], judge: Judge) -> Verdict:
    # Nothing may keep the exception: its traceback holds frames of the engine, with all rows' KV.
    text = f"{type(cause).__name__}: {cause}"
    log.error("%s crashed: %s", stats.latest.name, text, exc_info=cause)
    stats.publish(
        attrs.evolve(
            stats.latest, state="restarting", restarts=stats.latest.restarts + 1, last_error=text
        )
    )
    return judge(cause)


def innermost(error: BaseException) -> BaseException:
    """The first exception inside nested groups that is no closed channel."""
    found = list(leaves(error))
    return next((leaf for leaf in found if not isinstance(leaf, ENDS_OF_CHANNELS)), found[0])


@attrs.frozen(kw_only=True, eq=False)
class WriterSupervision:
    """Forgotten orders are answered after a crash; after too many crashes the server goes on
    without a disk. `orders`, `news`: channels of the writer; `stats`: of the actor."""

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
