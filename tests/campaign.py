"""Many seeds, one after another: what became of each, and how to play again the one that failed."""

# ruff: noqa: T201
from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable


def campaign(
    module: str,
    outcomes_of: Callable[[int], Counter[str]],
    seeds: int,
    first: int,
    said: str = "",
    *,
    called: str = "worlds",
    every: int = 100,
) -> int:
    """So many seeds from `first` on, as `python -m MODULE` plays them; 1 if one failed. `called`:
    what a seed makes; `every` so many it is said how far this is; `said` precedes the outcomes."""
    began, failed, outcomes = time.perf_counter(), list[int](), Counter[str]()
    start, end, every = ("\r", "", 10) if sys.stdout.isatty() else ("", "\n", every)
    for seed in range(first, first + seeds):
        try:
            outcomes += outcomes_of(seed)
        except Exception:  # noqa: BLE001  It may fail in any way; the others still count.
            failed.append(seed)
            if len(failed) <= 3:
                print(f"\nseed {seed}\n{traceback.format_exc()}", file=sys.stderr)
        done = seed - first + 1
        if done % every == 0 or done == seeds:
            took = time.perf_counter() - began
            print(
                f"{start}{done} of {seeds} {called}, {len(failed)} failed, {took:.1f} s",
                end=end,
                flush=True,
            )
    print((start and "\n") + said + ", ".join(f"{n} {what}" for what, n in outcomes.most_common()))
    for seed in failed:
        print(f"failed: seed {seed}; again: python -m {module} 1 {seed}")
    return bool(failed)
