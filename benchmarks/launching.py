"""`just bench-launching`: what a pass of the engine takes by how MLX sends its kernels to a CUDA device.

On a fast GPU sending a pass takes longer than computing it. MLX puts kernels into CUDA graphs of MLX_MAX_OPS_PER_BUFFER operations, or sends
each by itself (MLX_USE_CUDA_GRAPHS=0). For each of these settings a process of its own makes a model of the shape with random weights. Then
they take turns, and each reports the milliseconds of the first pass over a lone prompt, of decode steps of so many rows, and the longest
of the steps in which these rows joined one by one. No server: the steps are planned here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

WAYS: dict[str, dict[str, str]] = {
    "graphs of 20": {"MLX_MAX_OPS_PER_BUFFER": "20"},
    "graphs of 100": {"MLX_MAX_OPS_PER_BUFFER": "100"},
    "no graphs": {"MLX_USE_CUDA_GRAPHS": "0"},
}
STEPS = 60
"""Number of decode steps of a measurement."""
PREPARING = 4
"""Number of passes of each kind before its first measurement: kernels are compiled, and the pass is."""
PAUSE_S = 0.3
"""Pause before a prompt, as in `bench-first-token`: the caches of an idle server are cold."""
Row = dict[str, Any]


class Steps:
    """An engine over a model with random weights, and its plans."""

    def __init__(self, shape: str) -> None:
        import trouper.engine  # noqa: F401 - OpenBLAS before MLX

        # isort: split
        from benchmarks.models import random_model
        from trouper.engine.products import linear_layers
        from trouper.engine.step import StepEngine

        model, self._vocabulary = random_model(shape)
        linear_layers.prepare(model)
        self._engine = StepEngine(model, self._vocabulary)
        self._rows = 0

    def prompt_ms(self, tokens: int) -> float:
        """Milliseconds of the first pass over a lone prompt, until its token is there."""
        time.sleep(PAUSE_S)
        row, plan = self._admitted(tokens)
        began = time.perf_counter()
        self._engine.collect(self._engine.launch(plan))
        took = time.perf_counter() - began
        self._drop([row])
        return took * 1000

    def decode_ms(self, count: int) -> tuple[float, float]:
        """Milliseconds of the median step of so many rows, each launched before the one before is read, as the engine's thread does, and of
        the longest step while they joined."""
        from trouper.protocol.plans import Plan

        engine, rows, joining = self._engine, [], list[float]()
        for length in range(count):
            row, plan = self._admitted(30 + length, rows)
            for step in (plan, *[Plan(0, decode=(*rows, row))] * 3):
                began = time.perf_counter()
                engine.collect(engine.launch(step))
                joining.append(time.perf_counter() - began)
            rows.append(row)
        times, before = list[float](), engine.launch(Plan(0, decode=tuple(rows)))
        for _ in range(STEPS):
            began = time.perf_counter()
            after = engine.launch(Plan(0, decode=tuple(rows)))
            engine.collect(before)
            times.append(time.perf_counter() - began)
            before = after
        engine.collect(before)
        self._drop(rows)
        return statistics.median(times) * 1000, max(joining) * 1000

    def _admitted(self, tokens: int, decoding: Sequence[Any] = ()) -> tuple[Any, Any]:
        """A new row, and the plan that computes its prompt beside rows that decode."""
        import numpy as np

        from trouper.protocol.plans import Admit, Chunk, Plan, RowId
        from trouper.protocol.sampling import Sampling

        self._rows += 1
        row = RowId(self._rows)
        prompt = np.random.default_rng(self._rows).integers(1000, self._vocabulary - 1, tokens).astype("<i4").tobytes()
        admit = Admit(row, prompt, Sampling(temperature=0.0))
        return row, Plan(0, admit=(admit,), decode=tuple(decoding), prefill=(Chunk(row, tokens),))

    def _drop(self, rows: Sequence[Any]) -> None:
        from trouper.protocol.plans import Plan

        self._engine.collect(self._engine.launch(Plan(0, drop=tuple(rows))))


def worker(shape: str) -> None:
    """For each line `PROMPTS ROWS` (two lists, in JSON) of standard input, print a line of what they take."""
    steps, prepared = Steps(shape), False
    for line in sys.stdin:
        prompts, rows = json.loads(line)
        for _ in range(1 if prepared else PREPARING):
            found: Row = {f"prompt of {tokens}": steps.prompt_ms(tokens) for tokens in prompts}
            for count in rows:
                found[f"{count} rows"], found[f"longest, {count} join"] = steps.decode_ms(count)
        prepared = True
        print(json.dumps(found), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", default=["0.6b", "4b"], help="shapes of benchmarks/models.py, in 16 bits"
    )
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--prompts", type=int, nargs="+", default=[77, 300], help="tokens of lone prompts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    console = Console(width=200)
    for shape in chosen.shapes:
        command = [sys.executable, "-m", "benchmarks.launching", "--worker", shape]
        processes = {
            way: subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=os.environ | WAYS[way])
            for way in chosen.ways
        }
        rounds = {way: list[Row]() for way in processes}
        for _ in range(chosen.rounds):
            for way, process in processes.items():
                assert process.stdin and process.stdout
                print(json.dumps((chosen.prompts, chosen.rows)), file=process.stdin, flush=True)
                rounds[way].append(json.loads(process.stdout.readline()))
        for process in processes.values():
            process.communicate()
        for way, found in rounds.items():
            medians = {key: round(statistics.median(one[key] for one in found), 2) for key in found[0]}
            console.print({"shape": shape, "way": way, **medians})


if __name__ == "__main__":
    main()
