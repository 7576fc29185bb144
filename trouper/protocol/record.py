from __future__ import annotations

from typing import Literal

import attrs

from trouper.protocol.waits import Transition

Reason = Literal["stop", "length", "abort", "error", "refused"]
"""abort: the client left or cancelled. error: failed after acceptance. refused: never in the
queue."""


@attrs.frozen(kw_only=True)
class RequestRecord:
    """Result and times of one request. Times are seconds of the scheduler's clock; None: never
    reached. Plus `unix_offset`: Unix time."""

    request_id: str
    """Further choices of one response have a number appended: "id-1"."""
    model: str = ""
    adapter: str = ""
    key: str = ""
    """Label of the API key: name or line; "": no keys."""
    endpoint: str = ""
    reason: Reason
    code: str = ""
    """Code of the ending problem, as in the response: "request_timeout"."""
    prompt_tokens: int = 0
    """0 if refused before tokenization."""
    cached_tokens: int = 0
    disk_tokens: int = 0
    generated_tokens: int = 0
    max_tokens: int = 0
    arrived_at: float
    admitted_at: float | None = None
    """Time of the row and the begin of prefill."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float
    preempted_s: float = 0.0
    unix_offset: float = 0.0
    transitions: tuple[Transition, ...] = ()
    """The last ones, with the reasons for waits."""

    @property
    def queue_s(self) -> float | None:
        return _between(self.arrived_at, self.admitted_at)

    @property
    def done_at(self) -> float | None:
        """Time of the last token, or the end of a complete answer without tokens (embeddings)."""
        if self.last_token_at is None and self.reason in ("stop", "length"):
            return self.ended_at
        return self.last_token_at

    @property
    def prefill_s(self) -> float | None:
        """Seconds from admission to the first token, or to `done_at` without tokens."""
        return _between(
            self.admitted_at, self.done_at if self.first_token_at is None else self.first_token_at
        )

    @property
    def decode_s(self) -> float | None:
        return _between(self.first_token_at, self.last_token_at)

    @property
    def first_token_s(self) -> float | None:
        return _between(self.arrived_at, self.first_token_at)

    @property
    def inference_s(self) -> float | None:
        return _between(self.admitted_at, self.done_at)

    @property
    def total_s(self) -> float:
        return self.ended_at - self.arrived_at

    @property
    def mean_inter_token_latency_s(self) -> float | None:
        return (
            None
            if self.decode_s is None or self.generated_tokens < 2
            else self.decode_s / (self.generated_tokens - 1)
        )


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
