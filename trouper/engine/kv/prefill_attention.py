"""Attention over chunks of prompts, as one kernel that knows each row's slot and length."""

# cuDNN, which MLX uses for such passes, plans each new number of rows, tokens and keys, 42 ms on an
# H200, and with masks takes three to five times as long. This kernel (`prefill_kernel.py`) needs
# neither. Without a mask, and with a plan, cuDNN takes half as long for long chunks
# (`Shapes.tiled`).

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from trouper.engine.kv import prefill_kernel
from trouper.engine.kv.decode_attention import OPTIONS, TRIED_ERROR, mask_of
from trouper.engine.kv.decode_kernel import Heads
from trouper.engine.kv.prefill_kernel import DTYPES, TILES, PrefillCall
from trouper.engine.kv.whole_buffer import WholeBuffer
from trouper.engine.platform.cuda_kernels import fault_of

log = logging.getLogger(__name__)

# Rows in the trial: no token before the chunk, a part of a tile of keys, a second and a third one.
TRIED_LENGTHS, TRIED_WIDTH = (0, 3, 70, 129), 70


def supports(
    queries: mx.array, keys: WholeBuffer, values: WholeBuffer, options: dict[str, Any]
) -> bool:
    """Whether the kernel allows the call: 16 bits, equal dimensions of keys and values, no
    sinks."""
    heads, dim = queries.shape[1], queries.shape[3]
    return (
        dim in TILES
        and values.buffer.shape[3] == keys.buffer.shape[3] == dim
        and heads % keys.buffer.shape[1] == 0
        and queries.shape[2] == keys.region.width
        and keys.buffer.dtype == values.buffer.dtype == queries.dtype
        and queries.dtype in DTYPES
        and options.get("sinks") is None
        and options.keys() <= OPTIONS
        and computes(queries.dtype, dim)
    )


@cache
def computes(dtype: mx.Dtype, dim: int) -> bool:
    """Try once whether the device runs the kernel, and correctly; otherwise chunks get MLX's
    attention."""
    lengths, heads = np.array(TRIED_LENGTHS, np.int32), Heads(dtype, dim, 1, 2)
    tokens = int(lengths.max()) + TRIED_WIDTH
    sizes = [(len(lengths), 2, TRIED_WIDTH, dim), *[(len(lengths), 1, tokens, dim)] * 2]
    queries, keys, values = (
        mx.random.normal(size, key=key).astype(dtype)
        for size, key in zip(sizes, mx.random.split(mx.random.key(dim), 3), strict=True)
    )
    expected = mx.fast.scaled_dot_product_attention(
        *(part.astype(mx.float32) for part in (queries, keys, values)),
        scale=dim**-0.5,
        mask=mask_of(heads, lengths, TRIED_WIDTH, tokens)[:, None],
    )
    rows = mx.array(np.stack([np.arange(len(lengths), dtype=np.int32), lengths], axis=1))
    call = PrefillCall(queries, keys, values, rows, dim**-0.5)
    fault = fault_of(lambda: prefill_kernel.run(call).astype(mx.float32) - expected, TRIED_ERROR)
    if fault:
        log.warning(
            "attention over chunks by lengths is not used for %d dimensions of %s: %s",
            dim,
            dtype,
            fault,
        )
    return not fault


def attend(
    queries: mx.array, keys: WholeBuffer, values: WholeBuffer, options: dict[str, Any]
) -> mx.array:
    """Attention of queries (n, heads, width, dim) up to their own positions, where `supports`.
    Returns (n, heads, width, dim)."""
    rows = keys.region.slots_and_lengths
    call = PrefillCall(queries, keys.buffer, values.buffer, rows, options["scale"])
    return prefill_kernel.run(call)
