"""What structure costs: rows that follow a JSON schema against plain ones, decoding side by side.
`just bench-structure`.

Steps of the engine itself, all rows already decoding, rounds of both kinds one after another so
that what else the machine does hits them alike. Prints the median of the rounds' ratios; 1 is no
cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import numpy as np

from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.platform import device
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.grammar import Grammar
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "string", "format": "date"},
        "friends": {
            "type": "array",
            "minItems": 50,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "age": {"type": "integer", "minimum": 0, "maximum": 130},
                    "kind": {"enum": ["human", "cat", "dog"]},
                },
                "required": ["name", "age", "kind"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "born", "friends"],
    "additionalProperties": False,
}
"""Long enough that no row ends."""
QUESTION = "Make up a person with many friends, as JSON."


class Rows:
    """So many rows of one kind on an engine of their own."""

    def __init__(self, loaded: EvaluatedModel, rows: int, grammar: Grammar | None) -> None:
        self._engine = StepEngine(
            loaded.model, loaded.card.vocab_size, loaded.kv, loaded.tokenizer.grammars
        )
        self._rows = tuple(RowId(n) for n in range(rows))
        self._steps = 0
        self._pending: Launched | None = None
        prompt = loaded.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
        data = np.array(prompt, "<i4").tobytes()
        # The end is forbidden to both, so that both go on, and pay for it alike.
        never = tuple((token, -100.0) for token in sorted(loaded.tokenizer.eos_token_ids))
        admits = tuple(
            Admit(row, data, Sampling(temperature=0.8, seed=row, logit_bias=never), grammar=grammar)
            for row in self._rows
        )
        self._play(
            Plan(0, admit=admits, prefill=tuple(Chunk(row, len(prompt)) for row in self._rows))
        )

    def tokens_per_s(self, steps: int) -> float:
        """Plan n is launched before plan n-1 is read where the device runs ahead, as the server
        does."""
        began = time.perf_counter()
        for _ in range(steps):
            self._play(Plan(self._steps, decode=self._rows))
        return steps * len(self._rows) / (time.perf_counter() - began)

    def _play(self, plan: Plan) -> None:
        self._steps += 1
        launched = self._engine.launch(plan)
        if self._pending is not None:
            self._read(self._pending)
        self._pending = launched if device.runs_ahead() else None
        if self._pending is None:
            self._read(launched)

    def _read(self, launched: Launched) -> None:
        assert not self._engine.collect(launched).failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    loaded = load(Settings(), lambda _: None)
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    plain, structured = Rows(loaded, options.rows, None), Rows(loaded, options.rows, grammar)
    for rows in (plain, structured):
        rows.tokens_per_s(3)
    pairs = []
    for _ in range(options.rounds):
        pairs.append((plain.tokens_per_s(options.steps), structured.tokens_per_s(options.steps)))
        print(f"  plain {pairs[-1][0]:7.1f} tok/s, structured {pairs[-1][1]:7.1f}")
    ratio = statistics.median(other / one for one, other in pairs)
    print(
        f"{options.rows} rows on {device.name()}: structured at {ratio:.3f} of plain (at least 0.9 "
        "is wanted)"
    )


if __name__ == "__main__":
    main()
