"""A step is observed once, however many rows take part."""

from __future__ import annotations

from math import inf
from typing import Any

import attrs

from trouper.protocol.health import SchedulerStats
from trouper.protocol.histogram import Histogram
from trouper.protocol.kv import BankStats
from trouper.protocol.plans import Plan, Stepped
from trouper.protocol.watch import Watch

BANKS_EVERY_S = 1.0


@attrs.define
class StepStatistics:
    # Rows decode in every step, so all have the same latency: the time between two results.

    inter_token_latency: Histogram
    step_tokens: Histogram
    # Time of the last result, if it had tokens.
    _tokens_at: float | None = None
    _banks: tuple[BankStats, ...] = ()
    _banks_due_at: float = -inf

    @classmethod
    def of(cls, stats: SchedulerStats) -> StepStatistics:
        return cls(stats.inter_token_latency, stats.step_tokens)

    @property
    def gauges(self) -> dict[str, Any]:
        return {
            "inter_token_latency": self.inter_token_latency,
            "step_tokens": self.step_tokens,
            "banks": self._banks,
        }

    def request_banks(self, plan: Plan, now: float) -> Plan:
        """Let a plan report the banks once a second, and when work ends."""
        if plan.has_work and now < self._banks_due_at:
            return plan
        if plan.has_work:
            self._banks_due_at = now + BANKS_EVERY_S
        return attrs.evolve(plan, report_banks=True)

    def stepped(self, stepped: Stepped, now: float, *, decoding: int, tokens: int) -> None:
        produced = bool(stepped.rows)
        if stepped.banks is not None:
            self._banks = stepped.banks
        if decoding and self._tokens_at is not None:
            self.inter_token_latency = self.inter_token_latency.with_value(
                now - self._tokens_at, decoding
            )
        if tokens:
            self.step_tokens = self.step_tokens.with_value(tokens)
        self._tokens_at = now if produced else None


class SchedulerCounters:
    """Events since the last publication, and the values published before."""

    def __init__(self, watch: Watch[SchedulerStats]) -> None:
        self._watch = watch
        # By the name of their field: `attrs.evolve` would look at each of 40 fields once a step.
        self._values: dict[str, Any] = {
            name: getattr(watch.latest, name) for name in attrs.fields_dict(SchedulerStats)
        }
        self._values["stalled_since"] = None

    def add(self, **events: float) -> None:
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
