"""Replies to a client, in order: Accepted, Started, Scored if requested, any number of Deltas, one
terminal event."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Literal

import attrs
import msgspec

from trouper.protocol.problems import Problem

FinishReason = Literal["stop", "length"]


def when() -> float:
    """Field for the trio.current_time() of a reply, ignored by comparisons."""
    return attrs.field(default=0.0, eq=False)


@attrs.frozen
class Accepted:
    """The request is in the queue. A refusal (400, 429, 503) comes instead."""

    prompt_tokens: tuple[int, ...]
    max_tokens: int
    ignored: tuple[str, ...] = ()
    """Paths of what the request's schemas have and no grammar follows."""


@attrs.frozen
class Started:
    """The prompt prefills. `cached_tokens` came from a cache, `disk_tokens` among these from
    disk."""

    cached_tokens: int
    disk_tokens: int = 0
    at: float = when()


@attrs.frozen
class TokenLogprobs:
    """Natural-log probabilities of the raw logits at one position. `top`: most likely first."""

    token: int
    logprob: float
    # A prompt of 7,000 tokens has 140,000 of them: arrays hold 8 bytes each, tuples 110.
    top_ids: Sequence[int] = attrs.field(factory=partial(array, "i"))
    top_logprobs: Sequence[float] = attrs.field(factory=partial(array, "f"))

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        return tuple(zip(self.top_ids, self.top_logprobs, strict=True))


@attrs.frozen
class Scored:
    """Log-probabilities of the prompt from the second token on, before the first Delta."""

    logprobs: tuple[TokenLogprobs, ...]


@attrs.frozen
class Embedded:
    """The prompt as a unit vector, little-endian float32. Sent instead of Deltas."""

    vector: bytes


class Delta(msgspec.Struct, frozen=True, gc=False):
    """The next part of the answer. Text never splits a character, nor holds any part of a matched
    stop string. `tokens`: committed since the last Delta; their text may come later."""

    # There is one Delta for each token of each stream: msgspec is five times as fast as attrs, and
    # the garbage collector ignores the object.

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    at: float = 0.0


@attrs.frozen
class Finished:
    """The answer is complete."""

    reason: FinishReason
    completion_tokens: int
    matched_stop: str | int | None = None
    at: float = when()


@attrs.frozen
class Failed:
    """The answer ends with this problem."""

    problem: Problem


Reply = Accepted | Started | Scored | Embedded | Delta | Finished | Failed
# Accepted, Started, Scored, a last Delta of held-back text, and the terminal event.
REPLIES_BEYOND_TOKENS = 5


@attrs.frozen
class Progress:
    """A row's progress besides tokens, for time limits."""

    at: float = -inf
    """trio.current_time() of the prompt's last computed chunk."""
    preempted: bool = False
    """Whether the request waits to return to a row. Preempted requests are never late."""
    prefilled_tokens: int = 0
    """Tokens of the prompt, and of an earlier row's answer, that a row has so far."""
    tokens_to_prefill: int = 0


class JoinedDelta(Delta, frozen=True, gc=False):
    """The text, tokens and log-probabilities of several deltas."""

    parts: tuple[Delta, ...] = ()
    """The original deltas, which say the tokens of each text."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join deltas for a reader who is behind or wants fewer events (--stream-interval)."""
    if len(deltas) == 1:
        return deltas[0]
    return JoinedDelta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(seen for delta in deltas for seen in delta.logprobs),
        deltas[-1].at,
        tuple(deltas),
    )


def parts_of(delta: Delta) -> Sequence[Delta]:
    return delta.parts if isinstance(delta, JoinedDelta) else (delta,)
