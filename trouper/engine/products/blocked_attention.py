"""Attention of a CPU whose exp is slow: blocks of scores that stay in a cache.

Exp by sums and products reads and writes its numbers some twenty times
(`workarounds/mlx_scalar_functions.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import e, log2
from typing import Any

import mlx.core as mx

from trouper.engine.platform.device import is_cpu
from trouper.workarounds import mlx_scalar_functions

MIN_KEYS = 256
"""Fewer take less time than the operations of a block."""
BLOCK_SCORES = 2**19
"""2 MB. Smaller blocks make long prompts' products slow."""


def pays(queries: mx.array, keys: Any, values: Any, mask: Any, options: dict[str, Any]) -> bool:
    """Whether rows of a generator attend in blocks. By keys alone, not by the number of rows, whose
    tokens must not depend on company."""
    is_long = isinstance(keys, mx.array) and keys.shape[2] >= MIN_KEYS
    return is_long and supports(queries, keys, values, mask, options)


def supports(queries: mx.array, keys: Any, values: Any, mask: Any, options: dict[str, Any]) -> bool:
    is_plain = options.get("sinks") is None and all(
        array.dtype == mx.float32 for array in (queries, keys, values)
    )
    return is_plain and _supports_mask(mask) and is_cpu() and mlx_scalar_functions.is_needed()


def _supports_mask(mask: Any) -> bool:
    if not isinstance(mask, mx.array):
        return mask is None or mask == "causal"
    return mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[1] == 1


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, *, mask: Any, scale: float
) -> mx.array:
    """Queries (n, heads, width, dim), keys and values (n, KV heads, tokens, any dim), all float32.
    `mask`: None, "causal", or bool (n or 1, 1, width or 1, tokens). Returns (n, heads, width, the
    values' dim)."""
    rows, heads, width, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    is_causal = isinstance(mask, str) and width > 1
    # Softmax to the base of 2.
    queries = (queries * (scale * log2(e))).reshape(rows, kv_heads, -1, width, dim)
    of_rows, last = [], queries
    for row in _slices(rows, BLOCK_SCORES // (heads * width * tokens)):
        of_heads = []
        for head in _slices(kv_heads, BLOCK_SCORES * kv_heads // (heads * width * tokens)):
            chosen, blocks = queries[row, head], []
            for block in _slices(width, BLOCK_SCORES // (chosen.size // (width * dim) * tokens)):
                # One block after another, else the scores of several take memory at once.
                (own,) = mx.depends([chosen[..., block, :]], [last])
                end = tokens - width + block.stop if is_causal else tokens
                cut = _causal(own.shape[3], end) if is_causal else _cut(mask, row, block)
                last = _attend(own, keys[row, head, :end], values[row, head, :end], cut)
                blocks.append(last)
            of_heads.append(_joined(blocks, 3))
        of_rows.append(_joined(of_heads, 1))
    return _joined(of_rows, 0).reshape(rows, heads, width, -1)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    # Queries (n, KV heads, heads of each, width, dim).
    scores = queries @ keys[:, :, None].swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    weights = mlx_scalar_functions.exp2(scores - mx.max(scores, -1, keepdims=True))
    return (weights @ values[:, :, None]) / mx.sum(weights, -1, keepdims=True)


def _causal(width: int, tokens: int) -> mx.array:
    return mx.arange(tokens) <= mx.arange(tokens - width, tokens)[:, None]


def _cut(mask: Any, rows: slice, queries: slice) -> mx.array | None:
    if not isinstance(mask, mx.array):
        return None
    mask = mask[rows] if mask.shape[0] > 1 else mask
    return mask[:, :, None, queries] if mask.shape[2] > 1 else mask[:, :, None]


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, max(size, 1)):
        yield slice(start, min(start + max(size, 1), count))


def _joined(blocks: list[mx.array], axis: int) -> mx.array:
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis)
