"""Replies to a client, in order: Accepted, Started, Scored if requested, any number of Deltas, then
exactly one terminal event."""

from __future__ import annotations

from math import inf
from typing import Literal

import attrs
import msgspec

from trouper.protocol.problems import Problem

FinishReason = Literal["stop", "length"]


def when() -> float:
    """Field for the trio.current_time() of a reply. It does not take part in comparisons."""
    return attrs.field(default=0.0, eq=False)


@attrs.frozen
class Accepted:
    """The request was admitted to the queue. A refusal (400, 429, 503) comes instead of this
    reply."""

    prompt_tokens: tuple[int, ...]
    max_tokens: int


@attrs.frozen
class Started:
    """The request left the queue and its prompt prefills. `cached_tokens` came from a cache, and
    `disk_tokens` of these from the disk."""

    cached_tokens: int
    disk_tokens: int = 0
    at: float = when()


@attrs.frozen
class TokenLogprobs:
    """Natural-log probabilities at one position, from the raw logits. `top` is sorted, most likely
    first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen
class Scored:
    """Log-probabilities of all prompt tokens but the first. Sent before the first Delta, if
    requested."""

    logprobs: tuple[TokenLogprobs, ...]


@attrs.frozen
class Embedded:
    """The prompt as a vector of length one, little-endian float32. Sent instead of any Delta."""

    vector: bytes


class Delta(msgspec.Struct, frozen=True, gc=False):
    """The next part of the answer. Text never splits a character, never holds a stop string or a
    part of one that matched.

    `tokens` are all tokens committed since the last Delta; their text may come in a later one.
    There is one for each token of each stream: msgspec makes it in a fifth of the time of attrs,
    and the garbage collector need not look at it.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    at: float = 0.0
    """trio.current_time() of the step's results."""


@attrs.frozen
class Finished:
    """The answer is complete."""

    reason: FinishReason
    completion_tokens: int
    matched_stop: str | int | None = None
    at: float = when()


@attrs.frozen
class Failed:
    """The answer ends here, with this problem."""

    problem: Problem


Reply = Accepted | Started | Scored | Embedded | Delta | Finished | Failed
REPLIES_BEYOND_TOKENS = 5
"""Number of replies besides one Delta a token: Accepted, Started, Scored, a last Delta of held-back
text, and the terminal event."""


NEXT_STEP = "the step at hand to end, since the queue is filled between steps"
"""What a request waits for that is prepared."""


@attrs.frozen
class Progress:
    """The latest progress of a request's row, besides its tokens. It is published beside the
    replies, for the time limits."""

    at: float = -inf
    """trio.current_time() at which the last chunk of the prompt was computed."""
    preempted: bool = False
    """Whether the request left its row before its end and waits to return. It is not late then,
    however long it waits."""
    waits_for: str = ""
    """What a request waits for before it is in the queue; an error of its time limit says so."""
