"""What the prefix index costs: keys, look-up and insertion by length of the prompt. `python -m
benchmarks.lookup`.

The best of some rounds: on a machine that others use, the others are noise that only adds.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table

from trouper.actors.scheduling.eviction import Sizes
from trouper.actors.scheduling.prefix_tree import PrefixTree
from trouper.actors.scheduling.tree_node import token_bytes

LENGTHS = (1024, 4096, 16384, 65536, 131072)
BLOCK_SIZE = 16
ROUNDS = 7
BOUND_MS = 30.0
"""For keys and look-up together, of the longest prompt."""
VOCABULARY = 50_000


@attrs.frozen
class Cost:
    """Milliseconds for a prompt of `tokens` tokens."""

    tokens: int
    bytes_ms: float
    """Its tokens as bytes."""
    keys_ms: float
    """Of all its full blocks."""
    lookup_ms: float
    """All of it is found, with the keys known."""
    miss_ms: float
    """Nothing is found: keys are computed as far as somebody looks."""
    insert_ms: float
    """Nodes for all of it."""

    @property
    def found_ms(self) -> float:
        return self.keys_ms + self.lookup_ms

    @property
    def us_per_token(self) -> float:
        return self.found_ms * 1000 / self.tokens


def new_index(block_size: int) -> PrefixTree:
    sizes = Sizes(block_size=block_size, token_bytes=1, snapshot_bytes=0, capacity_bytes=2**50)
    return PrefixTree(b"n" * 32, sizes)


def insert(index: PrefixTree, tokens: bytes) -> None:
    chain = index.chain(tokens)
    parent, size = chain.root, index.sizes.block_size
    for start in range(0, len(chain) - size + 1, size):
        node = index.insert(parent, chain.part(start, start + size))
        assert node is not None, "there is room for all"
        parent = node


def fastest_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) * 1000


def measure(length: int, block_size: int) -> Cost:
    prompt = random.Random(length).choices(range(VOCABULARY), k=length)
    tokens = token_bytes(prompt)
    index = new_index(block_size)
    insert(index, tokens)
    chain = index.chain(tokens)
    blocks = length // block_size
    chain.key(blocks - 1)
    match = index.match(chain, length - 1)
    assert match.tokens == length - 1, "all of it is there"
    return Cost(
        tokens=length,
        bytes_ms=fastest_ms(lambda: token_bytes(prompt)),
        keys_ms=fastest_ms(lambda: index.chain(tokens).key(blocks - 1)),
        lookup_ms=fastest_ms(lambda: index.match(chain, length - 1)),
        miss_ms=fastest_ms(
            lambda: (empty := new_index(block_size)).match(empty.chain(tokens), length - 1)
        ),
        insert_ms=fastest_ms(lambda: insert(new_index(block_size), tokens)),
    )


def show(costs: Sequence[Cost], block_size: int) -> None:
    table = Table(
        "tokens",
        "as bytes",
        "keys",
        "look-up",
        "keys + look-up",
        "µs a token",
        "a miss",
        "insertion",
    )
    for column in table.columns:
        column.justify = "right"
    for cost in costs:
        times = (cost.bytes_ms, cost.keys_ms, cost.lookup_ms, cost.found_ms)
        rest = (cost.miss_ms, cost.insert_ms)
        table.add_row(
            f"{cost.tokens:,}",
            *(f"{ms:.3f}" for ms in times),
            f"{cost.us_per_token:.3f}",
            *(f"{ms:.3f}" for ms in rest),
        )
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    console.print(f"milliseconds, blocks of {block_size} tokens, the fastest of {ROUNDS}")


def written(costs: Sequence[Cost], block_size: int) -> str:
    rows = [{**attrs.asdict(cost), "us_per_token": cost.us_per_token} for cost in costs]
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    return json.dumps({"block_size": block_size, **machine, "lengths": rows}, indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="also as JSON, to this file")
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE)
    given = parser.parse_args()
    costs = [measure(length, given.block_size) for length in LENGTHS]
    show(costs, given.block_size)
    if given.out is not None:
        given.out.write_text(written(costs, given.block_size), encoding="utf-8")
    longest, short = costs[-1], costs[1]
    growth = longest.us_per_token / short.us_per_token
    print(f"{longest.found_ms:.1f} ms for {longest.tokens:,} tokens (at most {BOUND_MS:g})")
    print(f"{growth:.2f} times as long for each token as with {short.tokens:,} (1 is linear)")


if __name__ == "__main__":
    main()
