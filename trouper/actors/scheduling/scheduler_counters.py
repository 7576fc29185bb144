"""Counters and gauges of the scheduler, published together once a step."""

from __future__ import annotations

from typing import Any

import attrs

from trouper.protocol.health import SchedulerStats
from trouper.protocol.watch import Watch


class SchedulerCounters:
    """Events since the last publication, and the published values, which a new scheduler
    continues."""

    def __init__(self, watch: Watch[SchedulerStats]) -> None:
        self._watch = watch
        # By the name of their field: `attrs.evolve` would look at each of 40 fields once a step.
        self._values: dict[str, Any] = {
            name: getattr(watch.latest, name) for name in attrs.fields_dict(SchedulerStats)
        }
        self._values["stalled_since"] = None

    def add(self, **events: int) -> None:
        values = self._values
        for name, number in events.items():
            values[name] += number

    def stalled(self, since: float) -> None:
        self._values["stalled_since"] = since
        self.add(stalls=1)

    def answered(self) -> None:
        """End a stall."""
        self._values["stalled_since"] = None

    def publish(self, **gauges: Any) -> None:
        """Publish counts, and gauges by field name."""
        self._values.update(gauges)
        self._watch.publish(SchedulerStats(**self._values))
