"""Counters and gauges of the scheduler, published together once a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

from trouper.protocol.health import SchedulerStats
from trouper.protocol.watch import Watch


class SchedulerCounters:
    """Events since the last publication, and the values that were published last. A new scheduler goes on from these."""

    def __init__(self, watch: Watch[SchedulerStats]) -> None:
        self._watch = watch
        self._stats = attrs.evolve(watch.latest, stalled_since=None)
        self._added = Counter[str]()

    def add(self, **events: int) -> None:
        """Count events, by the name of their field in `SchedulerStats`."""
        self._added.update(events)

    def stalled(self, since: float) -> None:
        self._stats = attrs.evolve(self._stats, stalled_since=since, stalls=self._stats.stalls + 1)

    def answered(self) -> None:
        """A plan was answered: a stall is over."""
        if self._stats.stalled_since is not None:
            self._stats = attrs.evolve(self._stats, stalled_since=None)

    def publish(self, **gauges: Any) -> None:
        """Publish what was counted, and gauges by the name of their field."""
        added = {name: getattr(self._stats, name) + number for name, number in self._added.items()}
        self._added.clear()
        self._stats = attrs.evolve(self._stats, **added, **gauges)
        self._watch.publish(self._stats)
