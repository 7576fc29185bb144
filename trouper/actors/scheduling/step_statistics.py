"""How the steps go: a step is observed once, however many rows it has."""

from __future__ import annotations

import attrs

from trouper.protocol.health import SchedulerStats
from trouper.protocol.histogram import Histogram


@attrs.define
class StepStatistics:
    """Who decodes does so in every step. So the pause between two tokens is that between two results, and it is the same
    for all the rows that decoded in both."""

    gaps: Histogram
    step_tokens: Histogram
    _tokens_at: float | None = None
    """When the last step was answered, if it gave tokens."""

    @classmethod
    def of(cls, facts: SchedulerStats) -> StepStatistics:
        """Goes on counting where a scheduler before it crashed."""
        return cls(facts.gaps, facts.step_tokens)

    def stepped(self, now: float, *, decoding: int, produced: bool, tokens: int) -> None:
        """`decoding`: rows that had a token before this one; `produced`: some row has one now; `tokens`: prefilled and
        decoded."""
        if decoding and self._tokens_at is not None:
            self.gaps = self.gaps.with_value(now - self._tokens_at, decoding)
        if tokens:
            self.step_tokens = self.step_tokens.with_value(tokens)
        self._tokens_at = now if produced else None
