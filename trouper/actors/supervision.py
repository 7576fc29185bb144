"""Restarting what crashed, within limits."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import attrs
import trio

from trouper.protocol.health import ActorFacts
from trouper.protocol.watch import Watch

log = logging.getLogger("trouper.supervision")


@attrs.frozen
class RestartLimit:
    """At most `most` crashes in `within_s`; each restart waits twice as long as the one before."""

    most: int = 3
    within_s: float = 60.0
    pause_s: float = 0.25


async def supervise(
    run: Callable[[], Awaitable[None]],
    facts: Watch[ActorFacts],
    limit: RestartLimit,
    *,
    needed: bool,
) -> None:
    """Run until it returns. Too many crashes are the parent's problem if it is `needed`; otherwise the server goes on
    without it, degraded and saying so."""
    crashes: list[float] = []
    while True:
        facts.publish(attrs.evolve(facts.latest, state="running"))
        try:
            await run()
        except* Exception as group:
            crashes = note_crash(group, crashes, facts, limit)
            if len(crashes) > limit.most:
                facts.publish(attrs.evolve(facts.latest, state="failed" if needed else "degraded"))
                if needed:
                    raise
        else:
            facts.publish(attrs.evolve(facts.latest, state="stopped"))
            return
        if len(crashes) > limit.most:
            return
        await trio.sleep(limit.pause_s * 2 ** (len(crashes) - 1))


def note_crash(
    group: BaseExceptionGroup[Exception], crashes: list[float], facts: Watch[ActorFacts], limit: RestartLimit
) -> list[float]:
    """The crashes that still count, this one included."""
    now = trio.current_time()
    cause = innermost(group)
    name = facts.latest.name
    log.error("%s crashed: %s: %s", name, type(cause).__name__, cause, exc_info=group)
    facts.publish(
        attrs.evolve(
            facts.latest,
            state="restarting",
            restarts=facts.latest.restarts + 1,
            last_error=f"{type(cause).__name__}: {cause}",
        )
    )
    return [at for at in crashes if now - at < limit.within_s] + [now]


def innermost(error: BaseException) -> BaseException:
    """The first real exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
