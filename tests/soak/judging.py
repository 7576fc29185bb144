"""From samples to a verdict: windows of one cycle of turns each, of these the second part, and the
slope of each series.

A window has all kinds of turns in it, so that its median does not depend on whose turn it is. The
first part is left out: caches, heaps and the stored responses fill up to their bounds there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Literal

import attrs

from tests.soak.load import Tally
from tests.soak.sampling import Sample
from tests.soak.servers import SSD_BYTES
from tests.soak.slopes import Slope, percentile, theil_sen

HOUR_S = 3600.0
WARM = 1 / 3
"""Part of the soak that is not judged."""
TOLERANCE = 0.01
"""A certain slope of less than so much of the level an hour is told, and fails nobody."""
Points = list[tuple[float, float]]
"""(hours, value) of each window."""


@attrs.frozen
class Kind:
    """A series by the end of its name. `bad`: the verdict that fails."""

    unit: str
    divisor: float = 1.0
    bad: Literal["grows", "falls"] | None = "grows"


MEASURED = 1.05
"""Files are evicted and written while they are added up, so that some count that were not there at
one time."""
KINDS = {
    "anonymous": Kind("MB", 1e6),
    "resident": Kind("MB", 1e6, None),
    "mlx_active": Kind("MB", 1e6),
    "descriptors": Kind("descriptors"),
    "threads": Kind("threads"),
    "children": Kind("processes"),
    "tasks": Kind("tasks"),
    "files": Kind("files"),
    "disk_bytes": Kind("MB", 1e6),
    "temporary_files": Kind("files"),
    "load": Kind("processes", bad=None),
}
"""Of samples. What the machine's load does is shown, since latency follows it."""


@attrs.frozen
class Judged:
    """One series: its windows, those of the second part, and what their slope says."""

    name: str
    kind: Kind
    points: Points
    slope: Slope

    @property
    def verdict(self) -> str:
        return self.slope.verdict(TOLERANCE)

    @property
    def failed(self) -> bool:
        return self.verdict == self.kind.bad

    def __str__(self) -> str:
        slope = self.slope
        return (
            f"{self.name}: {slope.level:.4g} {self.kind.unit}, slope {slope.value:+.3g} an hour "
            f"({slope.low:+.3g} to {slope.high:+.3g}): "
            f"{self.verdict}{' FAILS' if self.failed else ''}"
        )


@attrs.frozen
class Report:
    judged: Sequence[Judged]
    faults: Sequence[str]
    """What must not be at all: wrong answers, errors, restarts, a directory beyond its bound."""

    @property
    def failed(self) -> bool:
        return bool(self.faults) or any(series.failed for series in self.judged)

    @property
    def told(self) -> bool:
        """Whether there were windows enough for each slope."""
        return all(
            series.verdict != "unknown"
            for series in self.judged
            if series.kind.bad and series.points
        )


def judge(samples: Sequence[Sample], tally: Tally, window_s: float) -> Report:
    """`window_s`: of one cycle of turns."""
    series = [
        *_sampled(samples, window_s),
        *_rates(samples, window_s),
        *_latencies(tally, window_s),
    ]
    end_h = max((sample["at"] for sample in samples), default=0.0) / HOUR_S
    judged = []
    for name, kind, points in series:
        late = [point for point in points if point[0] >= end_h * WARM]
        judged.append(Judged(name, kind, points, theil_sen(late)))
    return Report(judged, [*_faults(samples, tally)])


def _windows(
    values: Sequence[tuple[float, float]], window_s: float, of: Callable[[list[float]], float]
) -> Points:
    """(seconds, value) to a point for each whole window."""
    grouped: dict[int, list[float]] = {}
    for at, value in values:
        grouped.setdefault(int(at // window_s), []).append(value)
    whole = sorted(grouped)[:-1]
    return [((number + 0.5) * window_s / HOUR_S, of(grouped[number])) for number in whole]


def _sampled(samples: Sequence[Sample], window_s: float) -> Iterator[tuple[str, Kind, Points]]:
    names = {name: None for sample in samples for name in sample}
    for name in names:
        kind = KINDS.get(name.rpartition(".")[2].split(" of ")[0])
        if kind is not None:
            values = [
                (sample["at"], sample[name] / kind.divisor) for sample in samples if name in sample
            ]
            yield name, kind, _windows(values, window_s, median)


def increments(samples: Sequence[Sample], name: str) -> Iterator[tuple[float, float]]:
    """(when, how much more) of a counter; one of a model that was loaded again begins at 0."""
    last: float | None = None
    for sample in samples:
        if name in sample:
            if last is not None:
                value = sample[name]
                yield sample["at"], value - last if value >= last else value
            last = sample[name]


def _rates(samples: Sequence[Sample], window_s: float) -> Iterator[tuple[str, Kind, Points]]:
    """Hit rate, and CPU time for a token, which neighbours on the machine hardly change."""
    groups = {name.partition(".")[0]: None for sample in samples for name in sample if "." in name}

    def summed(name: str) -> dict[float, float]:
        return dict(_windows([*increments(samples, name)], window_s, sum))

    for group in groups:
        hit, queried = summed(f"{group}.hit"), summed(f"{group}.queried")
        rate = [(at, hit.get(at, 0.0) / tokens) for at, tokens in queried.items() if tokens]
        yield f"{group}.hit rate", Kind("of 1", bad="falls"), rate
        generated, prefilled = summed(f"{group}.generated"), summed(f"{group}.prefilled")
        for name in {
            name for sample in samples for name in sample if name.startswith(f"{group}.cpu_s")
        }:
            tokens = {at: generated[at] + prefilled.get(at, 0.0) for at in generated}
            points = [
                (at, 1000 * cpu / tokens[at]) for at, cpu in summed(name).items() if tokens.get(at)
            ]
            yield name.replace("cpu_s", "CPU of a token"), Kind("ms"), points


def _latencies(tally: Tally, window_s: float) -> Iterator[tuple[str, Kind, Points]]:
    for name, values in (("first text", tally.firsts), ("gap between texts", tally.gaps)):
        for share in (0.5, 0.99):
            points = _windows(values, window_s, partial(percentile, share=share))
            yield (
                f"{name}, p{100 * share:.0f}",
                Kind("ms"),
                [(at, 1000 * seconds) for at, seconds in points],
            )


def _faults(samples: Sequence[Sample], tally: Tally) -> Iterator[str]:
    yield from (f"wrong answer: {wrong}" for wrong in tally.wrong)
    yield from (f"error: {error}" for error in tally.errors)
    for name in {name: None for sample in samples for name in sample}:
        field = name.rpartition(".")[2]
        highest = max(sample.get(name, 0.0) for sample in samples)
        if field in ("restarts", "crashes", "damaged") and highest:
            yield f"{name}: {highest:.0f}"
        if field == "disk_bytes" and highest > SSD_BYTES * MEASURED:
            yield f"{name}: {highest / 1e6:.0f} MB, beyond its bound of {SSD_BYTES / 1e6:.0f}"
