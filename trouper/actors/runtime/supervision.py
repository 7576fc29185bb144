"""Restarting what crashed, within limits."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator

import attrs
import trio

from trouper.actors.scheduling.crash_attribution import UNEXPLAINED, Content, Verdict
from trouper.protocol.health import ActorStats
from trouper.protocol.problems import ActorFailed
from trouper.protocol.watch import Watch

log = logging.getLogger("trouper.supervision")

Judge = Callable[[BaseException], Verdict]
"""What a crash means for the limit."""
ENDS_OF_CHANNELS = (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError)
"""What the crash of one actor looks like to the others of its group."""


@attrs.frozen
class RestartLimit:
    """At most `most` crashes in `within_s`; each restart waits twice as long as the one before."""

    most: int = 3
    within_s: float = 60.0
    pause_s: float = 0.25


@attrs.define
class CrashCount:
    """The crashes that count towards a limit. A crash is explained, and does not count any more, when one of its suspects is
    convicted: then it cannot come again, since that content is refused. Pure."""

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
        return len(self._counted) > self.limit.most

    @property
    def pause_s(self) -> float:
        """Before the next start."""
        return self.limit.pause_s * 2.0 ** max(0, len(self._counted) - 1)

    def __len__(self) -> int:
        return len(self._counted)


async def supervise(
    run: Callable[[], Awaitable[None]],
    facts: Watch[ActorStats],
    limit: RestartLimit,
    *,
    needed: bool,
    judge: Judge = lambda _: UNEXPLAINED,
) -> None:
    """Run until it returns. Too many crashes end it: raises `ActorFailed` if it is `needed`; otherwise the server goes on
    without it, degraded and saying so."""
    crashes = CrashCount(limit)
    while True:
        facts.publish(attrs.evolve(facts.latest, state="running"))
        try:
            await run()
        except* Exception as group:  # noqa: BLE001 - supervision is what a crash ends in.
            crashes.add(note_crash(innermost(group), facts, judge), trio.current_time())
        else:
            facts.publish(attrs.evolve(facts.latest, state="stopped"))
            return
        if crashes.too_many:
            break
        await trio.sleep(crashes.pause_s)
    facts.publish(attrs.evolve(facts.latest, state="failed" if needed else "degraded"))
    if needed:
        last, name = facts.latest.last_error, facts.latest.name
        raise ActorFailed(f"{name} crashed {len(crashes)} times within {limit.within_s:g} s, at last with {last}")


def note_crash(cause: BaseException, facts: Watch[ActorStats], judge: Judge) -> Verdict:
    """Nothing here may keep the exception: its traceback holds frames of the engine, and with them all the rows' KV."""
    said = f"{type(cause).__name__}: {cause}"
    log.error("%s crashed: %s", facts.latest.name, said, exc_info=cause)
    facts.publish(attrs.evolve(facts.latest, state="restarting", restarts=facts.latest.restarts + 1, last_error=said))
    return judge(cause)


def innermost(error: BaseException) -> BaseException:
    """The first real exception inside nested groups; not an end of a channel, if there is anything else: that is how the
    others hear of it."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if not isinstance(leaf, ENDS_OF_CHANNELS)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
