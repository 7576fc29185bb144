"""`python -m tests.sim N [FIRST]`: worlds with seeds FIRST to FIRST+N-1, and how to rerun the one
that failed."""

from __future__ import annotations

import sys

from tests.campaign import campaign
from tests.sim.world import CLIENTS, run_world


def main(worlds: int = 100, first: int = 0) -> int:
    return campaign(
        "tests.sim",
        lambda seed: run_world(seed).outcomes,
        worlds,
        first,
        f"{CLIENTS} clients each: ",
    )


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
