"""Histograms as Prometheus defines them. They are frozen, so that a watch can hold one."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf

import attrs


@attrs.frozen
class Histogram:
    """Counts of values by size. `counts` has one entry for each bound (values up to it, and above
    the one before) and one for what is above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0
    """Sum of all values."""

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        """An empty histogram. latency_buckets.py has the bounds."""
        return cls(bounds, (0,) * (len(bounds) + 1))

    def with_value(self, value: float, times: int = 1) -> Histogram:
        """Add a value `times` times, at the cost of adding it once."""
        counts = list(self.counts)
        counts[bisect_left(self.bounds, value)] += times
        return Histogram(self.bounds, tuple(counts), self.total + value * times)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def buckets(self) -> list[tuple[float, int]]:
        """Cumulative buckets (bound, number of values up to it); the last bound is infinite."""
        return list(zip((*self.bounds, inf), accumulate(self.counts), strict=True))
