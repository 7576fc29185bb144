"""`just bench-long-rows`: long rows beside short ones, through HTTP: what a step takes, and what
memory holds.

For each mix: the time between the tokens of the short streams alone, and while the long rows decode
beside them; the most memory that the device had in use, beside the weights and what the rows hold.
`equal`: rates of rows of the same length. `gaps`: the longest pause of streams after their 200th
token on a fresh server, as a multiple of the median. `question`: eight streams, a long prompt, and
two seconds later a question of fifty words: the longest pause of the streams, and the question's
first token, beside what it takes among the streams alone. A model is made with random weights
(`--shape 4b`), or given (`--model DIR`); default: the embedded one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from benchmarks import load, servers
from benchmarks.cache import health
from trouper_lab.load import Stream

Row = dict[str, Any]
FLAGS = (
    "--cache-memory",
    "0",
    "--completion-batch-size",
    "128",
    "--max-prompt-tokens",
    "131072",
    "--first-token-timeout-s",
    "0",
    "--speculation",
    "off",
    "--self-check",
    "fast",
)
SETTLED = 40
"""Tokens of every stream before a window of time begins."""


def tokens(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(100, 40_000) for _ in range(count)]


class Stage:
    """A server, its streams, and the most memory in use."""

    def __init__(self, port: int, nursery: trio.Nursery, seed: int = 0) -> None:
        self.port, self._nursery, self.seed = port, nursery, seed
        self.peak_bytes = 0

    def begin(self, rows: int, prompt: int, answer: int) -> list[Stream]:
        streams = [Stream() for _ in range(rows)]
        for stream in streams:
            self.seed += 1
            ids: Any = tokens(prompt, self.seed)
            self._nursery.start_soon(_stream, self.port, ids, answer, stream)
        return streams

    async def watch(self, every_s: float = 0.1) -> None:
        while True:
            memory = (await trio.to_thread.run_sync(health, self.port))["memory"]
            self.peak_bytes = max(self.peak_bytes, memory["active_bytes"])
            await trio.sleep(every_s)


async def _stream(port: int, ids: Any, answer: int, stream: Stream) -> None:
    await load.stream(port, ids, answer, stream, ignore_eos=True)


async def until(streams: Sequence[Stream], count: int) -> None:
    """Wait until every stream has so many tokens."""
    while min(len(stream.times) for stream in streams) < count:  # noqa: ASYNC110  Tokens come from many tasks.
        await trio.sleep(0.05)


def intervals(streams: Sequence[Stream], start: float, stop: float) -> list[float]:
    """Seconds between the tokens of each stream within a window."""
    found = []
    for stream in streams:
        times = [at for at in stream.times if start <= at <= stop]
        found += [later - earlier for earlier, later in pairwise(times)]
    return found


async def mix(
    port: int, short: tuple[int, int], long: tuple[int, int], weights: int, token_bytes: int
) -> Row:
    """`short`, `long`: number of rows, and tokens of each prompt. The short streams alone are
    measured before and again after the long rows: while a long prompt prefills they grow, and
    `ratio` compares with streams of the same length."""
    async with trio.open_nursery() as nursery:
        stage = Stage(port, nursery)
        nursery.start_soon(stage.watch)
        streams = stage.begin(*short, 3000)
        await until(streams, SETTLED)
        start = time.perf_counter()
        await until(streams, 3 * SETTLED)
        alone = intervals(streams, start, time.perf_counter())
        stage.peak_bytes = 0
        async with trio.open_nursery() as beside_them:
            rows = Stage(port, beside_them, seed=1000).begin(*long, 400)
            await until(rows, SETTLED // 2)
            start = time.perf_counter()
            await until(rows, 4 * SETTLED)
            stop = time.perf_counter()
            beside = intervals(streams, start, stop)
            long_s = statistics.median(intervals(rows, start, stop))
            grown = sum(len(stream.times) for stream in streams)
            held = short[0] * short[1] + grown + sum(long[1] + len(row.times) for row in rows)
            beside_them.cancel_scope.cancel()
        reached = max(len(stream.times) for stream in streams)
        await until(streams, reached + 4)  # The long rows have left.
        start = time.perf_counter()
        await until(streams, reached + 4 + SETTLED)
        after = intervals(streams, start, time.perf_counter())
        nursery.cancel_scope.cancel()
    return {
        "alone_ms": statistics.median(alone) * 1e3,
        "beside_ms": statistics.median(beside) * 1e3,
        "alone_again_ms": statistics.median(after) * 1e3,
        "short_tokens": short[1] + grown // short[0],
        "ratio": statistics.median(beside) / statistics.median(after),
        "long_ms": long_s * 1e3,
        "longest_gap_ms": max(beside) * 1e3,
        "peak_gb": stage.peak_bytes / 1e9,
        "weights_gb": weights / 1e9,
        "rows_hold_gb": held * token_bytes / 1e9,
        "peak beyond weights / rows hold": (stage.peak_bytes - weights) / (held * token_bytes),
    }


async def window(
    port: int, rows: int, prompt: int, answer: int, counts: tuple[int, int]
) -> list[float]:
    """Seconds between the tokens of rows that are equal, from the one number of tokens of every row
    to the other."""
    async with trio.open_nursery() as nursery:
        streams = Stage(port, nursery).begin(rows, prompt, answer)
        await until(streams, counts[0])
        start = time.perf_counter()
        await until(streams, counts[1])
        found = intervals(streams, start, time.perf_counter())
        nursery.cancel_scope.cancel()
    return found


async def alone(port: int, rows: int, prompt: int) -> Row:
    """Long rows alone together."""
    found = await window(port, rows, prompt, 400, (SETTLED // 2, 4 * SETTLED))
    return {"long_ms": statistics.median(found) * 1e3}


async def equal(port: int, rows: int, answer: int = 200) -> Row:
    found = await window(port, rows, 100, answer, (SETTLED, answer - 10))
    return {"step_ms": statistics.median(found) * 1e3}


async def gaps(port: int, rows: int, answer: int = 900) -> Row:
    found = await window(port, rows, 100, answer, (200, answer - 10))
    worst = sorted(found)[-5 * rows :: rows] if rows else []
    return {
        "median_ms": statistics.median(found) * 1e3,
        "longest / median": max(found) / statistics.median(found),
        "longest_ms": [round(gap * 1e3, 1) for gap in worst],
    }


async def question(port: int, prompt: int, words: int = 50) -> Row:
    async with trio.open_nursery() as nursery:
        stage = Stage(port, nursery)
        streams = stage.begin(8, 100, 8000)
        await until(streams, SETTLED)
        among_streams = await first_token(stage, words)
        start = time.perf_counter()
        long = stage.begin(1, prompt, 20)
        await trio.sleep(2.0)
        prefilling = not long[0].times
        among_all = await first_token(stage, words)
        await until(long, 1)
        stop = time.perf_counter()
        found = intervals(streams, start, stop)
        nursery.cancel_scope.cancel()
    return {
        "longest_gap_ms": max(found) * 1e3,
        "median_ms": statistics.median(found) * 1e3,
        "question_s": among_all,
        "question_among_streams_s": among_streams,
        "prompt_prefilling": prefilling,
        "prompt_s": long[0].times[0] - start,
    }


async def first_token(stage: Stage, words: int) -> float:
    """Seconds until the first token of a prompt of `words` tokens."""
    began = time.perf_counter()
    asked = stage.begin(1, words, 10)
    await until(asked, 1)
    return asked[0].times[0] - began


def model_of(chosen: argparse.Namespace) -> Path:
    if chosen.model:
        return Path(chosen.model)
    if not chosen.shape:
        return servers.embedded()
    return servers.random_model(chosen.shape, tokenizer=chosen.tokenizer)


def token_bytes_of(model: Path, *, small: bool) -> int:
    """Bytes of a token's keys and values. `small`: in two bytes each."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(
        2
        * config["num_hidden_layers"]
        * config.get("num_key_value_heads", heads)
        * dim
        * (2 if small else 4)
    )


def parts_of(text: str) -> tuple[int, int]:
    rows, _, length = text.partition("x")
    return int(rows), int(length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--shape", help="random weights of benchmarks.models.SHAPES")
    parser.add_argument(
        "--tokenizer", help="directory of a tokenizer; default: the embedded model's"
    )
    parser.add_argument("--mix", action="append", default=[], help="as in 31x500+1x20000")
    parser.add_argument("--equal", type=int, nargs="*", default=[])
    parser.add_argument("--gaps", type=int, nargs="*", default=[])
    parser.add_argument(
        "--question", type=int, nargs="*", default=[], help="tokens of the long prompt"
    )
    parser.add_argument("--bytes", type=int, default=4, choices=(2, 4), help="of a number in KV")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    console, made = Console(), list[Row]()

    def note(**row: Any) -> None:
        made.append(row)
        console.print(
            {
                key: round(value, 2) if isinstance(value, float) else value
                for key, value in row.items()
            }
        )
        if chosen.json:
            chosen.json.write_text(json.dumps(made, indent=1))

    model = model_of(chosen)
    token_bytes = token_bytes_of(model, small=chosen.bytes == 2)
    with servers.trouper(model, *FLAGS) as server:
        weights = health(server.port)["memory"]["active_bytes"]
        for rows in chosen.gaps:
            note(case="gaps", rows=rows, **trio.run(gaps, server.port, rows))
        for prompt in chosen.question:
            note(case=f"question beside {prompt}", **trio.run(question, server.port, prompt))
        for _ in range(chosen.rounds):
            for rows in chosen.equal:
                note(case="equal", rows=rows, **trio.run(equal, server.port, rows))
            for text in chosen.mix:
                short, long = map(parts_of, text.split("+"))
                note(case=text, **trio.run(mix, server.port, short, long, weights, token_bytes))
                if long[0] > 1:
                    note(case=f"{long[0]}x{long[1]} alone", **trio.run(alone, server.port, *long))


if __name__ == "__main__":
    main()
