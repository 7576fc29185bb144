"""The client's side of a streamed answer."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal, Protocol

import attrs
import httpx2

from trouper.cli.client import problem_of, read_as_trouper
from trouper.cli.terminal_text import line_shown, text_of, text_shown

IGNORED = "X-Trouper-Ignored"


class AnswerFailed(Exception):
    """The message is the server's."""


@attrs.frozen
class StreamedText:
    """A piece of text, fit for a terminal."""

    kind: Literal["content", "thinking"]
    text: str


@attrs.define
class StreamedAnswer:
    pieces: list[str] = attrs.field(factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    finish_reason: str = ""
    ignored: str = ""
    """Parameters that the server names as ignored, parted by commas"""
    began: float = attrs.field(factory=time.perf_counter)
    first: float | None = None
    last: float | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def summary(self) -> str:
        parts = [f"{self.tokens} tokens"] if self.tokens else []
        if self.first is not None and self.last is not None:
            if self.tokens > 1 and self.last > self.first:
                parts.append(f"{(self.tokens - 1) / (self.last - self.first):.1f} tok/s")
            parts.append(f"first after {self.first - self.began:.2f} s")
        if self.prompt_tokens:
            parts.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached")
        if self.finish_reason not in ("", "stop"):
            parts.append(self.finish_reason)
        if self.ignored:
            parts.append(f"ignored by the server: {self.ignored}")
        return ", ".join(parts)


def stream(
    client: httpx2.Client, body: Mapping[str, Any], answer: StreamedAnswer
) -> Generator[StreamedText, None, None]:
    """Yield pieces as they arrive, and fill `answer`. Leaving the iterator ends the request. Raises
    `AnswerFailed`, `NotTrouper`, or httpx2's errors."""
    request_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=request_body) as response:
        if response.is_error:
            raise AnswerFailed(problem_of(response))
        answer.ignored = line_shown(response.headers.get(IGNORED, ""))
        for event in httpx2.EventSource(response):
            if event.data == "[DONE]":
                return
            with read_as_trouper(client):
                pieces = [*_taken(event.json(), answer)]
            yield from pieces
    raise AnswerFailed("the server ended in the middle of its answer")


class UsageCounts(Protocol):
    tokens: int
    prompt_tokens: int
    cached_tokens: int


def count(chunk: Any, counts: UsageCounts) -> None:
    """Raises `AnswerFailed` for an error."""
    if "error" in chunk:
        raise AnswerFailed(line_shown(str(chunk["error"]["message"])))
    if usage := chunk.get("usage"):
        counts.tokens = int(usage["completion_tokens"])
        counts.prompt_tokens = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        counts.cached_tokens = int(details.get("cached_tokens", 0))


def _taken(chunk: Any, answer: StreamedAnswer) -> Iterator[StreamedText]:
    count(chunk, answer)
    for choice in chunk.get("choices", ()):
        answer.finish_reason = line_shown(str(choice.get("finish_reason") or answer.finish_reason))
        delta = choice.get("delta", {})
        if thought := delta.get("reasoning_content"):
            _noted(answer)
            yield StreamedText("thinking", text_shown(text_of(thought)))
        if text := delta.get("content"):
            _noted(answer)
            answer.pieces.append(text_of(text))
            yield StreamedText("content", text_shown(text_of(text)))


def _noted(answer: StreamedAnswer) -> None:
    answer.last = time.perf_counter()
    answer.first = answer.first or answer.last
