"""`just bench-checkouts DIR ...`: this checkout beside others, each with its own `.venv`, in turns.

All servers run at once and are asked one after another in each round, in an order that turns: what
the machine does meanwhile concerns all of them. Each figure is the other checkout's, this one's,
and the mean of the rounds' ratios with its interval of 95 %.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table

from benchmarks import edge, load, servers
from benchmarks.cache import ttft, words
from benchmarks.paired import interval

FLAGS = ("--speculation", "off")
MANY_STREAMS = ("--completion-batch-size", "128", "--max-queue-size", "1024")


@attrs.frozen
class Figure:
    """`measure` takes a server and a seed that is new in each round and the same for all
    servers."""

    name: str
    more_is_better: bool
    measure: Callable[[servers.Server, int], float]


def decode_rate(streams: int, tokens: int) -> Callable[[servers.Server, int], float]:
    def measure(server: servers.Server, seed: int) -> float:
        texts = [load.prompt(seed + k, 12) for k in range(streams)]
        return load.decode_rate(load.read_afterwards(server.port, texts, tokens, ignore_eos=True))

    return measure


def cold(server: servers.Server, seed: int) -> float:
    return ttft(server.port, words(500, seed))


def cached(server: servers.Server, seed: int) -> float:
    """The conversation of `cold`, one question later."""
    return ttft(server.port, f"{words(500, seed)} And what came after that, in a few words?")


def event_loop(clients: edge.Clients) -> Callable[[servers.Server, int], float]:
    """CPU time of the event loop's thread, in us a token."""

    def measure(server: servers.Server, seed: int) -> float:
        return float(edge.measure(server, 32, 100, clients, seed)["loop_us_per_token"])

    return measure


def play(
    checkouts: list[Path], model: Path, flags: tuple[str, ...], figures: list[Figure], rounds: int
) -> list[tuple[Figure, list[list[float]]]]:
    """Values by figure, checkout and round. The first round warms up and is left out."""
    values = [[list[float]() for _ in checkouts] for _ in figures]
    with ExitStack() as stack:
        running = [
            stack.enter_context(servers.trouper(model, *FLAGS, *flags, checkout=one))
            for one in checkouts
        ]
        for n in range(rounds + 1):
            for k in range(len(running)):
                turn = (k + n) % len(running)
                for figure, of_figure in zip(figures, values, strict=True):
                    value = figure.measure(running[turn], 1000 + 97 * n)
                    if n:
                        of_figure[turn].append(value)
    return list(zip(figures, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("others", type=Path, nargs="+", help="checkouts with a .venv")
    parser.add_argument("--rounds", type=int, default=8)
    chosen = parser.parse_args()
    checkouts = [Path.cwd(), *chosen.others]
    model = servers.embedded()
    engine = [
        Figure("tokens a second, 1 stream", True, decode_rate(1, 100)),
        Figure("tokens a second, 8 streams", True, decode_rate(8, 60)),
        Figure("first token, 500 new words, s", False, cold),
        Figure("first token, 500 words cached, s", False, cached),
    ]
    with edge.Clients(1) as clients:
        loop = [Figure("event loop, us a token, 32 streams", False, event_loop(clients))]
        rows = play(checkouts, servers.tiny_copy(model), MANY_STREAMS, loop, chosen.rounds)
    rows += play(checkouts, model, (), engine, chosen.rounds)
    table = Table("figure", "other checkout", "other", "this", "this / other", "better if")
    for figure, (own, *of_others) in rows:
        for other, theirs in zip(chosen.others, of_others, strict=True):
            ratios = [mine / before for mine, before in zip(own, theirs, strict=True)]
            table.add_row(
                figure.name,
                other.name,
                f"{statistics.median(theirs):.4g}",
                f"{statistics.median(own):.4g}",
                str(interval(ratios)),
                "more" if figure.more_is_better else "less",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
