"""Filters that are no threshold on a token's rank or weight alone: locally typical sampling and
XTC, as llama.cpp has them.

Shapes: n rows of k candidates, best first. `keep` are the candidates that earlier filters left, of
which at least one is left here.
"""

from __future__ import annotations

import mlx.core as mx

from trouper.engine.sampling.gumbel_noise import hashed

COIN = 0xFFFFFFFF
"""The id under which a row draws whether XTC applies to its next token: no token has it."""

SMALLEST = 2.0**-126
"""The smallest normal float32. Some GPUs take what is smaller for 0, whose logarithm times 0 is not
a number."""


def weights_of(scaled: mx.array, keep: mx.array) -> mx.array:
    """Softmax (n, k) of the kept ones of `scaled` (n, k); 0 elsewhere."""
    return mx.softmax(mx.where(keep, scaled, -mx.inf), axis=-1, precise=True)


def typical(weights: mx.array, keep: mx.array, typical_p: mx.array) -> mx.array:
    """Keep (n, k) the candidates whose surprise is nearest to the expected one, until they weigh
    `typical_p` (n, 1) together (Meister et al. 2022, Locally Typical Sampling). From 1 on all are
    kept."""
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
    """Drop all candidates that weigh `threshold` (n, 1) or more, except the lightest of them, where
    `applies` (n, 1): XTC, "exclude top choices"
    (https://github.com/oobabooga/text-generation-webui/pull/6335)."""
    above = keep & (weights >= threshold)
    rank = mx.cumsum(above.astype(mx.int32), axis=-1)
    return keep & ~(above & (rank < rank[:, -1:]) & applies)


def coins(keys: mx.array, probability: mx.array) -> mx.array:
    """Whether each row's draw has this `probability` (n, 1), (n, 1): by the keys (n, 2) of the
    row's seed and position."""
    uniform = (hashed(keys, mx.array([COIN], mx.uint32)).astype(mx.float32) + 0.5) * (1 / (1 << 32))
    return uniform <= probability
