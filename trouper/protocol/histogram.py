"""Histograms as Prometheus defines them, frozen for watches."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf

import attrs


@attrs.frozen
class Histogram:
    """`counts[i]`: values above bounds[i - 1], up to bounds[i]; the last entry has no upper
    bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, (0,) * (len(bounds) + 1))

    def with_value(self, value: float, times: int = 1) -> Histogram:
        """Add a value several times at the cost of one."""
        counts = list(self.counts)
        counts[bisect_left(self.bounds, value)] += times
        return Histogram(self.bounds, tuple(counts), self.total + value * times)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def buckets(self) -> list[tuple[float, int]]:
        """Cumulative (bound, number of values up to the bound); the last bound is infinite."""
        return list(zip((*self.bounds, inf), accumulate(self.counts), strict=True))
