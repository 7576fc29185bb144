"""Time for which this process was awake, for time limits. A process that was stopped (SIGSTOP, a
frozen container, a laptop asleep) was not late meanwhile: whoever looks at the time often sees a
jump, which does not count.

`WakingClock` is a clock for `trio.run`, so that no deadline of a program passes while it is
stopped. What blocks the event loop for longer than MAX_GAP_S stops all tasks as well, and does not
count either.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio.abc

LOOK_S = 0.5
"""Longest sleep of the event loop, after which it looks at the time."""
MAX_GAP_S = 1.0
"""Time between two looks beyond which the process was stopped."""


class WakingTime:
    """A monotonic time in seconds. It must be looked at every LOOK_S while it counts."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source, self._seen_at, self._stopped_s = source, source(), 0.0

    def now(self) -> float:
        """Look at the time."""
        at = self._source()
        gap, self._seen_at = at - self._seen_at, at
        if gap > MAX_GAP_S:
            self._stopped_s += gap - LOOK_S
        return at - self._stopped_s


class WakingClock(trio.abc.Clock):
    """The clock of an event loop, which looks at it before and after each sleep."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._time = WakingTime(source)

    def start_clock(self) -> None:
        """Begin. A gap before it does no harm, since no deadline is set yet."""

    def current_time(self) -> float:
        return self._time.now()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return min(deadline - self._time.now(), LOOK_S)
