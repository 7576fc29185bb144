"""`python -m tests.model_cycles [CYCLES]`: figures of load, unload, sleep and wake in a loop under
load of another model."""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import trio

from tests.model_cycles.cycles import Seen, run_cycles

WARM = 100
"""Cycles before those whose memory is compared: by then caches of libraries have filled, and heaps
are as large as they get."""
STALL_MS = 300
"""The bound on a pause (--decode-stall-ms)."""


def report(index: int, seen: Seen) -> None:
    if index % 20 == 19:
        print(
            f"{index + 1}: {seen.resident_bytes[-1] / 1e6:.1f} MB resident, "
            f"{seen.active_bytes[-1] / 1e6:.2f} MB of MLX",
            flush=True,
        )


def part(gaps: Counter[int], fraction: float) -> int:
    """The gap, in ms, that this fraction of all does not exceed."""
    return sorted(gaps.elements())[int(gaps.total() * fraction)]


def main(count: int) -> int:
    with tempfile.TemporaryDirectory() as directory:
        seen = trio.run(partial(run_cycles, Path(directory), WARM + count, report))
    slope = seen.slope(WARM)
    print(
        f"{count} cycles after {WARM}: resident memory {slope.value / 1e3:+.2f} kB a cycle (95 %: "
        f"{slope.low / 1e3:+.2f} to {slope.high / 1e3:+.2f}); {seen.answers} answers of the "
        f"model that comes and goes, {seen.streams} streams of the other, {seen.lost} lost"
    )
    for name, gaps in (
        ("between cycles", seen.quiet_gaps_ms),
        ("while models came and went", seen.gaps_ms),
        ("of which the process was busy at most", seen.busy_gaps_ms),
    ):
        print(
            f"pauses between tokens {name}: {gaps.total()}, median {part(gaps, 0.5)} ms, 99.9 % "
            f"{part(gaps, 0.999)}, longest {max(gaps)}"
        )
    return int(seen.lost > 0 or slope.low > 0 or max(seen.busy_gaps_ms) > STALL_MS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
