"""`python -m benchmarks.cache`: what the prefix cache is worth, through HTTP, each figure beside
the one it is compared to.

Times to the first token (TTFT) are from the client's request, in seconds; each ratio is of medians
of one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio
from rich.console import Console

from benchmarks import load, servers
from trouper_lab.load import Stream

Row = dict[str, Any]
BLOCK = 64
"""Tokens of a cached block"""
ROOM = ("--max-prompt-tokens", "8000", "--first-token-timeout-s", "0")


def words(count: int, seed: int) -> str:
    """About 1.2 tokens a word, different from the first one on for each seed."""
    return f"{seed} begins here: " + " ".join(
        load.WORDS[(seed * 7 + k * k + k * seed) % 16] for k in range(count)
    )


def ttft(port: int, prompt: str, tokens: int = 2) -> float:
    one = Stream()
    trio.run(partial(load.stream, port, prompt, tokens, one, ignore_eos=True))
    return one.ttft_s


def health(port: int) -> Row:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        return dict(json.load(answer))


def shared_system_prompt(model: Path, rounds: int) -> Row:
    """One user, and 0.3 s later five more with the same 600-word system prompt and their own
    question."""
    rows: list[Row] = []
    for k in range(rounds):
        with servers.trouper(model) as server:
            # Speeds are measured: a server that has just started is careful.
            ttft(server.port, words(600, 900 + k))
            cold = ttft(server.port, words(600, 100 + k))
            rows.append(
                {"cold_s": cold, "followers_s": trio.run(_six, server.port, words(600, 200 + k))}
            )
    worst = [max(row["followers_s"]) / row["cold_s"] for row in rows]
    return {"runs": rows, "worst follower / cold": statistics.median(worst)}


async def _six(port: int, system: str) -> list[float]:
    streams = [Stream() for _ in range(6)]

    async def user(k: int, after_s: float) -> None:
        await trio.sleep(after_s)
        await load.stream(
            port,
            f"{system} Question {k}: what is a {load.WORDS[k]}?",
            8,
            streams[k],
            ignore_eos=True,
        )

    async with trio.open_nursery() as nursery:
        for k in range(6):
            nursery.start_soon(user, k, 0.3 if k else 0)
    return [one.ttft_s for one in streams[1:]]


def same_again(model: Path, rounds: int) -> Row:
    """The same 600-word prompt again, against a cold prompt as short as what is left to compute:
    one token."""
    with servers.trouper(model) as server:
        short = [ttft(server.port, f"{load.WORDS[k % 16]}") for k in range(rounds + 2)][2:]
        cold, warm = [], []
        for k in range(rounds):
            cold.append(ttft(server.port, words(600, 300 + k)))
            warm.append(ttft(server.port, words(600, 300 + k)))
    row = {
        "cold_s": statistics.median(cold),
        "warm_s": statistics.median(warm),
        "short_s": statistics.median(short),
    }
    return row | {
        "warm / short": row["warm_s"] / row["short_s"],
        "warm / cold": row["warm_s"] / row["cold_s"],
    }


def from_disk(model: Path, lengths: list[int], rounds: int) -> list[Row]:
    """After a restart: a prefix from SSD against RAM, and against computing it with a cache of
    nothing."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        disk = Path(name) / "blocks"
        prompts = {
            (length, k): words(length, 400 + 10 * k + length)
            for length in lengths
            for k in range(rounds)
        }
        with servers.trouper(model, *ROOM, disk=disk) as server:
            cold = {key: ttft(server.port, prompt) for key, prompt in prompts.items()}
            ram = {key: ttft(server.port, prompt + " More") for key, prompt in prompts.items()}
            until_written(server.port)
        with servers.trouper(model, *ROOM, disk=disk) as server:
            ttft(server.port, words(200, 999))  # A speed to decide by.
            ssd = {key: ttft(server.port, prompt + " More") for key, prompt in prompts.items()}
            read = health(server.port)["cache"]["hits_disk"]
        for length in lengths:
            one = {
                name: statistics.median(times[length, k] for k in range(rounds))
                for name, times in {"cold_s": cold, "ram_s": ram, "ssd_s": ssd}.items()
            }
            one |= {
                "ssd / ram": one["ssd_s"] / one["ram_s"],
                "ssd / cold": one["ssd_s"] / one["cold_s"],
            }
            rows.append({"words": length, **one, "blocks read in all": read})
    return rows


TURNS = ("own", "other", "anew")
"""The next turn: at the server of the first one, from memory; at another one of the same directory,
from disk; and computed again there, under a salt of its own."""


def between_servers(model: Path, lengths: list[int], rounds: int) -> list[Row]:
    """Conversations begin at each of two servers of one cache directory in turn; `TURNS` are asked
    in turn."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as name,
        servers.trouper(model, *ROOM, disk=Path(name) / "blocks") as one,
        servers.trouper(model, *ROOM, disk=Path(name) / "blocks") as two,
    ):
        for number, server in enumerate((one, two)):
            ttft(server.port, words(200, 998 + number))  # A speed to decide by.
        for length in lengths:
            pairs = [(one, two) if k % 2 else (two, one) for k in range(rounds)]
            asked = [
                _turns(begun.port, away.port, words(length, 700 + 10 * k + length), k)
                for k, (begun, away) in enumerate(pairs)
            ]
            seconds = {
                f"{name}_s": statistics.median(turn[name].first_s for turn in asked)
                for name in TURNS
            }
            rows.append(
                {
                    "words": length,
                    **seconds,
                    "other / own": seconds["other_s"] / seconds["own_s"],
                    "other / anew": seconds["other_s"] / seconds["anew_s"],
                    "cached": {
                        name: [turn[name].cached_tokens for turn in asked] for name in TURNS
                    },
                    "prompts": [turn["own"].prompt_tokens for turn in asked],
                    "answers that differ": sum(
                        len({turn[name].text for name in TURNS}) > 1 for turn in asked
                    ),
                }
            )
    return rows


def _turns(begun: int, away: int, prompt: str, first: int) -> dict[str, Greedy]:
    """The turns after a prompt that the server at port `begun` answered, by their names."""
    for port in (begun, away):
        until_written(port)
    before, answer = max(blocks(begun), blocks(away)), greedy(begun, prompt)
    # The other server has seen all of its files by then.
    while min(blocks(begun), blocks(away)) < before + answer.prompt_tokens // BLOCK:
        time.sleep(0.5)
    turn = f"{prompt}{answer.text} And then the"
    ways: dict[str, tuple[int, Row]] = {
        "own": (begun, {}),
        "other": (away, {}),
        "anew": (away, {"cache_salt": "anew"}),
    }
    names = [TURNS[(first + k) % 3] for k in range(3)]
    return {name: greedy(ways[name][0], turn, **ways[name][1]) for name in names}


def blocks(port: int) -> int:
    return int(health(port)["directory"]["blocks"])


@attrs.define
class Greedy:
    """One answer. `first_s`: time to its first text."""

    first_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


def greedy(port: int, prompt: str, tokens: int = 24, **more: Any) -> Greedy:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | more
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    answer, began = Greedy(), time.perf_counter()
    # Our own loopback address
    with urllib.request.urlopen(request) as lines:  # noqa: S310
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if usage := chunk.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            text = "".join(choice["text"] for choice in chunk["choices"])
            if text and not answer.text:
                answer.first_s = time.perf_counter() - began
            answer.text += text
    return answer


def until_written(port: int) -> None:
    before = -1
    while (now := health(port)["directory"]["written_bytes"]) != before:
        before = now
        time.sleep(3)


def while_writing(model: Path, rounds: int) -> Row:
    """8 streams decode after 8 long prompts, whose blocks are written meanwhile; with a disk and
    without, in turn."""
    rates: dict[str, list[float]] = {"no disk": [], "disk": []}
    written = 0
    for k in range(rounds):
        for name, measured in rates.items():
            with tempfile.TemporaryDirectory() as folder:
                disk = Path(folder) / "blocks" if name == "disk" else None
                with servers.trouper(model, *ROOM, disk=disk) as server:
                    prompts = [words(200, 500 + 10 * k + n) for n in range(8)]
                    done = load.read_afterwards(server.port, prompts, 100)
                    measured.append(load.decode_rate(done))
                    written = max(written, health(server.port)["directory"]["written_bytes"])
    ratio = statistics.median(d / n for d, n in zip(rates["disk"], rates["no disk"], strict=True))
    return {"tokens_per_s": rates, "disk / no disk": ratio, "written_mb": written / 1e6}


def report(
    work: Mapping[str, Callable[[], Any]], only: Sequence[str] | None, out: Path, **settings: Any
) -> None:
    """Run what is named, or all; print each result, and write all of them with the settings to
    `out`."""
    console, results = Console(width=160), dict[str, Any](settings)
    for name, run in work.items():
        if only is None or name in only:
            results[name] = run()
            console.print(name, results[name])
    out.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[30, 60, 120, 250, 500, 3300], help="words"
    )
    parser.add_argument(
        "--only", nargs="+", choices=["shared", "again", "disk", "servers", "writing"]
    )
    parser.add_argument("--out", type=Path, default=Path("bench-cache.json"))
    options = parser.parse_args()
    model = servers.float32_copy(servers.embedded())
    work: dict[str, Callable[[], Any]] = {
        "shared": partial(shared_system_prompt, model, options.rounds),
        "again": partial(same_again, model, options.rounds),
        "disk": partial(from_disk, model, options.lengths, options.rounds),
        "servers": partial(between_servers, model, options.lengths, options.rounds),
        "writing": partial(while_writing, model, options.rounds),
    }
    report(work, options.only, options.out)


if __name__ == "__main__":
    main()
