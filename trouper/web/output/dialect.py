"""What the dialects share: an answer in any of them is built of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from trouper.actors.runtime.answer import Answer
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Delta, Finished, TokenLogprobs

Json = dict[str, Any]


@attrs.frozen
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@attrs.frozen
class Choice:
    """One complete answer."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """() unless asked for."""
    finished: Finished
    usage: Usage
    prompt_tokens: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """() unless asked for, else one for each token of the prompt but the first."""
    deltas: tuple[Delta, ...] = ()
    """As they came, for a dialect that must know which token said what."""


class Dialect(Protocol):
    """An endpoint's dialect. What a stream says is bytes: whole server-sent events, or b"" for nothing."""

    def body(self, choices: Sequence[Choice], /) -> Json:
        """A response that is not streamed. Raises `RequestFailed`."""

    def opening(self, index: int, answer: Answer, /) -> bytes:
        """Before the first text."""

    def text(self, index: int, delta: Delta, answer: Answer, /) -> bytes:
        """What more text becomes; perhaps nothing yet."""

    def ending(self, index: int, finished: Finished, answer: Answer, /) -> bytes:
        """What was held back, and the end of this answer."""

    def closing(self, usages: Sequence[Usage], /) -> bytes:
        """The end of the stream, once all its answers have ended."""

    def failure(self, problem: Problem, /) -> bytes:
        """The end of a stream that broke."""

    def heartbeat(self) -> bytes:
        """A sign of life while there is nothing to say."""


def usage_of(answer: Answer) -> Usage:
    return Usage(len(answer.accepted.prompt_tokens), answer.completion_tokens, answer.cached_tokens)


def total(usages: Sequence[Usage], choices: int) -> Usage:
    """Of a whole response. Each prompt counts once, whatever the number of its choices."""
    firsts = usages[::choices]
    return Usage(
        sum(usage.prompt_tokens for usage in firsts),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in firsts),
    )


def event(data: bytes) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + data + b"\n\n"


COMMENT = b": keep-alive\n\n"
"""A sign of life that no client takes for an event: one without data would crash some."""
