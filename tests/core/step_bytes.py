"""`python -m tests.core.step_bytes KV LENGTH`: the most bytes that each of 600 decode steps
allocated, behind a prompt of LENGTH tokens, as JSON.

In a process of its own, which has one thread: `tracemalloc.stop()` ends a process in which another
thread waits for the GIL to allocate (https://github.com/python/cpython/issues/128679). A thread on
which MLX drew random numbers does so when it ends, and threads of earlier tests end some seconds
after their last work.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable

from tests.core.driving import DrivenCore
from tests.fakes import CUTTABLE, UNCUTTABLE
from trouper.protocol.kv import KvLayout

KV = {"cuttable": CUTTABLE, "snapshots": UNCUTTABLE}
STEPS = 600


def decoding(length: int, kv: KvLayout, *, settled: int = 300) -> DrivenCore:
    """A row that decodes behind a prompt of this length, with a viewer of the live page."""
    core = DrivenCore(kv)
    core.arrive(length, max_tokens=4000)
    core.until_decoding()
    for _ in range(settled):
        core.step()
    return core


def bytes_of_steps(core: DrivenCore, steps: int) -> list[int]:
    """Most bytes that each step had allocated at a time."""
    peaks: list[int] = []

    def measured(work: Callable[[], None]) -> None:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        work()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)

    tracemalloc.start()
    for _ in range(steps):
        core.step(measured)
    tracemalloc.stop()
    return peaks


if __name__ == "__main__":
    print(json.dumps(bytes_of_steps(decoding(int(sys.argv[2]), KV[sys.argv[1]]), STEPS)))
