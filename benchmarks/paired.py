"""What a mean ratio is, and how sure that is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import exp, log, sqrt

import attrs


@attrs.frozen
class Interval:
    """Of a mean, by Student's t."""

    low: float
    mean: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ({self.low:.4f} to {self.high:.4f})"


def interval(ratios: Sequence[float], confidence: float = 0.95) -> Interval:
    """Of the mean ratio, by its logarithm."""
    of_logs = mean([log(one) for one in ratios], confidence)
    return Interval(*map(exp, attrs.astuple(of_logs)))


def mean(values: Sequence[float], confidence: float = 0.95) -> Interval:
    middle = statistics.fmean(values)
    half = (
        quantile(0.5 + confidence / 2, len(values) - 1)
        * statistics.stdev(values)
        / sqrt(len(values))
    )
    return Interval(middle - half, middle, middle + half)


def quantile(p: float, freedom: int) -> float:
    """Of Student's t, from the normal one by Abramowitz and Stegun 26.7.5: to a hundredth from 4
    degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**k for k, term in enumerate(terms))
