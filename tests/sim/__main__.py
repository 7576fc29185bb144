"""`python -m tests.sim N [FIRST]`: worlds with seeds FIRST to FIRST+N-1, and how to rerun the one that failed."""

# ruff: noqa: T201
from __future__ import annotations

import sys
import time
import traceback
from collections import Counter

from tests.sim.world import CLIENTS, run_world


def main(worlds: int = 100, first: int = 0) -> int:
    began = time.perf_counter()
    outcomes: Counter[str] = Counter()
    failed = []
    start, end, every = ("\r", "", 10) if sys.stdout.isatty() else ("", "\n", 100)
    for seed in range(first, first + worlds):
        try:
            outcomes += run_world(seed).outcomes
        except Exception:  # noqa: BLE001  A world may fail in any way; the others still count.
            failed.append(seed)
            if len(failed) <= 3:
                print(f"\nseed {seed}\n{traceback.format_exc()}", file=sys.stderr)
        done = seed - first + 1
        if done % every == 0 or done == worlds:
            took = time.perf_counter() - began
            print(f"{start}{done} of {worlds} worlds, {len(failed)} failed, {took:.1f} s", end=end, flush=True)
    print(
        f"{start and chr(10)}{CLIENTS} clients each: " + ", ".join(f"{n} {what}" for what, n in outcomes.most_common())
    )
    for seed in failed:
        print(f"failed: seed {seed}; again: python -m tests.sim 1 {seed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
