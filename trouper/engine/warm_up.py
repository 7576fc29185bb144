"""Warm-up steps, which make a device compile its kernels before the first request."""

from __future__ import annotations

import numpy as np

from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling

PROMPTS = (40, 17, 90)
"""Lengths of the prompts in tokens. Different lengths, since a batch of such rows needs masks."""
DRAWN = Sampling(temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, seed=1)


def warm_up(engine: StepEngine, vocabulary: int) -> None:
    """Run prefill, decoding, both in one step, and greedy and random sampling. All rows are dropped at the end."""
    rows = [RowId(index) for index in range(len(PROMPTS))]
    prompts = [(np.arange(1, size + 1) % vocabulary).astype("<i4").tobytes() for size in PROMPTS]
    samplings = (Sampling(temperature=0.0), DRAWN, DRAWN)
    admits = [Admit(*row) for row in zip(rows, prompts, samplings, strict=True)]
    first, second, late = rows
    plans = [
        Plan(0, admit=tuple(admits[:2]), prefill=(Chunk(first, 16), Chunk(second, 16))),
        Plan(1, prefill=(Chunk(first, PROMPTS[0] - 16), Chunk(second, PROMPTS[1] - 16))),
        Plan(2, decode=(first, second)),
        Plan(3, admit=(admits[2],), decode=(first, second), prefill=(Chunk(late, PROMPTS[2]),)),
        Plan(4, decode=(first, second, late)),
        Plan(5, drop=(second,), decode=(first, late)),
        Plan(6, drop=(first, late)),
    ]
    for plan in plans:
        engine.collect(engine.launch(plan))
