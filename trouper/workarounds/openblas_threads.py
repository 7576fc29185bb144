"""OpenBLAS gives each of its threads an equal share, so one busy core delays all of them.

Fault: the number of threads is fixed at the start. Products of few rows are bound by memory, which
one or two cores may exhaust, and a thread whose core does something else is waited for. A step of
one row on two cores takes 29 ms with one thread or two; with one core busy 34 and 60.
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

SAMPLES, TRIAL = 7, 4
"""Number of steps of which the median counts: with the present number of threads, and in a trial of
another. The first step of a trial is ignored, since threads that slept wake up in it."""
EQUAL = 1.03
"""Maximum ratio of times that count as equal. Fewer threads win then: the other cores are free for
the event loop."""
BETTER = 0.95
"""Maximum ratio of times for which more threads are taken."""
CHANGED = 1.25
"""Ratio by which steps are longer or shorter than when the choice was made, from which on the
machine's load has changed."""
FIRST_PAUSE, MAX_PAUSE = 64, 2048
"""Number of steps between trials: twice as many after each that changed nothing."""


@attrs.define
class ThreadTuner:
    """Chooses the number of threads for steps of one kind: tries half or twice as many, and
    compares."""

    threads: int
    max_threads: int
    seconds: deque[float] = attrs.field(factory=lambda: deque(maxlen=SAMPLES))
    """Durations of the last steps with `threads` threads."""
    chosen_at: float = 0.0
    """Median time of a step, in seconds, when the choice was made."""
    tried: int = 0
    """Number of threads in trial; 0: none."""
    trial: list[float] = attrs.field(factory=list)
    down: bool = True
    """Whether the next trial is with fewer threads."""
    pause: int = FIRST_PAUSE
    waited: int = FIRST_PAUSE
    """Number of steps since the last trial."""

    @property
    def next(self) -> int:
        """Number of threads of the next step."""
        return self.tried or self.threads

    def record(self, seconds: float) -> None:
        """Learn from a step with `next` threads."""
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
    """Sets OpenBLAS's number of threads for each step. Without OpenBLAS, or with one thread, it
    does nothing.

    The number is the process's. Where several models step at the same time, a step may run with the
    number that another one has set, which changes its time and nothing else."""

    def __init__(self, library: Path | None) -> None:
        self._blas: ctypes.CDLL | None = None
        self._max_threads = 1
        if library is not None and workarounds.is_active(__name__):
            self._blas, self._max_threads = _opened(library)
        self._tuners: dict[int, ThreadTuner] = {}

    def begin(self, rows: int) -> None:
        """Set the number for a step that decodes this many rows and does nothing else; 0 for other
        steps, which use all."""
        if self._blas is not None and self.would_change(rows):
            self._blas.scipy_openblas_set_num_threads(self._number(rows))

    def would_change(self, rows: int) -> bool:
        """Whether `begin` would set another number, which no product may be running meanwhile."""
        if self._blas is None or self._max_threads == 1:
            return False
        return bool(self._number(rows) != self._blas.scipy_openblas_get_num_threads())

    def _number(self, rows: int) -> int:
        return self._tuner(rows).next if rows else self._max_threads

    def record(self, rows: int, seconds: float) -> None:
        """Learn from such a step."""
        if rows and self._max_threads > 1:
            self._tuner(rows).record(seconds)

    def _tuner(self, rows: int) -> ThreadTuner:
        return self._tuners.setdefault(
            rows.bit_length(), ThreadTuner(self._max_threads, self._max_threads)
        )


@cache
def _opened(library: Path) -> tuple[ctypes.CDLL, int]:
    """Return the library and its number of threads at the first call, before any step has changed
    it."""
    blas = ctypes.CDLL(str(library))
    return blas, int(blas.scipy_openblas_get_num_threads())
