"""Two ranks over a slow link, and one rank with one thread as each of two has: a part of every
layer each (tensor parallel), or half of the layers each (`--pipeline`). `python -m
benchmarks.ranks_pipeline`. Linux, as root.

Each rank is in a network namespace of its own, and a link of a delay and a rate joins them
(`slow_link.py`). Rank 0 is asked by HTTP within its namespace; all servers on one machine, in
turns. Tokens a second from the first request to the last token. `first token`: of one prompt of
--prompt words that nobody has computed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio

from benchmarks import load, servers
from benchmarks.ranks import WORDS
from benchmarks.slow_link import ADDRESSES, inside, slow_link
from trouper_lab.load import Stream

KINDS: dict[str, tuple[int, Sequence[str]]] = {
    "one rank": (1, []),
    "tensor parallel": (2, []),
    "pipeline": (2, ["--pipeline"]),
}
"""Ranks and flags."""
PORT = 8000
"""Nobody else's, in a namespace of its own."""
RING_PORT = 5100
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
Figures = dict[str, list[float]]


def main() -> None:
    options = arguments()
    if options.ranks_only:
        print(json.dumps(measured(options)))
        return
    model = options.model or servers.random_model(options.shape)
    command = [sys.executable, "-m", "benchmarks.ranks_pipeline", *sys.argv[1:]]
    command += ["--ranks-only", "--model", str(model)]
    rounds: dict[str, Figures] = {kind: {} for kind in KINDS}
    with slow_link(options.delay_ms, options.gbit):
        for number in range(options.rounds):
            said = subprocess.run(inside(0, command), stdout=subprocess.PIPE, check=True).stdout
            of_round = json.loads(said.splitlines()[-1])
            loads = os.getloadavg()
            print(f"round {number + 1}, load average {loads[0]:.1f}: {of_round}", flush=True)
            for kind, figures in of_round.items():
                for name, figure in figures.items():
                    rounds[kind].setdefault(name, []).append(figure)
    print(f"{model.name}, {options.delay_ms} ms each way, {options.gbit} Gbit/s")
    names = list(rounds["pipeline"])
    print(f"| | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for kind, medians in rounds.items():
        shown = (f"{statistics.median(medians[name]):.2f}" for name in names)
        print(f"| {kind} | {' | '.join(shown)} |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="A directory")
    parser.add_argument("--shape", default="30m", help="Without --model (benchmarks/models.py)")
    parser.add_argument("--delay-ms", type=float, default=0.5, help="Each way")
    parser.add_argument("--gbit", type=float, default=1.0, help="A second, each way")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=500, help="Words")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Each kind once, by this process in rank 0's namespace."""
    figures: dict[str, dict[str, float]] = {}
    for kind, (ranks, flags) in KINDS.items():
        with serving(options.model, ranks, flags):
            figures[kind] = {
                f"{streams} streams, tokens a second": trio.run(streaming, streams, options.tokens)
                for streams in options.streams
            }
            figures[kind]["first token, s"] = trio.run(first_token, options.prompt)
    return figures


async def streaming(streams: int, tokens: int) -> float:
    some = [Stream() for _ in range(streams)]
    async with trio.open_nursery() as nursery:
        for number, stream in enumerate(some):
            text = load.prompt(100 * streams + number, WORDS)
            nursery.start_soon(partial(load.stream, PORT, text, tokens, stream, ignore_eos=True))
    return load.throughput(some)


async def first_token(words: int) -> float:
    stream = Stream()
    await load.stream(PORT, load.prompt(0, words), 2, stream, ignore_eos=True)
    return stream.times[0] - stream.sent


@contextmanager
def serving(model: Path, ranks: int, flags: Sequence[str]) -> Iterator[None]:
    serve = [sys.executable, "-m", "trouper", "serve", "--model", str(model), "--no-ssd"]
    serve += ["--port", str(PORT), "--speculation", "off", "--request-timeout-s", "0", *flags]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as hosts:
        json.dump([[f"{address}:{RING_PORT}"] for address in ADDRESSES], hosts)
        hosts.flush()
        ring = {"MLX_HOSTFILE": hosts.name} if ranks > 1 else {}
        follower = _follower(serve, ring) if ranks > 1 else None
        try:
            with servers.serving("trouper", serve, PORT, {**THREADS, **ring, "MLX_RANK": "0"}):
                yield
        finally:
            if follower is not None:
                follower.terminate()
                follower.wait(20)


def _follower(serve: list[str], ring: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        inside(1, serve),
        env={**os.environ, **THREADS, **ring, "MLX_RANK": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
