"""Loops without a server. `python -m benchmarks.bare LOOP MODEL ROWS PROMPT TOKENS` prints a line
of JSON; without the numbers, one for each line `ROWS PROMPT TOKENS` that it reads, over one loaded
model.

LOOP: `bare`, the model and argmax, nothing else; `vlm`, the same of mlx-vlm's language model with
its own caches; `batch`, mlx-lm's BatchGenerator; `engine`, Trouper without HTTP. Decoding only:
from the first token of all rows on.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import trio
from mlx_lm.models.cache import BatchKVCache

from trouper import Runtime, Settings, run_runtime
from trouper.engine.loading.model_loading import load
from trouper.engine.products import linear_layers
from trouper.protocol.requests import Generate, TokenPrompt
from trouper.protocol.sampling import Sampling
from trouper.workarounds.mlx_vlm_positions import forget_positions

SPARE_BYTES = 8_000_000_000
"""Bound of the buffers that MLX keeps: servers are measured on the same device."""
GREEDY = Sampling(temperature=0)
"""As the loops and the servers beside it: noise for a large vocabulary takes longer than two layers
do on a CPU."""
Measured = tuple[float, float]
"""Seconds by the clock, and of CPU, for TOKENS tokens of each row."""


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@cache
def loaded(path: str) -> Any:
    """The model as MLX multiplies by it."""
    model = load(Settings(model=path), lambda _: None).model
    linear_layers.unprepare(model)
    return model


def bare(path: str, rows: int, prompt: int, tokens: int) -> Measured:
    model = loaded(path)
    caches = [BatchKVCache([0] * rows) for _ in model.layers]
    return _decode(partial(model, cache=caches), rows, prompt, tokens)


def vlm(path: str, rows: int, prompt: int, tokens: int) -> Measured:
    """Rows of one length need no padding, so that the caches of one row hold them all."""
    from mlx_vlm.models.cache import make_prompt_cache

    model = loaded(path).language_model
    forget_positions(model, rows)
    caches = make_prompt_cache(model)
    return _decode(lambda ids: model(ids, cache=caches).logits, rows, prompt, tokens)


def _decode(
    logits_of: Callable[[mx.array], mx.array], rows: int, prompt: int, tokens: int
) -> Measured:
    def next_of(ids: mx.array) -> mx.array:
        return mx.argmax(logits_of(ids)[:, -1], -1)

    mx.random.seed(0)
    last = next_of(mx.random.randint(1000, 40000, (rows, prompt)))
    for _ in range(3):
        last = next_of(last[:, None])
    mx.eval(last)
    began, used = time.perf_counter(), cpu_s()
    for _ in range(tokens):
        following = next_of(last[:, None])
        mx.async_eval(following)
        last.tolist()
        last = following
    mx.eval(last)
    return time.perf_counter() - began, cpu_s() - used


def batch(path: str, rows: int, prompt: int, tokens: int) -> Measured:
    from mlx_lm.generate import BatchGenerator

    dice = random.Random(0)
    generator = BatchGenerator(loaded(path), max_tokens=tokens + 16, completion_batch_size=rows)
    generator.insert([[dice.randrange(1000, 40000) for _ in range(prompt)] for _ in range(rows)])
    while len(generator.next_generated()) < rows:
        pass
    for _ in range(3):
        generator.next_generated()
    began, used = time.perf_counter(), cpu_s()
    for _ in range(tokens):
        generator.next_generated()
    return time.perf_counter() - began, cpu_s() - used


def engine(model: str, rows: int, prompt: int, tokens: int) -> Measured:
    return trio.run(partial(_engine, model, rows, prompt, tokens))


async def _engine(model: str, rows: int, prompt: int, tokens: int) -> Measured:
    """From the moment when all rows have 8 tokens, to that when the first has `tokens` more."""
    counts, marks = [0] * rows, list[float]()
    settings = Settings(
        model=model,
        no_ssd=True,
        completion_batch_size=max(rows, 8),
        max_queue_size=256,
        speculation="off",
    )
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(partial(run_runtime, settings))

        async def read(row: int) -> None:
            dice = random.Random(row)
            ids = tuple(dice.randrange(1000, 40000) for _ in range(prompt))
            request = Generate(
                request_id=f"row{row}",
                prompt=TokenPrompt(ids),
                max_tokens=tokens + 200,
                ignore_eos=True,
                sampling=GREEDY,
            )
            with await runtime.submit(request) as answer:
                async for delta in answer:
                    counts[row] += len(delta.tokens)
                    if not marks and min(counts) >= 8:
                        marks.extend((time.perf_counter(), cpu_s(), sum(counts)))
                    elif marks and sum(counts) - marks[2] >= rows * tokens:
                        done.set()

        done = trio.Event()
        for row in range(rows):
            nursery.start_soon(read, row)
        await done.wait()
        measured = time.perf_counter() - marks[0], cpu_s() - marks[1]
        nursery.cancel_scope.cancel()
    return measured


LOOPS: dict[str, Callable[[str, int, int, int], Measured]] = {
    "bare": bare,
    "vlm": vlm,
    "batch": batch,
    "engine": engine,
}


def main() -> None:
    loop, path, numbers = sys.argv[1], sys.argv[2], " ".join(sys.argv[3:])
    assert Path(path).is_dir(), f"{path} is no directory"
    mx.set_cache_limit(SPARE_BYTES)
    for line in [numbers] if numbers else sys.stdin:
        rows, prompt, tokens = map(int, line.split())
        seconds, used = LOOPS[loop](path, rows, prompt, tokens)
        mx.clear_cache()
        made = rows * tokens
        print(
            json.dumps({"tokens_per_s": made / seconds, "cpu_ms_per_token": used / made * 1000}),
            flush=True,
        )


if __name__ == "__main__":
    main()
