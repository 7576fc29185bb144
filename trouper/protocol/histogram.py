"""Figures of /metrics: fields of statistics that are counters or gauges, and histograms as
Prometheus defines them, frozen for watches."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf
from typing import Any

import attrs

METRIC = "metric"
"""Key of a field's metadata: kind, name and help of the metric that shows the field."""


def counter(name: str, help: str, default: Any = 0) -> Any:
    return attrs.field(default=default, metadata={METRIC: ("counter", name, help)})


def gauge(name: str, help: str, default: Any = 0) -> Any:
    return attrs.field(default=default, metadata={METRIC: ("gauge", name, help)})


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


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# Bucket bounds in seconds and tokens, as in vLLM's dashboards.

INTER_TOKEN_S = _bounds(
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
)
FIRST_TOKEN_S = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 "
    "160.0 640.0 2560.0"
)
# Bounds for a whole request, and for its queue, prefill and decode.
PHASE_S = _bounds(
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 "
    "1920.0 7680.0"
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Bounds for prompts and answers, the same for every model; vLLM's end at the context.
REQUEST_TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)
