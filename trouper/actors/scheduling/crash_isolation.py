"""Admission while some rows must share no step with others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from trouper.actors.scheduling.crash_attribution import Standing

LONE_PATIENCE_S = 10.0
"""Time for which others may overtake a request that must run alone; after it no request is admitted
before that one."""


class Queued(Protocol):
    """A request that waits for a row."""

    @property
    def standing(self) -> Standing: ...

    @property
    def since(self) -> float: ...


Q = TypeVar("Q", bound=Queued)


def may_enter(
    waiting: Sequence[Q],
    present: Collection[Standing],
    trials: Sequence[Standing],
    *,
    idle: bool,
    apart: bool,
    now: float,
) -> Sequence[Q]:
    """Requests of the queue that may be admitted now, in order. A row that runs alone enters when
    nothing is in flight (`idle`), so that a crash can have come from nobody else. `present`: rows
    in the engine, and those whose last plans are not answered yet. `trials`: suspects in the order
    of their trials. `apart`: all rows run alone."""
    if any(standing.isolated for standing in present) or (apart and present):
        return ()
    free = idle and not present
    if trials:
        first = next(queued for queued in waiting if queued.standing is trials[0])
        return (first,) if free else ()
    if apart:
        return waiting[:1] if free else ()
    return _with_lone(waiting, free=free, now=now)


def _with_lone(waiting: Sequence[Q], *, free: bool, now: float) -> Sequence[Q]:
    lone = [index for index, queued in enumerate(waiting) if queued.standing.alone]
    if not lone:
        return waiting
    if lone[0] == 0 and free:
        return waiting[:1]
    overdue = next(
        (index for index in lone if now - waiting[index].since > LONE_PATIENCE_S), len(waiting)
    )
    return [queued for queued in waiting[:overdue] if not queued.standing.alone]
