"""The slope of a series with a confidence interval, and what it means.

Theil-Sen: the median of the slopes of all pairs of points, which outliers hardly move. Its interval
is Sen's (1968), from the variance of Kendall's S; the variance is larger where neighbouring
residuals resemble each other (Hamed and Rao 1998, lag 1 alone).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist, median
from typing import Literal

import attrs

LEVEL = 0.999
"""Of each interval: some twenty series are judged, and all of them together may give a false alarm
in one run of fifty."""
FEWEST = 8
"""Points; of fewer nothing can be told."""
Verdict = Literal["flat", "negligible", "grows", "falls", "unknown"]


@attrs.frozen
class Slope:
    """A unit of y for a unit of x; `level`: the median of y."""

    value: float
    low: float
    high: float
    level: float

    def verdict(self, tolerance: float) -> Verdict:
        """`tolerance`: a share of the level for one unit of x. A slope that is certainly not zero
        is negligible if even its nearer bound is less."""
        if math.isinf(self.low) and math.isinf(self.high):
            return "unknown"
        if self.low <= 0 <= self.high:
            return "flat"
        if min(abs(self.low), abs(self.high)) <= tolerance * abs(self.level):
            return "negligible"
        return "grows" if self.low > 0 else "falls"


def theil_sen(points: Sequence[tuple[float, float]], level: float = LEVEL) -> Slope:
    """Of (x, y), whose x differ."""
    count = len(points)
    middle = median(y for _, y in points) if points else 0.0
    if count < FEWEST:
        return Slope(0.0, -math.inf, math.inf, middle)
    slopes = sorted(
        (b - y) / (a - x) for place, (x, y) in enumerate(points) for a, b in points[place + 1 :]
    )
    value = median(slopes)
    variance = count * (count - 1) * (2 * count + 5) / 18 * _inflation(points, value)
    reach = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance)
    first, last = math.floor((len(slopes) - reach) / 2), math.ceil((len(slopes) + reach) / 2)
    low = slopes[first] if first >= 0 else -math.inf
    high = slopes[last] if last < len(slopes) else math.inf
    return Slope(value, low, high, middle)


def _inflation(points: Sequence[tuple[float, float]], slope: float) -> float:
    """How much less independent points say than as many that do not resemble their neighbours."""
    residuals = [y - slope * x for x, y in points]
    centre = median(residuals)
    ranks = _ranks([residual - centre for residual in residuals])
    power = sum(rank * rank for rank in ranks)
    if not power:
        return 1.0
    lag = sum(a * b for a, b in pairwise(ranks)) / power
    lag = min(max(lag, 0.0), 0.9)
    return (1 + lag) / (1 - lag)


def _ranks(values: Sequence[float]) -> list[float]:
    """Around zero; equal values have equal ranks."""
    ordered = sorted(values)
    firsts: dict[float, int] = {}
    counts: dict[float, int] = {}
    for place, value in enumerate(ordered):
        firsts.setdefault(value, place)
        counts[value] = counts.get(value, 0) + 1
    centre = (len(values) - 1) / 2
    return [firsts[value] + (counts[value] - 1) / 2 - centre for value in values]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
