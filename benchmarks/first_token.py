"""`just bench-first-token`: the first token of one short prompt on an idle server, beside a bare
prefill of as many tokens, the last one in a pass of its own as mlx-lm has it.

Both are asked in turns, so that a slow moment of the machine meets both. The server's time is that
of a client: connecting, tokenizing, scheduling, prefill, and the first event on the socket. Prompts
share nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from benchmarks import load, servers
from benchmarks.prefill import loop
from trouper_lab.load import Stream

PAUSE_S = 0.3
"""Pause between turns: BLAS's threads look for more work for some time, and would take a core from
the other one."""


async def _ask(port: int, seed: int, words: int) -> Stream:
    return await load.stream(port, load.prompt(seed, words), 4, Stream(), ignore_eos=True)


def measure(server: servers.Server, model: Path, words: int, rounds: int) -> dict[str, Any]:
    pairs: list[tuple[float, float]] = []
    with loop("bare_mlx", model) as bare:
        for seed in range(rounds + 3):
            asked = trio.run(partial(_ask, server.port, 1000 * words + seed, words))
            time.sleep(PAUSE_S)
            pairs.append((asked.times[0] - asked.sent, bare.seconds(asked.prompt_tokens)))
            time.sleep(PAUSE_S)
    pairs = pairs[3:]  # The first ones warm both up.
    served, alone = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "prompt_tokens": asked.prompt_tokens,
        "first_token_ms": served * 1e3,
        "bare_prefill_ms": alone * 1e3,
        "beyond 1.05 of bare, ms": (served - 1.05 * alone) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--words", type=int, nargs="+", default=[12, 50])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    model, console, made = (
        Path(chosen.model) if chosen.model else servers.embedded(),
        Console(),
        list[dict[str, Any]](),
    )
    with servers.trouper(model) as server:
        for words in chosen.words:
            made.append(measure(server, model, words, chosen.rounds))
            console.print({key: round(value, 2) for key, value in made[-1].items()})
    if chosen.json:
        chosen.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
