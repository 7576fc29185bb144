"""The CUDA kernel of attention by lengths (`decode_attention.cuh`), and its launch."""

# As flash decoding (Dao et al. 2023): a block has one row, one key head and up to four of its
# queries; warps take turns over keys with running maxima, and the block joins the sums. Buffers
# longer than `SPLIT_TOKENS` are split between blocks, whose sums a second kernel joins. Splits
# begin at multiples of that length and add exact zeros behind a row's end: results depend neither
# on other rows nor on buffers' lengths. Several queries of a head (drafts) are like more heads in a
# group: query w of `width` attends to width - 1 - w keys less.

from __future__ import annotations

from functools import cache
from pathlib import Path

import attrs
import mlx.core as mx

from trouper.engine.platform.cuda_kernels import Kernel, kernel

HEAD_DIMS = (64, 128, 256)
# Maximum queries of a block, and elements of the sums in a thread: more registers than 512 threads
# have make CUDA refuse the launch (seen with eight heads of 128).
MAX_PART, MAX_SUMS = 4, 16
WARPS = 16
# The fastest of 256, 512 and 1,024 on an H200 for rows of 500 to 20,000 tokens, except with few
# short rows.
SPLIT_TOKENS = 1024
FILE = Path(__file__).with_name("decode_attention.cuh")
SOURCE = """
    decode_attention::attend<T, O, D, KEY_HEADS, GROUP, PART, WARPS, WINDOW, RING, SINKS, SPLIT>(
        queries, keys, values, lengths, scale[0], sinks, out, queries_shape[2], keys_shape[2]);
"""
JOIN = """
    decode_attention::join<T, D, SINKS>(
        splits, sinks, out, splits_shape[1], splits_shape[2], splits_shape[3]);
"""


@attrs.frozen
class Heads:
    """Parameters of the compilation."""

    dtype: mx.Dtype
    dim: int
    key_heads: int
    group: int
    window: int = 0
    """Maximum of attended keys, the query's own included; 0: all."""
    ring: int = 0
    """Length of the ring, where position p has the index p % ring; 0: none."""
    sinks: bool = False
    """Whether each query head has a sink: a logit of the softmax without value."""


@attrs.frozen(eq=False)
class KernelCall:
    queries: mx.array
    """(n, heads, width, dim)."""
    keys: mx.array
    values: mx.array
    """(at least n, key heads, tokens, dim) each."""
    lengths: mx.array
    """(n,) int32: tokens of each row, the last `width` being the queries' own."""
    scale: float
    sinks: mx.array | None = None
    """(heads,)."""


def run(heads: Heads, call: KernelCall) -> mx.array:
    """Attention of each row's queries: (n, heads, width, dim)."""
    queries, keys = call.queries, call.keys
    rows, all_heads, width, dim = queries.shape
    tokens = min(keys.shape[2], heads.ring) if heads.ring else keys.shape[2]
    splits = -(-tokens // SPLIT_TOKENS)
    split = splits > 1
    part = part_of(heads.group * width, dim)
    sinks = no_sinks(queries.dtype) if call.sinks is None else call.sinks
    shape, dtype = (
        ((rows, all_heads, width, splits, dim + 2), mx.float32)
        if split
        else (queries.shape, queries.dtype)
    )
    [out] = _kernel()(
        inputs=[queries, keys, call.values, call.lengths, scalar(call.scale), sinks],
        template=[
            ("T", queries.dtype),
            ("O", dtype),
            ("D", dim),
            ("KEY_HEADS", heads.key_heads),
            ("GROUP", heads.group),
            ("PART", part),
            ("WARPS", WARPS),
            ("WINDOW", heads.window),
            ("RING", heads.ring),
            ("SINKS", heads.sinks),
            ("SPLIT", SPLIT_TOKENS if split else 0),
        ],
        grid=(heads.key_heads * -(-heads.group * width // part) * WARPS * 32, rows, splits),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    if not split:
        return out
    return _join()(
        inputs=[out, sinks],
        template=[("T", queries.dtype), ("D", dim), ("SINKS", heads.sinks)],
        grid=(rows * all_heads * width * dim, 1, 1),
        threadgroup=(dim, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]


def part_of(shared: int, dim: int) -> int:
    """Queries of a block, which read their keys once, if `shared` share a key head."""
    blocks = -(-shared // min(MAX_PART, MAX_SUMS * 32 // dim))
    return -(-shared // blocks)


@cache
def _kernel() -> Kernel:
    names = ["queries", "keys", "values", "lengths", "scale", "sinks"]
    return kernel("decode_attention", FILE, names, SOURCE)


@cache
def _join() -> Kernel:
    return kernel("decode_attention_join", FILE, ["splits", "sinks"], JOIN)


@cache
def scalar(value: float) -> mx.array:
    return mx.array([value], mx.float32)


@cache
def no_sinks(dtype: mx.Dtype) -> mx.array:
    return mx.zeros(1, dtype)
