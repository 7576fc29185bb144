"""The CUDA kernel of attention over chunks of prompts (`prefill_attention.cuh`), and its launch."""

# As FlashAttention-2 (Dao 2023): a block has 64 queries of one row and head (32 of 256 dimensions),
# goes over tiles of keys with running maxima, and copies the next tile while tensor cores compute.
# A row's slot and length are data, so that no new shape costs a preparation. Tiles of keys begin at
# multiples of their length, and masked keys add exact zeros: a query's result depends neither on
# the chunk that it is in, nor on other rows, nor on buffers' lengths.

from __future__ import annotations

from functools import cache
from pathlib import Path

import attrs
import mlx.core as mx

from trouper.engine.kv.decode_kernel import Heads, no_sinks, scalar
from trouper.engine.platform.cuda_kernels import Kernel, kernel

TILES = {64: (64, 64), 80: (64, 64), 96: (64, 64), 128: (64, 64), 256: (32, 32)}
"""Queries and keys of a tile by dimension: all tiles of a block take at most 48 kB."""
DTYPES = (mx.bfloat16, mx.float16)
FILE = Path(__file__).with_name("prefill_attention.cuh")
SOURCE = """
    prefill_attention::attend<T, D, QUERIES, KEYS, WINDOW, RING, APPENDED, SINKS>(
        queries, keys, values, rows, scale[0], sinks, out,
        queries_shape[1], queries_shape[2], keys_shape[1], keys_shape[2]);
"""


@attrs.frozen(eq=False)
class PrefillCall:
    queries: mx.array
    """(n, heads, width, dim)."""
    keys: mx.array
    values: mx.array
    """(slots, key heads, tokens, dim) each."""
    rows: mx.array
    """(n, 2) int32: each row's slot, and its tokens in KV before the pass. Buffers have all of the
    pass's `width` tokens behind these."""
    scale: float
    sinks: mx.array | None = None
    """(heads,)."""
    appended: bool = False
    """Whether the pass's tokens lie behind the ring, which is as before the pass."""


def run(heads: Heads, call: PrefillCall) -> mx.array:
    """Attention of each row's queries up to their own positions: (n, heads, width, dim). The
    numbers of heads are those of the arrays, not of `heads`."""
    queries = call.queries
    rows, all_heads, width, dim = queries.shape
    tile, keys = TILES[dim]
    threads = 2 * tile
    sinks = no_sinks(queries.dtype) if call.sinks is None else call.sinks
    [out] = _kernel()(
        inputs=[queries, call.keys, call.values, call.rows, scalar(call.scale), sinks],
        template=[
            ("T", queries.dtype),
            ("D", dim),
            ("QUERIES", tile),
            ("KEYS", keys),
            ("WINDOW", heads.window),
            ("RING", heads.ring),
            ("APPENDED", call.appended),
            ("SINKS", heads.sinks),
        ],
        grid=(-(-width // tile) * threads, all_heads, rows),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, width, all_heads, dim)],
        output_dtypes=[queries.dtype],
    )
    return out.swapaxes(1, 2)


@cache
def _kernel() -> Kernel:
    names = ["queries", "keys", "values", "rows", "scale", "sinks"]
    return kernel("prefill_attention", FILE, names, SOURCE)
