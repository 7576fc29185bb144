"""OpenBLAS gives each of its threads an equal share, so one busy core delays all of them.

Fault: the number of threads is fixed at the start.
Seen: scipy-openblas32 0.3.34.
Upstream: by design (OPENBLAS_NUM_THREADS).
Without: decode steps use all threads, and are slower beside other work.
"""

# The number for decode steps is chosen by measurement: half or twice as many are tried.

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from pathlib import Path
from statistics import median

import attrs

from trouper import workarounds

SAMPLES, TRIAL = 7, 4  # Steps per median. A trial's first step wakes threads up and is ignored.
EQUAL = 1.03  # Maximum ratio of equal times. Fewer threads leave cores to the event loop.
BETTER = 0.95
"""Maximum ratio of times for more threads."""
CHANGED = 1.25
"""Ratio of times under another load."""
FIRST_PAUSE, MAX_PAUSE = 64, 2048
"""Steps between trials, doubled after each without a change."""


@attrs.define
class ThreadTuner:
    """Tries half or twice the threads for steps of one kind."""

    threads: int
    max_threads: int
    seconds: deque[float] = attrs.field(factory=lambda: deque(maxlen=SAMPLES))
    """Durations of the last steps."""
    chosen_at: float = 0.0
    """Median duration (s) at the choice."""
    tried: int = 0
    """Threads in trial; 0: none."""
    trial: list[float] = attrs.field(factory=list)
    down: bool = True
    pause: int = FIRST_PAUSE
    waited: int = FIRST_PAUSE
    """Steps since the last trial."""

    @property
    def next(self) -> int:
        return self.tried or self.threads

    def record(self, seconds: float) -> None:
        if self.tried:
            self.trial.append(seconds)
            if len(self.trial) == TRIAL:
                self._judge()
            return
        self.seconds.append(seconds)
        self.waited += 1
        if len(self.seconds) == SAMPLES and (self.waited >= self.pause or self._has_changed()):
            self._try()

    def _has_changed(self) -> bool:
        ratio = median(self.seconds) / self.chosen_at if self.chosen_at else 1.0
        return not 1 / CHANGED <= ratio <= CHANGED

    def _try(self) -> None:
        if self.threads in (1, self.max_threads):
            self.down = self.threads > 1
        self.tried = self.threads // 2 if self.down else min(2 * self.threads, self.max_threads)
        self.trial, self.waited = [], 0

    def _judge(self) -> None:
        present, other = median(self.seconds), median(self.trial[1:])
        self.chosen_at = present
        if other <= present * (EQUAL if self.tried < self.threads else BETTER):
            self.threads, self.chosen_at, self.pause = self.tried, other, FIRST_PAUSE
            self.waited = self.pause  # The next number in this direction is tried at once.
            self.seconds.clear()
        else:
            self.down, self.pause = not self.down, min(2 * self.pause, MAX_PAUSE)
        self.tried = 0


class BlasThreads:
    """Sets OpenBLAS's threads for each step.

    The number is the process's: models may share one choice.
    """

    def __init__(self, library: Path | None) -> None:
        self._blas: ctypes.CDLL | None = None
        self._max_threads = 1
        if library is not None and workarounds.is_active(__name__):
            self._blas, self._max_threads = _opened(library)
        self._tuners: dict[int, ThreadTuner] = {}

    def begin(self, rows: int) -> None:
        """For `rows` decoding rows; 0: all threads."""
        if self._blas is not None and self.would_change(rows):
            self._blas.scipy_openblas_set_num_threads(self._number(rows))

    def would_change(self, rows: int) -> bool:
        """Whether `begin` would set another number; no product may run then."""
        if self._blas is None or self._max_threads == 1:
            return False
        return bool(self._number(rows) != self._blas.scipy_openblas_get_num_threads())

    def _number(self, rows: int) -> int:
        return self._tuner(rows).next if rows else self._max_threads

    def record(self, rows: int, seconds: float) -> None:
        if rows and self._max_threads > 1:
            self._tuner(rows).record(seconds)

    def _tuner(self, rows: int) -> ThreadTuner:
        return self._tuners.setdefault(
            rows.bit_length(), ThreadTuner(self._max_threads, self._max_threads)
        )


@cache
def _opened(library: Path) -> tuple[ctypes.CDLL, int]:
    blas = ctypes.CDLL(str(library))
    return blas, int(blas.scipy_openblas_get_num_threads())
