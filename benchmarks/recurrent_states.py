"""What it costs to take recurrent state back: `python -m benchmarks.recurrent_states [HYBRID...]`,
shapes of `benchmarks/copying.py`.

A plain step, a pass that verifies drafts, the repeated recurrent layers after it, and a second pass
over the model without its head, which would give the same states. Medians, in milliseconds and in
plain steps.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.copying import CONFIGS, HYBRIDS
from trouper.engine.kv.model_body import body_of
from trouper.engine.kv.model_caches import guess_batching
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import of_device
from trouper.engine.passes.region import Ints
from trouper.engine.spec_decode.prompt_lookup import Drafting
from trouper.protocol.plans import RowId

PROMPT, DRAFT, TIMES = 60, 8, 7
TOKENS = DRAFT + 1
"""Tokens of each row in a pass that verifies."""


def median_ms(measure: Callable[[], float]) -> float:
    measure()
    return float(np.median([measure() for _ in range(TIMES)])) * 1e3


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Measured:
    """Decoding rows of a random model."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.model, self.num_rows = model, rows
        self.rows = SlotRows(
            model, guess_batching(model), PLAIN, Drafting(tokens=DRAFT).slack, of_device()
        )
        for row in map(RowId, range(rows)):
            self.rows.open(row, PROMPT)
            self.rows.prefill({row: [*range(1, PROMPT)]})
            self.rows.promote(row)

    def plain(self) -> float:
        return timed(lambda: mx.eval(self.rows.decode(mx.array([5] * self.num_rows))))

    def verify(self) -> float:
        tokens = mx.array([[5] * TOKENS] * self.num_rows)
        return timed(
            lambda: mx.eval(self.rows.verify(tokens, np.full(self.num_rows, TOKENS, np.int32)))
        )

    def states(self, accepted: Ints) -> float:
        """The states alone, after a pass of which each row keeps so many draft tokens."""
        self.verify()
        return timed(lambda: self.rows.accepted(accepted))

    def all_right(self) -> float:
        return self.verify() + timed(
            lambda: self.rows.accepted(np.full(self.num_rows, DRAFT, np.int32))
        )

    def second_pass(self, tokens: int) -> float:
        """All of the model but its head, over its own caches."""
        from mlx_lm.models.cache import make_prompt_cache

        body, cache = body_of(self.model), make_prompt_cache(self.model)
        assert body is not None
        mx.eval(body(mx.array([[5] * PROMPT] * self.num_rows), cache=cache))
        return timed(lambda: mx.eval(body(mx.array([[5] * tokens] * self.num_rows), cache=cache)))


def measure(name: str, rows: int) -> None:
    mx.random.seed(0)
    module = importlib.import_module(f"mlx_lm.models.{CONFIGS[name]['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(CONFIGS[name]))
    mx.eval(model.parameters())
    of = Measured(model, rows)
    plain = median_ms(of.plain)
    half, spread = np.full(rows, DRAFT // 2, np.int32), np.arange(rows, dtype=np.int32) % DRAFT
    results = {
        "all right": median_ms(of.all_right),
        "states, half is kept": median_ms(lambda: of.states(half)),
        "states, rows keep different numbers": median_ms(lambda: of.states(spread)),
        "a second pass over half": median_ms(lambda: of.second_pass(DRAFT // 2 + 1)),
        "a second pass over all": median_ms(lambda: of.second_pass(TOKENS)),
    }
    print(f"{name}, {rows} rows: plain {plain:.1f} ms; ", end="")
    print(
        "; ".join(f"{what} {ms:.1f} ms = {ms / plain:.2f}" for what, ms in results.items()),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hybrids", nargs="*", metavar="HYBRID", help=", ".join(HYBRIDS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    for name in options.hybrids or HYBRIDS:
        for rows in options.rows:
            measure(name, rows)


if __name__ == "__main__":
    main()
