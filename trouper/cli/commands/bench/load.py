"""Concurrent streams, and the arrival times of their pieces. As little as possible is done while
they run, because the load shares the machine with the server that it measures."""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Sequence
from typing import Any

import attrs
import httpx2
import trio

from trouper.cli.client import Where, problem_of, read_as_trouper
from trouper.cli.streamed_answer import AnswerFailed, count

VOCABULARY = [
    "river",
    "stone",
    "light",
    "window",
    "garden",
    "paper",
    "winter",
    "market",
    "bridge",
    "silver",
    "forest",
    "letter",
    "morning",
    "island",
    "engine",
    "captain",
    "harbor",
    "candle",
    "meadow",
    "thunder",
    "lantern",
    "orchard",
    "compass",
    "velvet",
]


@attrs.define
class Stream:
    """One request and its timing, in seconds of `time.perf_counter`."""

    sent: float = 0.0
    times: list[float] = attrs.field(factory=list)
    """Arrival times of text. A piece has several tokens where drafts were accepted or the client
    was late."""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


@attrs.frozen
class Question:
    prompt: str
    max_tokens: int
    drafts: bool = False
    """Whether drafts are allowed. Random words and their continuations repeat themselves as no text
    does, so with drafts the figures would be too good."""
    salt: str = attrs.field(factory=lambda: secrets.token_hex(8))
    """Salt of the prefix cache. By default each question has its own, so that nothing is cached,
    not even on a disk of an earlier run."""


def random_words(count: int) -> str:
    """Return random words, of about 1.3 tokens each."""
    return " ".join(random.choices(VOCABULARY, k=count))


async def run_streams(where: Where, questions: Sequence[Question]) -> list[Stream]:
    """Run all requests concurrently. Raises `AnswerFailed`, `NotTrouper`, or httpx2's errors, in a
    group."""
    streams = [Stream() for _ in questions]
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        where.opened(httpx2.AsyncClient, limits=limits) as client,
        trio.open_nursery() as nursery,
    ):
        for question, stream in zip(questions, streams, strict=True):
            nursery.start_soon(_ask, client, question, stream)
    return streams


async def _ask(client: httpx2.AsyncClient, question: Question, stream: Stream) -> None:
    """Return a request's body. An answer always has as many tokens as were requested: one that ends
    early would make the others look faster."""
    body = {
        "prompt": question.prompt,
        "max_tokens": question.max_tokens,
        "cache_salt": question.salt,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "speculation": "ngram" if question.drafts else "off",
        "stream_options": {"include_usage": True},
    }
    stream.sent = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            await response.aread()
            raise AnswerFailed(problem_of(response))
        remainder = b""
        async for data in response.aiter_raw():
            now = time.perf_counter()
            *lines, remainder = (remainder + data).split(b"\n")
            with read_as_trouper(client):
                had_text = [
                    _take(json.loads(line[6:]), stream)
                    for line in lines
                    if line.startswith(b"data: {")
                ]
            if any(had_text):
                stream.times.append(now)
    if not stream.tokens:
        raise AnswerFailed("a stream ended in the middle")
    if not stream.times:
        raise AnswerFailed("a stream had no text, so there is nothing to time")


def _take(chunk: dict[str, Any], stream: Stream) -> bool:
    """Count a chunk, and return whether it has text."""
    count(chunk, stream)
    return any(choice.get("text") for choice in chunk["choices"])
