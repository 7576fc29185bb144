"""The view of the running batch, made only while somebody looks."""

from __future__ import annotations

from typing import Literal

import attrs

RowState = Literal["prefilling", "decoding", "preempted", "restoring"]
"""preempted: the sequence waits in the queue. restoring: the new row does not decode yet."""


@attrs.frozen(kw_only=True)
class RowStats:
    """A row, or a preempted sequence. Times are trio's."""

    row: int
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    """Prompt tokens that are computed, cached or scheduled."""
    generated_tokens: int
    max_tokens: int
    since: float
    first_token_at: float | None
    state: RowState
    priority: int = 0
    restored_tokens: int = 0
    """Tokens that a preempted sequence has again."""
    tokens_to_restore: int = 0
    """Tokens that a preempted sequence needs; 0 for others."""


@attrs.frozen(kw_only=True)
class BatchStats:
    """All rows, preempted sequences, and the streams' latest inter-token latencies."""

    at: float = 0.0
    rows: tuple[RowStats, ...] = ()
    inter_token_latencies_s: tuple[float, ...] = ()
    """Between successive steps; the latest is last."""
    inter_token_latency_count: int = 0
    """All so far, by which viewers find new ones."""


NOTHING_SHOWN = BatchStats()
