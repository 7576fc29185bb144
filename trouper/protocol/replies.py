"""What a client hears: Accepted, Started, Scored if it asked, any number of Deltas, then exactly one terminal event."""

from __future__ import annotations

from typing import Literal

import attrs

from trouper.protocol.problems import Problem

FinishReason = Literal["stop", "length"]


def when() -> float:
    """A field: trio.current_time() when it was said. Two replies that say the same are equal."""
    return attrs.field(default=0.0, eq=False)


@attrs.frozen
class Accepted:
    """The request was admitted to the queue. Before this nothing was promised (400, 429, 503 come instead)."""

    prompt_tokens: tuple[int, ...]
    max_tokens: int


@attrs.frozen
class Started:
    """The request left the queue and its prompt is being prefilled; so many tokens came from a cache, `disk_tokens` of
    them from the disk."""

    cached_tokens: int
    disk_tokens: int = 0
    at: float = when()


@attrs.frozen
class TokenLogprobs:
    """Natural-log probabilities at one position, from the raw logits. `top` is sorted, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen
class Scored:
    """The prompt's log-probabilities, for each token but the first. Before the first Delta, if asked for."""

    logprobs: tuple[TokenLogprobs, ...]


@attrs.frozen
class Embedded:
    """The prompt as a vector of length one, little-endian float32. Instead of any Delta."""

    vector: bytes


@attrs.frozen
class Delta:
    """More of the answer. Text never splits a character, never holds a stop string or a part of one that matched.

    `tokens` are all tokens committed since the last Delta; their text may come in a later one.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    at: float = when()


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
"""Accepted, Started, Scored, a last Delta of held-back text, and the terminal event."""
