"""What became of one request, told once, when it is over: what histograms, log lines, traces and lists of recent
requests are made of."""

from __future__ import annotations

from typing import Literal

import attrs

Reason = Literal["stop", "length", "abort", "error", "refused"]
"""abort: the client left or cancelled. error: it was accepted and then failed. refused: it never entered the queue."""


@attrs.frozen(kw_only=True)
class RequestRecord:
    """Times are seconds of the runtime's clock and are the scheduler's, so a client that reads slowly shifts none of them.
    None: it did not come so far. Plus `unix_offset` they are Unix time."""

    request_id: str
    """Further choices of one response have a number behind theirs: "id-1"."""
    model: str = ""
    """As clients call it."""
    endpoint: str = ""
    """The path that was asked, without the query."""
    reason: Reason
    code: str = ""
    """Of the problem that ended it, as in the response: "request_timeout"."""
    prompt_tokens: int = 0
    """0 if it was refused before they were counted."""
    cached_tokens: int = 0
    """Of the prompt's, those that were not computed,"""
    disk_tokens: int = 0
    """and of these, those that were read from disk for it."""
    generated_tokens: int = 0
    max_tokens: int = 0
    arrived_at: float
    admitted_at: float | None = None
    """It got a row, and its prefill began."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float
    unix_offset: float = 0.0
    traceparent: str = ""
    tracestate: str = ""
    """Headers of the request, by which its client knows it among others' work (W3C)."""

    @property
    def queue_s(self) -> float | None:
        """From its arrival until it had a row."""
        return _between(self.arrived_at, self.admitted_at)

    @property
    def done_at(self) -> float | None:
        """Its last token, or the end of a complete answer that has none: an embedding."""
        if self.last_token_at is None and self.reason in ("stop", "length"):
            return self.ended_at
        return self.last_token_at

    @property
    def prefill_s(self) -> float | None:
        """From its row to its first token, or to its end if it is complete without one."""
        return _between(self.admitted_at, self.done_at if self.first_token_at is None else self.first_token_at)

    @property
    def decode_s(self) -> float | None:
        """From its first token to its last."""
        return _between(self.first_token_at, self.last_token_at)

    @property
    def first_token_s(self) -> float | None:
        """From its arrival to its first token."""
        return _between(self.arrived_at, self.first_token_at)

    @property
    def inference_s(self) -> float | None:
        """From its row until it was done."""
        return _between(self.admitted_at, self.done_at)

    @property
    def whole_s(self) -> float:
        return self.ended_at - self.arrived_at

    @property
    def token_s(self) -> float | None:
        """Mean time between two tokens; None if there were not two."""
        return (
            None if self.decode_s is None or self.generated_tokens < 2 else self.decode_s / (self.generated_tokens - 1)
        )


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
