"""The record of one finished request, from which histograms, log lines, traces and lists of recent
requests are made."""

from __future__ import annotations

from typing import Literal

import attrs

Reason = Literal["stop", "length", "abort", "error", "refused"]
"""abort: the client left or cancelled. error: it was accepted and then failed. refused: it never
entered the queue."""


@attrs.frozen(kw_only=True)
class RequestRecord:
    """Result and times of one request. Times are seconds of the runtime's clock and are the
    scheduler's, so a client that reads slowly shifts none of them. None: the request did not get
    that far. Plus `unix_offset` they are Unix time."""

    request_id: str
    """Id of the request. Further choices of one response have a number appended: "id-1"."""
    model: str = ""
    """Name of the model as clients address it."""
    adapter: str = ""
    """Name of its LoRA adapter; "": none."""
    key: str = ""
    """What names its API key: the name in the file of keys, or the line; "": the server needs
    none."""
    endpoint: str = ""
    """Path of the HTTP request, without the query."""
    reason: Reason
    code: str = ""
    """Code of the problem that ended the request, as in the response: "request_timeout"."""
    prompt_tokens: int = 0
    """Tokens of the prompt; 0 if the request was refused before they were counted."""
    cached_tokens: int = 0
    """Prompt tokens that came from a cache and were not computed."""
    disk_tokens: int = 0
    """Cached tokens that were read from disk for this request."""
    generated_tokens: int = 0
    max_tokens: int = 0
    arrived_at: float
    admitted_at: float | None = None
    """Time at which the request got a row and its prefill began."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float
    unix_offset: float = 0.0
    traceparent: str = ""
    tracestate: str = ""
    """Trace headers of the request (W3C), which join it to its client's trace."""

    @property
    def queue_s(self) -> float | None:
        """Seconds from the arrival until the request got a row."""
        return _between(self.arrived_at, self.admitted_at)

    @property
    def done_at(self) -> float | None:
        """Time of the last token, or the end of a complete answer without tokens: an embedding."""
        if self.last_token_at is None and self.reason in ("stop", "length"):
            return self.ended_at
        return self.last_token_at

    @property
    def prefill_s(self) -> float | None:
        """Seconds from admission to the first token, or to the end of a complete answer without
        tokens."""
        return _between(
            self.admitted_at, self.done_at if self.first_token_at is None else self.first_token_at
        )

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last."""
        return _between(self.first_token_at, self.last_token_at)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return _between(self.arrived_at, self.first_token_at)

    @property
    def inference_s(self) -> float | None:
        """Seconds from admission until the answer was done."""
        return _between(self.admitted_at, self.done_at)

    @property
    def total_s(self) -> float:
        return self.ended_at - self.arrived_at

    @property
    def mean_inter_token_latency_s(self) -> float | None:
        """Mean inter-token latency in seconds; None with fewer than two tokens."""
        return (
            None
            if self.decode_s is None or self.generated_tokens < 2
            else self.decode_s / (self.generated_tokens - 1)
        )


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
