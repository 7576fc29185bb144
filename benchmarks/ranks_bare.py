"""What ranks do without a server: `python -m benchmarks.ranks_bare SPEC` on each of them; rank 0
prints JSON.

`bare`: the model and argmax, with mlx-lm's batch cache, of rows that differ in length, as a
server's do; `bare, equal`: of rows equally long, whose attention needs no mask, and which some
kernels are made for. `engine`: our engine with the rows of `bare`, each rank making the same plans
for itself, so that nothing is sent but tensors. All on the same ranks in one life, turn by turn:
tokens a second, for each number of rows the median of the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import BatchKVCache

from trouper.engine.distributed.rank_group import RankGroup, join
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.platform import device
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings

WARM_UP = 5
GREEDY = Sampling(temperature=0)


@attrs.frozen
class Load:
    rows: int
    prompt: int
    tokens: int

    seed: int = 0

    def prompts(self, equal: bool) -> list[list[int]]:
        """Other lengths in each round: what kernels were prepared for one round serves no other."""
        random = np.random.RandomState(self.seed)
        lengths = [
            self.prompt + (0 if equal else int(random.randint(0, 16))) for _ in range(self.rows)
        ]
        return [random.randint(1000, 40000, length).tolist() for length in lengths]


def timed(steps: Callable[[int], None], load: Load) -> float:
    """Tokens a second of so many decode steps, once a few are done."""
    steps(WARM_UP)
    began = time.perf_counter()
    steps(load.tokens)
    return load.rows * load.tokens / (time.perf_counter() - began)


def bare(model: nn.Module, load: Load, equal: bool) -> float:
    prompts = load.prompts(equal)
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    cache = [BatchKVCache(padding) for _ in model.layers]
    inputs = mx.array([[0] * left + prompt for left, prompt in zip(padding, prompts, strict=True)])
    last = mx.argmax(model(inputs, cache=cache)[:, -1], -1)
    mx.eval(last)

    def steps(count: int) -> None:
        nonlocal last
        for _ in range(count):
            following = mx.argmax(model(last[:, None], cache=cache)[:, -1], -1)
            mx.async_eval(following)
            last.tolist()
            last = following
        mx.eval(last)

    return timed(steps, load)


def engine(loaded: EvaluatedModel, group: RankGroup, load: Load) -> float:
    own = StepEngine(loaded.model, loaded.card.vocab_size, loaded.kv, group=group)
    rows = tuple(RowId(row) for row in range(load.rows))
    prompts = load.prompts(equal=False)
    admit = tuple(
        Admit(row, np.array(one, "<i4").tobytes(), GREEDY)
        for row, one in zip(rows, prompts, strict=True)
    )
    chunks = tuple(Chunk(row, len(one)) for row, one in zip(rows, prompts, strict=True))
    own.collect(own.launch(Plan(0, admit=admit, prefill=chunks)))
    step, ahead = 0, device.runs_ahead()

    def steps(count: int) -> None:
        """One launched ahead where the device lets it, as the server does."""
        nonlocal step
        pending: Launched | None = None
        for _ in range(count):
            step += 1
            launched = own.launch(Plan(step, decode=rows))
            if pending is not None:
                own.collect(pending)
            pending = launched if ahead else None
            if pending is None:
                own.collect(launched)
        if pending is not None:
            own.collect(pending)

    return timed(steps, load)


def main() -> None:
    spec = json.loads(sys.argv[1])
    group = join()
    loaded = load(Settings(model=spec["model"], no_ssd=True), lambda _: None, group=group)
    rates: dict[str, dict[int, list[float]]] = {"bare, equal": {}, "bare": {}, "engine": {}}
    began = time.perf_counter()
    for number in range(spec["rounds"]):
        for rows in spec["streams"]:
            one = Load(rows, spec["prompt"], spec["tokens"], 100 * number + rows)
            rates["bare, equal"].setdefault(rows, []).append(bare(loaded.model, one, equal=True))
            rates["bare"].setdefault(rows, []).append(bare(loaded.model, one, equal=False))
            rates["engine"].setdefault(rows, []).append(engine(loaded, group, one))
            if group.leads:
                said = ", ".join(f"{kind} {some[rows][-1]:.1f}" for kind, some in rates.items())
                print(
                    f"{time.perf_counter() - began:4.0f} s: {rows} rows, {said}",
                    file=sys.stderr,
                    flush=True,
                )
    if group.leads:
        print(
            json.dumps(
                {kind: medians(some) for kind, some in rates.items()}
                | {"weights_bytes": loaded.card.weights_bytes}
            )
        )


def medians(rates: dict[int, list[float]]) -> dict[int, float]:
    return {rows: statistics.median(some) for rows, some in rates.items()}


if __name__ == "__main__":
    main()
