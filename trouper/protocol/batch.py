"""The batch as somebody who looks sees it. Made only while somebody does."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class RowStats:
    """One row at one moment. Times are trio's."""

    row: int
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, so many were not computed."""
    prefilled_tokens: int
    """Of the prompt, so many are there or on their way, cached ones among them."""
    generated_tokens: int
    max_tokens: int
    since: float
    """When it got its row."""
    first_token_at: float | None
    """When it began to decode."""


@attrs.frozen(kw_only=True)
class BatchStats:
    """All rows, and the last pauses of their streams."""

    at: float = 0.0
    rows: tuple[RowStats, ...] = ()
    gaps_s: tuple[float, ...] = ()
    """Between one step's tokens and the next one's, as the running streams felt it; the latest is last."""
    gap_count: int = 0
    """Of all gaps so far, so that whoever looks again knows which are new."""


NOTHING_SHOWN = BatchStats()
