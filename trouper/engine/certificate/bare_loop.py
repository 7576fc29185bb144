"""The model and argmax, and nothing else: what the device gives to a loop without a server."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

PROMPT, SETTLING = 50, 3
"""Tokens of each row's prompt; steps that are not counted."""


def bare_loop(
    model: nn.Module, rows: int, steps: int, rounds: int, vocabulary: int
) -> dict[str, Any]:
    """Measure tokens a second of `rows` rows that decode together, the median of `rounds`, and the
    gap between two tokens of a row. The next step is launched before the tokens of the last one are
    read, as servers do it."""
    rates, gaps = [], []
    for seed in range(rounds):
        mx.random.seed(seed)
        cache = _cache(model, rows)
        prompt = mx.random.randint(1, vocabulary // 2, (rows, PROMPT))
        last = mx.argmax(model(prompt, cache=cache)[:, -1], -1)
        for _ in range(SETTLING):
            last = mx.argmax(model(last[:, None], cache=cache)[:, -1], -1)
        mx.eval(last)
        times = [time.perf_counter()]
        for _ in range(steps):
            following = mx.argmax(model(last[:, None], cache=cache)[:, -1], -1)
            mx.async_eval(following)
            last.tolist()
            times.append(time.perf_counter())
            last = following
        mx.eval(last)
        rates.append(rows * steps / (time.perf_counter() - times[0]))
        gaps += [later - earlier for earlier, later in pairwise(times)]
    return {"streams": rows, "tokens_per_s": median(rates), "gap_ms": 1000 * median(gaps)}


def _cache(model: nn.Module, rows: int) -> list[Any]:
    """Return mlx-lm's caches for a batch, where it has them for this model; else those for one row,
    which equal lengths permit."""
    caches = make_prompt_cache(model)
    plain = all(type(cache) is KVCache for cache in caches)
    return [BatchKVCache([0] * rows) for _ in caches] if plain else caches
