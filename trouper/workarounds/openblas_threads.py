"""OpenBLAS gives each of its threads an equal share, so one busy core delays all of them.

Fault: the number of threads is fixed at the start.
Seen: scipy-openblas32 0.3.34.
Upstream: by design (OPENBLAS_NUM_THREADS).
Without: each step uses all threads, and is slower beside other work.
"""

# No step uses more threads than there are cores that other processes leave free. Below that bound
# the number for decode steps is chosen by measurement: half or twice as many are tried.

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable
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
LOOK_S = 0.25
"""Least time between two looks at other processes. Linux counts in hundredths of a second."""


@attrs.frozen
class CpuTimes:
    """Seconds of all cores, of which only differences count."""

    free: float
    """Idle, or with processes of a lower priority."""
    own: float
    """Used by this process."""


def read_cpu_times() -> CpuTimes:
    """Read /proc/stat (Linux, proc_stat(5)). Raises OSError and ValueError."""
    with Path("/proc/stat").open("rb") as file:
        _user, niced, _system, idle, disk = map(int, file.readline().split()[1:6])
    is_niced = os.getpriority(os.PRIO_PROCESS, 0) > 0
    ticks = idle + disk + (0 if is_niced else niced)
    return CpuTimes(ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class FreeCores:
    """Counts the cores that other processes leave to this one."""

    def __init__(
        self,
        read: Callable[[], CpuTimes] = read_cpu_times,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._number = os.cpu_count() or 1
        self._times, self._read_at = read(), clock()

    def count(self) -> int:
        """Return the mean since the last look, at least 1. Looks again after `LOOK_S`."""
        seconds = self._clock() - self._read_at
        if seconds >= LOOK_S:
            before, self._times = self._times, self._read()
            self._read_at += seconds
            left = self._times.free - before.free + self._times.own - before.own
            self._number = max(1, round(left / seconds))
        return self._number


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

    def bound(self, max_threads: int) -> None:
        """Use no more threads from the next step on."""
        if max_threads > self.max_threads:
            self.waited = self.pause  # More are tried at once.
        self.max_threads = max_threads
        if self.next > max_threads:
            self.threads, self.tried = min(self.threads, max_threads), 0
            self.seconds.clear()

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

    def __init__(self, library: Path | None, cores: FreeCores | None = None) -> None:
        self._blas: ctypes.CDLL | None = None
        self._max_threads = 1
        if library is not None and workarounds.is_active(__name__):
            self._blas, self._max_threads = _opened(library)
        self._bound = self._max_threads
        self._cores = cores or (None if self._blas is None else cores_left())
        self._tuners: dict[int, ThreadTuner] = {}

    def begin(self, rows: int) -> None:
        """For `rows` decoding rows; 0: anything else, and no product runs."""
        if self._blas is None:
            return
        if not rows:
            self._look()
        if self.would_change(rows):
            self._blas.scipy_openblas_set_num_threads(self._number(rows))

    def would_change(self, rows: int) -> bool:
        """Whether `begin` would set another number; no product may run then."""
        if self._blas is None or self._max_threads == 1:
            return False
        return bool(self._number(rows) != self._blas.scipy_openblas_get_num_threads())

    def _number(self, rows: int) -> int:
        return self._tuner(rows).next if rows else self._bound

    def record(self, rows: int, seconds: float) -> None:
        if rows and self._max_threads > 1:
            self._tuner(rows).record(seconds)
            self._look()

    def _look(self) -> None:
        # Not between `would_change` and `begin`, which must agree.
        if self._cores is None:
            return
        self._bound = min(self._cores.count(), self._max_threads)
        for tuner in self._tuners.values():
            tuner.bound(self._bound)

    def _tuner(self, rows: int) -> ThreadTuner:
        return self._tuners.setdefault(rows.bit_length(), ThreadTuner(self._bound, self._bound))


@cache
def cores_left() -> FreeCores | None:
    """One for the process, counting since the first call. None: the system does not tell."""
    try:
        return FreeCores()
    except (OSError, ValueError):
        return None


@cache
def _opened(library: Path) -> tuple[ctypes.CDLL, int]:
    blas = ctypes.CDLL(str(library))
    return blas, int(blas.scipy_openblas_get_num_threads())
