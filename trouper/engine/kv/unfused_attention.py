"""Attention of several short prompts in one pass, by plain products.

MLX's CUDA backend hands 16-bit attention to cuDNN, which plans for each new shape, stride and mask
for 40 ms (H200, MLX 0.32.4). A burst's passes are all different: their number of rows, their
widths, and the capacity of the buffers. So 31 prompts of 330 tokens took twice as long as one
prompt of as many tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from trouper.engine.platform import device

MAX_SCORES = 2**26
"""In one layer, 256 MB. Longer rows are worth a plan: their chunks have lengths that recur."""


def pays(queries: mx.array, keys: Any, options: dict[str, Any]) -> bool:
    """Whether the device would plan for these shapes, which will hardly recur. queries (n, heads,
    width, dim), keys (n, KV heads, keys, dim)."""
    rows, heads, width, _ = queries.shape
    return (
        rows > 1
        and width > 1
        and queries.dtype != mx.float32
        and isinstance(keys, mx.array)
        and options.get("sinks") is None
        and rows * heads * width * keys.shape[2] <= MAX_SCORES
        and device.prepares_shapes()
    )


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """(n, heads, width, dim of values). `mask`: "causal", or an array over (n, heads, width, keys)
    as of `mx.fast.scaled_dot_product_attention`."""
    rows, heads, width, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    # 16-bit factors are exact in TensorFloat-32, so scores are as precise as a fused kernel's.
    grouped = queries.astype(mx.float32).reshape(rows, kv_heads, -1, dim)
    scores = (scale * grouped) @ keys.astype(mx.float32).swapaxes(-1, -2)
    scores = scores.reshape(rows, heads, width, tokens)
    if isinstance(mask, str):
        mask = mx.arange(tokens) <= mx.arange(tokens - width, tokens)[:, None]
    if mask is not None:
        is_bool = mask.dtype == mx.bool_
        scores = mx.where(mask, scores, -mx.inf) if is_bool else scores + mask
    weights = mx.softmax(scores, axis=-1).astype(values.dtype)
    out = weights.reshape(rows, kv_heads, -1, tokens) @ values
    return out.reshape(rows, heads, width, -1)
