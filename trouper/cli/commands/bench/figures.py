"""Figures computed from streams: throughput, time to first token, inter-token latency, and what the
prefix cache saved."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import attrs

from trouper.cli.commands.bench.load import Stream

PERCENTILES = (0, 5, 10, 25, 50, 75, 90, 95, 99, 100)


@attrs.frozen(kw_only=True)
class LoadFigures:
    """Figures of one number of concurrent streams, over all rounds."""

    streams: int
    rounds: int
    tokens_per_s: float
    """Tokens per second from the first request to the last token, prefill included; the median of
    the rounds."""
    decode_tokens_per_s: float
    """Tokens per second while all streams of a round decode; the median of the rounds. 0: they
    never all did."""
    per_stream_tokens_per_s: float
    """Tokens per second of one stream between its first and its last token; the median."""
    ttft_s: dict[int, float]
    """Seconds to the first token by percentile, like the fields that follow."""
    gap_s: dict[int, float]
    """Seconds between two pieces of text of one stream."""
    prompt_tokens: int
    tokens: int


@attrs.frozen(kw_only=True)
class PrefixFigures:
    """Seconds to the first token of one long prompt; medians."""

    prompt_tokens: int
    cold_s: float
    again_s: float
    """Seconds for the same prompt once more."""
    extended_s: float
    """Seconds for the same prompt followed by another question."""
    short_s: float
    """Seconds for a prompt of a few tokens: no cache can be faster than that."""
    cached_tokens: int
    """Cached tokens of the prompt that was sent again."""


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
    """Return the rate from the last first token to the first last token. A piece counts as the
    average number of tokens of its stream's pieces."""
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
    """Return percentiles, each a value that occurred (nearest rank); none without values."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return (
        {percent: ordered[round(percent / 100 * last)] for percent in PERCENTILES}
        if ordered
        else {}
    )
