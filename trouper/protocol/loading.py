"""Progress of loading a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

import attrs

Unit = Literal["bytes", "steps"]


@attrs.frozen
class Loading:
    """Progress of one stage. Bytes that need not be read do not count as done."""

    model: str
    stage: str
    done_bytes: int
    """Bytes or steps, by `unit`."""
    total_bytes: int
    unit: Unit = "bytes"


class LoadWatch(Protocol):
    """Callback for progress. Must not block: the engine's thread calls up to some hundred times a
    second."""

    def __call__(self, loading: Loading, /) -> None: ...


def stage(
    watch: LoadWatch, model: str, name: str, unit: Unit = "bytes"
) -> Callable[[int, int], None]:
    """Bind `watch` to one stage; the result takes (done, total)."""
    return lambda done, total: watch(Loading(model, name, done, total, unit))


@attrs.define
class StageTimes:
    """Passes progress on, and times each stage from its first report to its last."""

    _watch: LoadWatch
    _clock: Callable[[], float] = time.perf_counter
    _times: dict[str, tuple[float, float]] = attrs.field(factory=dict)

    def __call__(self, loading: Loading) -> None:
        now = self._clock()
        began, _ = self._times.get(loading.stage, (now, now))
        self._times[loading.stage] = began, now
        self._watch(loading)

    def __str__(self) -> str:
        return ", ".join(
            f"{stage} {ended - began:.1f} s" for stage, (began, ended) in self._times.items()
        )


def nobody_watches(_: Loading) -> None:
    pass
