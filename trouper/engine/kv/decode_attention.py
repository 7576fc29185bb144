"""Attention of decoding rows over slots, as one kernel that knows each row's length."""

# On CUDA, MLX's kernels for few queries take no mask: rows of different lengths would need a dozen
# operations, and launches are a step's time (docs/performance.md). This kernel (`decode_kernel.py`)
# reads whole buffers, where row i has slot i, and lengths: no mask, no views, one operation, and
# shapes that change only when buffers grow, as compiled passes need (`compiled_pass.py`).

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from trouper.engine.kv import decode_kernel
from trouper.engine.kv.decode_kernel import HEAD_DIMS, SPLIT_TOKENS, Heads, KernelCall
from trouper.engine.kv.whole_buffer import WholeBuffer
from trouper.engine.platform.cuda_kernels import fault_of

log = logging.getLogger(__name__)

# Rows in the trial: warps without a key, a second turn, a second split.
TRIED_LENGTHS = (0, 3, 70, SPLIT_TOKENS)
# Outputs are of the order of 1, in bfloat16 within 0.02.
TRIED_ERROR = 0.05
OPTIONS = {"scale", "sinks"}


def supports(
    queries: mx.array, keys: WholeBuffer, values: WholeBuffer, options: dict[str, Any]
) -> bool:
    """Whether the kernel allows the call: the pass's width, equal dimensions of keys and values, no
    options but sinks."""
    return (
        queries.shape[3] in HEAD_DIMS
        and fits(queries, keys, values, options)
        and computes(_heads(queries, keys, options.get("sinks")), queries.shape[2])
    )


def fits(
    queries: mx.array, keys: WholeBuffer, values: WholeBuffer, options: dict[str, Any]
) -> bool:
    """Whether shapes, dtypes and options are those of both kernels."""
    return (
        values.buffer.shape[3] == keys.buffer.shape[3] == queries.shape[3]
        and queries.shape[1] % keys.buffer.shape[1] == 0
        and queries.shape[2] == keys.region.width
        and keys.buffer.dtype == values.buffer.dtype == queries.dtype
        and options.keys() <= OPTIONS
    )


def _heads(queries: mx.array, keys: WholeBuffer, sinks: mx.array | None) -> Heads:
    key_heads = keys.buffer.shape[1]
    return Heads(
        queries.dtype,
        queries.shape[3],
        key_heads,
        queries.shape[1] // key_heads,
        window=keys.window,
        ring=keys.ring,
        sinks=sinks is not None,
    )


@cache
def computes(heads: Heads, width: int) -> bool:
    """Try once whether the device runs the kernel, and correctly; otherwise rows get MLX's
    attention."""
    lengths = np.array(TRIED_LENGTHS, np.int32)
    tokens = heads.ring or int(lengths.max()) + width
    arrays, sinks, expected = draw(heads, mask_of(heads, lengths, width, tokens))
    call = KernelCall(*arrays, mx.array(lengths + width), heads.dim**-0.5, sinks=sinks)
    fault = fault_of(
        lambda: decode_kernel.run(heads, call).astype(mx.float32) - expected, TRIED_ERROR
    )
    if fault:
        log.warning(
            "attention by lengths is not used for %d queries of %s: %s", width, heads, fault
        )
    return not fault


def draw(
    heads: Heads, mask: mx.array
) -> tuple[tuple[mx.array, mx.array, mx.array], mx.array | None, mx.array]:
    """Draw queries (n, heads, width, dim), keys and values (n, key heads, tokens, dim), and sinks.
    Also returns MLX's attention of them in float32. `mask`: (n, width, tokens)."""
    (rows, width, tokens), num_queries = mask.shape, heads.key_heads * heads.group
    of_keys = rows, heads.key_heads, tokens, heads.dim
    sizes = ((rows, num_queries, width, heads.dim), of_keys, of_keys)
    queries, keys, values = (
        mx.random.normal(size, key=key).astype(heads.dtype)
        for size, key in zip(sizes, mx.random.split(mx.random.key(width), 3), strict=True)
    )
    sinks = mx.arange(num_queries).astype(heads.dtype) / num_queries if heads.sinks else None
    expected = mx.fast.scaled_dot_product_attention(
        *(array.astype(mx.float32) for array in (queries, keys, values)),
        scale=heads.dim**-0.5,
        mask=mask[:, None],
        sinks=None if sinks is None else sinks.astype(mx.float32),
    )
    return (queries, keys, values), sinks, expected


def mask_of(heads: Heads, lengths: Any, width: int, tokens: int) -> mx.array:
    """(n, width, tokens) bool: True where a query attends to a key."""
    last, index = lengths[:, None, None] + width - 1, np.arange(tokens)
    position = last - (last - index) % heads.ring if heads.ring else index
    query = lengths[:, None, None] + np.arange(width)[:, None]
    visible = (position >= 0) & (position <= query)
    return mx.array(visible & (position > query - heads.window) if heads.window else visible)


def attend(
    queries: mx.array, keys: WholeBuffer, values: WholeBuffer, options: dict[str, Any]
) -> mx.array:
    """Attention of queries (n, heads, width, dim) over each row's tokens up to the pass's end,
    where `supports`. Returns (n, heads, width, dim)."""
    sinks = options.get("sinks")
    heads = _heads(queries, keys, sinks)
    call = KernelCall(
        queries, keys.buffer, values.buffer, keys.region.after, options["scale"], sinks=sinks
    )
    return decode_kernel.run(heads, call)
