"""A model split over ranks: the server through HTTP, our engine, and a bare loop, on the same
ranks. `python -m benchmarks.ranks`.

`bare`: the model and argmax, over rows of different lengths, or equally long ones. `engine`: our
engine without a server, each rank making the same plans for itself. `server`: `trouper launch`,
streams over HTTP, with the control link. server / bare is what serving costs; server / engine is
what scheduler, control link and HTTP cost together, so the link costs less than that.

On two NVIDIA GPUs, with a model that one would not hold well, made there with random weights:
    python -m benchmarks.ranks --backend nccl --shape 32b --tokenizer DIR --streams 1 8 32 --tokens
    128
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from benchmarks import load, servers
from benchmarks.starting import run_ranks
from trouper.system.ports import free_ports
from trouper_lab.load import Stream

Rates = dict[int, float]
KINDS = ("bare, equal", "bare", "engine", "server")
RATIOS = {
    "engine / bare": ("engine", "bare"),
    "server / engine": ("server", "engine"),
    "server / bare": ("server", "bare"),
    "server / bare, equal": ("server", "bare, equal"),
}
WORDS = 12
"""Of a prompt."""


def main() -> None:
    options = arguments()
    model = options.model or servers.random_model(options.shape, tokenizer=options.tokenizer)
    rounds = []
    for number in range(options.rounds):
        rounds.append({**without_server(model, options), "server": with_server(model, options)})
        print(f"round {number + 1} of {options.rounds}: {json.dumps(rounds[-1])}", flush=True)
    table = [row(rounds, streams) for streams in options.streams]
    print(
        f"{model.name}, {options.ranks} ranks by {options.backend}, "
        f"{platform.processor() or platform.machine()}; tokens a second"
    )
    print("| streams | " + " | ".join((*KINDS, *RATIOS)) + " |")
    print("|---" * (1 + len(KINDS) + len(RATIOS)) + "|")
    for one in table:
        kinds = " | ".join(f"{one[kind]:.1f}" for kind in KINDS)
        ratios = " | ".join(f"{one[ratio]:.3f}" for ratio in RATIOS)
        print(f"| {one['streams']} | {kinds} | {ratios} |")
    if options.out:
        options.out.write_text(
            json.dumps({"model": model.name, "rounds": rounds, "table": table}, indent=1)
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="A directory")
    parser.add_argument(
        "--shape",
        default="0.1b",
        help="Without --model: of random weights, made once (benchmarks/models.py)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="Directory of a tokenizer for --shape; default: the embedded model's",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=["ring", "nccl"], default="ring")
    parser.add_argument("--streams", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--repeats", type=int, default=3, help="Of each measurement in the life of a process"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def row(rounds: list[dict[str, Any]], streams: int) -> dict[str, float]:
    """Medians; ratios within a round, since what else a machine does changes between them."""
    rates = [{kind: float(one[kind][str(streams)]) for kind in KINDS} for one in rounds]
    medians = {kind: statistics.median(one[kind] for one in rates) for kind in KINDS}
    ratios = {
        ratio: statistics.median(one[of] / one[to] for one in rates)
        for ratio, (of, to) in RATIOS.items()
    }
    return {"streams": streams, **medians, **ratios}


def without_server(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    spec = {
        "model": str(model),
        "streams": options.streams,
        "prompt": 2 * WORDS,
        "tokens": options.tokens,
    }
    spec["rounds"] = options.repeats
    said = run_ranks(options.ranks, options.backend, ["benchmarks.ranks_bare", json.dumps(spec)])
    return dict(json.loads(said.strip().splitlines()[-1]))


def with_server(model: Path, options: argparse.Namespace) -> dict[str, float]:
    """Of one server, for each number of streams the median of some rates while all of them
    decode."""
    rates: dict[str, list[float]] = {}
    with serving(model, options) as port:
        for streams in options.streams:
            trio.run(streaming, port, streams, 8, 1000 + streams)
            for k in range(options.repeats):
                rates.setdefault(str(streams), []).append(
                    trio.run(streaming, port, streams, options.tokens, 100 * k + streams)
                )
                print(f"{streams} streams, server {rates[str(streams)][-1]:.1f}", flush=True)
    return {streams: statistics.median(some) for streams, some in rates.items()}


async def streaming(port: int, streams: int, tokens: int, seed: int) -> float:
    some = [Stream() for _ in range(streams)]
    async with trio.open_nursery() as nursery:
        for k, one in enumerate(some):
            text = load.prompt(seed + k, WORDS)
            nursery.start_soon(partial(load.stream, port, text, tokens, one, ignore_eos=True))
    return load.decode_rate(some)


@contextmanager
def serving(model: Path, options: argparse.Namespace) -> Iterator[int]:
    [port] = free_ports(1)
    launch = [
        sys.executable,
        "-m",
        "trouper",
        "launch",
        "-n",
        str(options.ranks),
        "--backend",
        options.backend,
        "--restarts",
        "0",
    ]
    serve = [
        "serve",
        "--model",
        str(model),
        "--port",
        str(port),
        "--no-ssd",
        "--request-timeout-s",
        "0",
    ]
    # Random weights repeat themselves: what drafts are worth is not asked here.
    serve += ["--speculation", "off"]
    began = time.perf_counter()
    with servers.serving("trouper", [*launch, "--", *serve], port):
        print(f"the server answers after {time.perf_counter() - began:.0f} s", flush=True)
        yield port


if __name__ == "__main__":
    main()
