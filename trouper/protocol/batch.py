"""A view of the running batch. The scheduler makes it only while somebody views it."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class RowStats:
    """One row of the batch at one moment. Times are those of trio's clock."""

    row: int
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


@attrs.frozen(kw_only=True)
class BatchStats:
    """All rows of the batch, and the latest inter-token latencies of its streams."""

    at: float = 0.0
    rows: tuple[RowStats, ...] = ()
    inter_token_latencies_s: tuple[float, ...] = ()
    """Seconds between the tokens of two successive steps, as the running streams saw them; the latest is last."""
    inter_token_latency_count: int = 0
    """Number of all latencies so far, so that a viewer who reads the view again knows which are new."""


NOTHING_SHOWN = BatchStats()
