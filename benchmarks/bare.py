"""The bare loop: the model and argmax, nothing else. `python -m benchmarks.bare MODEL ROWS PROMPT TOKENS` prints JSON."""

from __future__ import annotations

import json
import resource
import sys
import time

import trouper.engine  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from trouper.engine.loading.model_loading import load
from trouper.protocol.settings import Settings


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    path, (rows, prompt, tokens) = sys.argv[1], map(int, sys.argv[2:])
    model = load(Settings(model=path), lambda _: None).model
    cache = [BatchKVCache([0] * rows) for _ in model.layers]
    mx.random.seed(0)
    last = mx.argmax(model(mx.random.randint(1000, 40000, (rows, prompt)), cache=cache)[:, -1], -1)
    for _ in range(3):
        last = mx.argmax(model(last[:, None], cache=cache)[:, -1], -1)
    mx.eval(last)
    began, used = time.perf_counter(), cpu_s()
    for _ in range(tokens):
        following = mx.argmax(model(last[:, None], cache=cache)[:, -1], -1)
        mx.async_eval(following)
        last.tolist()
        last = following
    mx.eval(last)
    seconds = time.perf_counter() - began
    print(
        json.dumps(
            {"tokens_per_s": rows * tokens / seconds, "cpu_ms_per_token": (cpu_s() - used) / rows / tokens * 1000}
        )
    )


main()
