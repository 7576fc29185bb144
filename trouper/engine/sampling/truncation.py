"""Locally typical sampling and XTC, as llama.cpp has them, over n rows of k candidates, best first.
`keep`: candidates that earlier filters left. At least one stays."""

from __future__ import annotations

import mlx.core as mx

from trouper.engine.sampling.gumbel_noise import hashed

COIN = 0xFFFFFFFF
"""Token id, which no token has, under which a row draws whether XTC applies."""

SMALLEST = 2.0**-126
"""The smallest normal float32. Some GPUs flush smaller values to 0."""


def weights_of(scaled: mx.array, keep: mx.array) -> mx.array:
    """Softmax (n, k) of the kept ones of `scaled` (n, k); 0 elsewhere."""
    return mx.softmax(mx.where(keep, scaled, -mx.inf), axis=-1, precise=True)


def typical(weights: mx.array, keep: mx.array, typical_p: mx.array) -> mx.array:
    """Keep (n, k) the candidates of the most expected surprise, up to a weight of `typical_p` (n,
    1) (Meister et al. 2022, Locally Typical Sampling). 1: all."""
    logs = mx.log(mx.maximum(weights, SMALLEST))
    entropy = -(weights * logs).sum(axis=-1, keepdims=True)
    distance = mx.where(keep, mx.abs(-logs - entropy), mx.inf)
    order = mx.argsort(distance, axis=-1)
    ordered = mx.take_along_axis(weights, order, axis=-1)
    kept = mx.cumsum(ordered, axis=-1) - ordered < typical_p
    return keep & (mx.take_along_axis(kept, mx.argsort(order, axis=-1), axis=-1) | (typical_p >= 1))


def without_top_choices(
    weights: mx.array, keep: mx.array, threshold: mx.array, applies: mx.array
) -> mx.array:
    """XTC, "exclude top choices": where `applies` (n, 1), drop candidates of at least `threshold`
    (n, 1) except the lightest (https://github.com/oobabooga/text-generation-webui/pull/6335)."""
    above = keep & (weights >= threshold)
    rank = mx.cumsum(above.astype(mx.int32), axis=-1)
    return keep & ~(above & (rank < rank[:, -1:]) & applies)


def coins(keys: mx.array, probability: mx.array) -> mx.array:
    """Draw with `probability` (n, 1) by the keys (n, 2): (n, 1)."""
    uniform = (hashed(keys, mx.array([COIN], mx.uint32)).astype(mx.float32) + 0.5) * (1 / (1 << 32))
    return uniform <= probability
