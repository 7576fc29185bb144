"""Concurrent streams, timings, and figures.

Streams do little while running: servers share the machine.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import attrs
import httpx2
import trio

from trouper.cli.client import Where, problem_of, read_as_trouper
from trouper.cli.streamed_answer import AnswerFailed, count
from trouper.protocol.problems import leaves

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
    """In seconds of `time.perf_counter`."""

    sent: float = 0.0
    times: list[float] = attrs.field(factory=list)
    """Arrivals of text, of one token or several."""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


@attrs.frozen
class Question:
    prompt: str
    max_tokens: int
    drafts: bool = False
    """Random words repeat, which flatters drafts."""
    salt: str = attrs.field(factory=lambda: secrets.token_hex(8))
    """By default nothing is cached."""


def random_words(count: int) -> str:
    """Of about 1.3 tokens."""
    return " ".join(random.choices(VOCABULARY, k=count))


async def run_streams(where: Where, questions: Sequence[Question]) -> list[Stream]:
    """Raises `AnswerFailed`, `NotTrouper`, or httpx2's errors, in a group."""
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
    """Answers have all requested tokens: early ends flatter others."""
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
    count(chunk, stream)
    return any(choice.get("text") for choice in chunk["choices"])


PERCENTILES = (0, 5, 10, 25, 50, 75, 90, 95, 99, 100)


@attrs.frozen(kw_only=True)
class LoadFigures:
    streams: int
    rounds: int
    tokens_per_s: float
    """With prefill; median of rounds."""
    decode_tokens_per_s: float
    """While all streams decode; 0: never."""
    per_stream_tokens_per_s: float
    """Between a stream's first and last token; median."""
    ttft_s: dict[int, float]
    """Seconds to the first token by percentile, like the following fields."""
    gap_s: dict[int, float]
    """Between pieces of a stream."""
    prompt_tokens: int
    tokens: int


@attrs.frozen(kw_only=True)
class PrefixFigures:
    """Median seconds to a long prompt's first token."""

    prompt_tokens: int
    cold_s: float
    again_s: float
    """The same prompt again."""
    extended_s: float
    """The prompt with another question."""
    short_s: float
    """A short prompt: a lower bound."""
    cached_tokens: int
    """Of the repeated prompt."""


def load_of(rounds: Sequence[Sequence[Stream]]) -> LoadFigures:
    every = [stream for streams in rounds for stream in streams]
    return LoadFigures(
        streams=len(rounds[0]),
        rounds=len(rounds),
        tokens_per_s=median(map(throughput, rounds)),
        decode_tokens_per_s=median(map(decode_rate, rounds)),
        per_stream_tokens_per_s=median(own_rate(stream) for stream in every),
        ttft_s=percentiles([stream.ttft_s for stream in every]),
        gap_s=percentiles([gap for stream in every for gap in stream.gaps_s]),
        prompt_tokens=round(median(stream.prompt_tokens for stream in every)),
        tokens=sum(stream.tokens for stream in every),
    )


def throughput(streams: Sequence[Stream]) -> float:
    tokens = sum(stream.tokens for stream in streams)
    return tokens / (
        max(stream.times[-1] for stream in streams) - min(stream.sent for stream in streams)
    )


def decode_rate(streams: Sequence[Stream]) -> float:
    """From the last first token to the first last token, with average tokens per piece."""
    begin, end = (
        max(stream.times[0] for stream in streams),
        min(stream.times[-1] for stream in streams),
    )
    if end <= begin:
        return 0.0
    tokens = sum(
        sum(begin < at <= end for at in stream.times) * stream.tokens / len(stream.times)
        for stream in streams
    )
    return tokens / (end - begin)


def own_rate(stream: Stream) -> float:
    lasted = stream.times[-1] - stream.times[0]
    return (stream.tokens - 1) / lasted if lasted > 0 else 0.0


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """By nearest rank."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return (
        {percent: ordered[round(percent / 100 * last)] for percent in PERCENTILES}
        if ordered
        else {}
    )


ProgressCallback = Callable[[str], None]
SHORT_WORDS = 3
PATIENT = (
    *("--queue-timeout-s", "0"),
    *("--first-token-timeout-s", "0"),
    *("--token-timeout-s", "0"),
    *("--request-timeout-s", "0"),
)
"""Off: slow machines are measured, not refused."""
WARM_UP_TOKENS = 8


@attrs.frozen(kw_only=True)
class BenchOptions:
    streams: Sequence[int]
    tokens: int
    prompt_words: int
    long_words: int
    rounds: int
    drafts: bool = False

    @property
    def parts(self) -> int:
        return len(self.streams) * (self.rounds + 1) + self.rounds


def measure_load(
    where: Where, options: BenchOptions, streams: int, show_progress: ProgressCallback
) -> LoadFigures:
    """The first round is uncounted: kernels compile."""

    def run(tokens: int) -> list[Stream]:
        prompts = [random_words(options.prompt_words) for _ in range(streams)]
        return run_load(where, [Question(prompt, tokens, options.drafts) for prompt in prompts])

    show_progress(f"{streams} at once, warming up")
    run(WARM_UP_TOKENS)
    rounds = []
    for number in range(options.rounds):
        show_progress(f"{streams} at once, round {number + 1} of {options.rounds}")
        rounds.append(run(options.tokens))
    return load_of(rounds)


def measure_prefix(
    where: Where, options: BenchOptions, show_progress: ProgressCallback
) -> PrefixFigures:
    """Single requests; each round has a new prompt."""
    seen: dict[str, list[Stream]] = {"cold": [], "again": [], "extended": [], "short": []}
    for number in range(options.rounds):
        show_progress(f"the prefix cache, round {number + 1} of {options.rounds}")
        salt, prompt = secrets.token_hex(8), random_words(options.long_words)
        for name, text in (
            ("cold", prompt),
            ("again", prompt),
            ("extended", f"{prompt}. {random_words(SHORT_WORDS)}?"),
        ):
            seen[name] += run_load(where, [Question(text, 2, salt=salt)])
        seen["short"] += run_load(where, [Question(random_words(SHORT_WORDS), 2)])
    ttft = {name: median(stream.ttft_s for stream in streams) for name, streams in seen.items()}
    return PrefixFigures(
        prompt_tokens=round(median(stream.prompt_tokens for stream in seen["cold"])),
        cold_s=ttft["cold"],
        again_s=ttft["again"],
        extended_s=ttft["extended"],
        short_s=ttft["short"],
        cached_tokens=round(median(stream.cached_tokens for stream in seen["again"])),
    )


def run_load(where: Where, questions: Sequence[Question]) -> list[Stream]:
    """Raises the first of `AnswerFailed`, `NotTrouper`, or httpx2's errors."""
    try:
        return trio.run(run_streams, where, questions)
    except BaseExceptionGroup as group:
        raise next(leaves(group)) from None
