"""Step statistics. A step is observed once, however many rows it has."""

from __future__ import annotations

import attrs

from trouper.protocol.health import SchedulerStats
from trouper.protocol.histogram import Histogram


@attrs.define
class StepStatistics:
    """Histograms of inter-token latencies and of tokens a step. A decoding row decodes in every step, so the latency between two
    of its tokens is that between two results, and it is the same for all rows that decoded in both."""

    inter_token_latency: Histogram
    step_tokens: Histogram
    _tokens_at: float | None = None
    """Time of the last result, if it had tokens."""

    @classmethod
    def of(cls, stats: SchedulerStats) -> StepStatistics:
        """Continue the histograms of a scheduler that crashed."""
        return cls(stats.inter_token_latency, stats.step_tokens)

    def stepped(self, now: float, *, decoding: int, produced: bool, tokens: int) -> None:
        """Observe a step. `decoding`: number of rows that decoded; `produced`: whether the step gave a token; `tokens`: tokens that it
        prefilled and decoded."""
        if decoding and self._tokens_at is not None:
            self.inter_token_latency = self.inter_token_latency.with_value(now - self._tokens_at, decoding)
        if tokens:
            self.step_tokens = self.step_tokens.with_value(tokens)
        self._tokens_at = now if produced else None
