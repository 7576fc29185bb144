"""A view of the running batch. The scheduler makes it only while somebody views it."""

from __future__ import annotations

from typing import Literal

import attrs

RowState = Literal["prefilling", "decoding", "preempted", "restoring"]
"""preempted: the row was left, and its sequence waits in the queue. restoring: it has a row again,
which does not decode yet."""


@attrs.frozen(kw_only=True)
class RowStats:
    """One row of the batch at one moment, or a sequence that left its row and waits to return.
    Times are those of trio's clock."""

    row: int
    """Id of the row, or of the last one."""
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the cache and were not computed."""
    prefilled_tokens: int
    """Prompt tokens that are computed, cached or scheduled."""
    generated_tokens: int
    max_tokens: int
    since: float
    """Time at which the request got its row."""
    first_token_at: float | None
    """Time of the first output token; None during prefill."""
    state: RowState
    priority: int = 0
    """Lower goes first."""
    restored_tokens: int = 0
    """Of a preempted sequence: tokens that were read from disk, or that its new row has from the
    cache or computes."""
    tokens_to_restore: int = 0
    """Tokens of prompt and answer that a preempted sequence needs before it goes on; 0 if it was
    not preempted or goes on already."""


@attrs.frozen(kw_only=True)
class BatchStats:
    """All rows of the batch, sequences that were preempted, and the latest inter-token latencies of
    the streams."""

    at: float = 0.0
    rows: tuple[RowStats, ...] = ()
    inter_token_latencies_s: tuple[float, ...] = ()
    """Seconds between the tokens of two successive steps, as the running streams saw them; the
    latest is last."""
    inter_token_latency_count: int = 0
    """Number of all latencies so far, so that a viewer who reads the view again knows which are
    new."""


NOTHING_SHOWN = BatchStats()
