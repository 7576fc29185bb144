"""The interface of a dialect, which formats responses, and the types that all dialects share."""

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
    reasoning_tokens: int = 0
    """Tokens of the completion that are reasoning, where the dialect parses any."""


@attrs.frozen
class Choice:
    """One complete answer."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """Log-probabilities of the tokens; () unless requested."""
    finished: Finished
    usage: Usage
    prompt_tokens: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens but the first; () unless requested."""
    deltas: tuple[Delta, ...] = ()
    """The deltas as they were generated, for a dialect that must know which token belongs to which
    text."""


class Dialect(Protocol):
    """The response format of an endpoint. Stream methods return bytes: complete server-sent events,
    or b"" for nothing."""

    def body(self, choices: Sequence[Choice], /) -> Json:
        """Format a response that is not streamed. Raises `RequestFailed`."""

    def opening(self, index: int, answer: Answer, /) -> bytes:
        """Format the events before the first text."""

    def text(self, index: int, delta: Delta, answer: Answer, /) -> bytes:
        """Format the events of more text; possibly none yet."""

    def ending(self, index: int, finished: Finished, answer: Answer, /) -> bytes:
        """Format the text that was held back, and the end of this answer."""

    def closing(self, usages: Sequence[Usage], /) -> bytes:
        """Format the end of the stream, once all its answers have ended."""

    def failure(self, problem: Problem, /) -> bytes:
        """Format the end of a stream that failed."""

    def heartbeat(self, index: int, answer: Answer, /) -> bytes:
        """Format a heartbeat, sent while there is no text to send: an event that resets the timers
        of clients and changes nothing. `answer` has not ended."""


def usage_of(answer: Answer) -> Usage:
    return Usage(len(answer.accepted.prompt_tokens), answer.completion_tokens, answer.cached_tokens)


def total(usages: Sequence[Usage], choices: int) -> Usage:
    """Sum the usage of a whole response. Each prompt counts once, whatever the number of its
    choices."""
    firsts = usages[::choices]
    return Usage(
        sum(usage.prompt_tokens for usage in firsts),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in firsts),
        sum(usage.reasoning_tokens for usage in usages),
    )


def event(data: bytes) -> bytes:
    """Format a server-sent event without a name."""
    return b"data: " + data + b"\n\n"


COMMENT = b": keep-alive\n\n"
"""A comment, which no client takes for an event; an event without data would crash some clients."""
