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
    """Id of the current or last row."""
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens from the cache."""
    prefilled_tokens: int
    """Prompt tokens that are computed, cached or scheduled."""
    generated_tokens: int
    max_tokens: int
    since: float
    """Time at which the request got a row."""
    first_token_at: float | None
    """Time of the first output token; None during prefill."""
    state: RowState
    priority: int = 0
    restored_tokens: int = 0
    """Tokens of a preempted sequence that are restored so far, from disk, cache or computation."""
    tokens_to_restore: int = 0
    """Tokens that a preempted sequence needs before decoding; 0 for others."""


@attrs.frozen(kw_only=True)
class BatchStats:
    """All rows, preempted sequences, and the streams' latest inter-token latencies."""

    at: float = 0.0
    rows: tuple[RowStats, ...] = ()
    inter_token_latencies_s: tuple[float, ...] = ()
    """Seconds between tokens of successive steps; the latest is last."""
    inter_token_latency_count: int = 0
    """Number of all latencies so far, by which a viewer finds the new ones."""


NOTHING_SHOWN = BatchStats()
