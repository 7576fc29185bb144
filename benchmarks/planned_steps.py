"""An engine over a model with random weights, whose steps are planned here. `python -m
benchmarks.planned_steps SHAPE` reads lines `PROMPTS ROWS` (two lists, in JSON) and prints for each
a line of what such passes take, in milliseconds, and of how many primitives decode steps have, for
`benchmarks.launching`."""

from __future__ import annotations

import io
import json
import statistics
import sys
import time
from collections.abc import Sequence
from unittest import mock

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import numpy as np

from benchmarks.models import random_model
from trouper.engine.products import linear_layers
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling

STEPS = 60
"""Number of decode steps of a measurement."""
PREPARING = 4
"""Number of passes of each kind before its first measurement: kernels are compiled, and the pass
is."""
PAUSE_S = 0.3
"""Pause before a prompt, as in `bench-first-token`: the caches of an idle server are cold."""


class Steps:
    """An engine over a model with random weights, and its plans."""

    def __init__(self, shape: str) -> None:
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

    def decoding(self, count: int) -> dict[str, float]:
        """Milliseconds of the median step of so many rows, each launched before the one before is
        read, as the engine's thread does, and of the longest step while they joined; and primitives
        of a step, which MLX instantiates and sends."""
        engine, rows, joining = self._engine, list[RowId](), list[float]()
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
        primitives = self._primitives(rows)
        self._drop(rows)
        return {
            f"{count} rows": statistics.median(times) * 1000,
            f"longest, {count} join": max(joining) * 1000,
            f"primitives, {count} rows": primitives,
        }

    def _primitives(self, rows: Sequence[RowId]) -> int:
        sent, usual = list[int](), mx.async_eval

        def counting(*arrays: mx.array) -> None:
            dot = io.StringIO()
            mx.export_to_dot(dot, *arrays)
            sent.append(dot.getvalue().count("shape=rectangle"))
            usual(*arrays)

        with mock.patch.object(mx, "async_eval", counting):
            self._engine.collect(self._engine.launch(Plan(0, decode=tuple(rows))))
        return max(sent)

    def _admitted(self, tokens: int, decoding: Sequence[RowId] = ()) -> tuple[RowId, Plan]:
        """A new row, and the plan that computes its prompt beside rows that decode."""
        self._rows += 1
        row = RowId(self._rows)
        prompt = (
            np.random.default_rng(self._rows)
            .integers(1000, self._vocabulary - 1, tokens)
            .astype("<i4")
            .tobytes()
        )
        admit = Admit(row, prompt, Sampling(temperature=0.0))
        return row, Plan(0, admit=(admit,), decode=tuple(decoding), prefill=(Chunk(row, tokens),))

    def _drop(self, rows: Sequence[RowId]) -> None:
        self._engine.collect(self._engine.launch(Plan(0, drop=tuple(rows))))


def main() -> None:
    steps, prepared = Steps(sys.argv[1]), False
    for line in sys.stdin:
        prompts, rows = json.loads(line)
        for _ in range(1 if prepared else PREPARING):
            found = {f"prompt of {tokens}": steps.prompt_ms(tokens) for tokens in prompts}
            for count in rows:
                found |= steps.decoding(count)
        prepared = True
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
