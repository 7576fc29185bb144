"""The interface of a dialect, which formats responses."""

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


@attrs.frozen
class Choice:
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """() unless requested."""
    finished: Finished
    usage: Usage
    prompt_tokens: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens but the first; () unless requested."""
    deltas: tuple[Delta, ...] = ()


class Dialect(Protocol):
    """The response format of an endpoint. Stream methods return complete server-sent events, or
    b""."""

    def body(self, choices: Sequence[Choice], /) -> Json:
        """Format a response that is not streamed. Raises `RequestFailed`."""

    def opening(self, index: int, answer: Answer, /) -> bytes:
        """Format the events before the first text."""

    def text(self, index: int, delta: Delta, answer: Answer, /) -> bytes:
        """Format more text, unless the parser holds text back."""

    def ending(self, index: int, finished: Finished, answer: Answer, /) -> bytes:
        """Format held text and the end of this answer."""

    def closing(self, usages: Sequence[Usage], /) -> bytes:
        """Format the end of the stream."""

    def failure(self, problem: Problem, /) -> bytes:
        """Format the end of a failed stream."""

    def heartbeat(self, index: int, answer: Answer, /) -> bytes:
        """Format an event that resets clients' timers and changes nothing."""


def usage_of(answer: Answer) -> Usage:
    return Usage(len(answer.accepted.prompt_tokens), answer.completion_tokens, answer.cached_tokens)


def total(usages: Sequence[Usage], choices: int) -> Usage:
    """Sum the usage of a response; each prompt counts once."""
    firsts = usages[::choices]
    return Usage(
        sum(usage.prompt_tokens for usage in firsts),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in firsts),
        sum(usage.reasoning_tokens for usage in usages),
    )


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


COMMENT = b": keep-alive\n\n"  # A comment: an event without data would crash some clients.
