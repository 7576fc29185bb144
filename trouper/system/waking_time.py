"""Time awake of this process: jumps between looks do not count (SIGSTOP, a frozen container,
sleep).

`WakingClock`: the same for `trio.run`, without blocks of the event loop beyond MAX_GAP_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio.abc

LOOK_S = 0.5  # The event loop's longest sleep between looks.
MAX_GAP_S = 1.0
"""Between two looks; beyond, the process was stopped."""


class WakingTime:
    """Monotonic seconds, with a look every LOOK_S while counting."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source, self._seen_at, self._stopped_s = source, source(), 0.0

    def now(self) -> float:
        at = self._source()
        gap, self._seen_at = at - self._seen_at, at
        if gap > MAX_GAP_S:
            self._stopped_s += gap - LOOK_S
        return at - self._stopped_s


class WakingClock(trio.abc.Clock):
    """Looks around each sleep."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._time = WakingTime(source)

    def start_clock(self) -> None:
        """No deadline is set yet."""

    def current_time(self) -> float:
        return self._time.now()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return min(deadline - self._time.now(), LOOK_S)
