"""Attention of decoding rows over their slots, as one kernel that knows each row's length.

MLX's kernels for a single query take no mask on CUDA, so rows of different lengths get attention made of a dozen operations,
which read each row's slot up to the longest row. There, launching operations takes the time of a step (docs/performance.md). This
kernel reads a layer's whole buffers and the lengths of the rows: no mask, no views, one operation, and its shapes change only when the buffers
grow, so that the pass can be compiled (`compiled_pass.py`). A row's result does not depend on the other rows.

The method is that of flash decoding (Dao et al. 2023) within a block: warps take turns over the keys, each with its own running maximum,
and the block joins their sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.kv.region import Region
from trouper.engine.platform.error_text import line_of

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
MAX_PART, MAX_SUMS = 4, 16
"""Maximum number of query heads that a block computes, and of elements of their sums that a thread holds: more would need more registers
than 512 threads can have, and CUDA would refuse the launch (seen with eight heads of 128)."""
WARPS = 16
TRIED_LENGTHS = (0, 3, 70)
"""Tokens of rows in the trial of the kernel: warps without a key, and a second turn."""
TRIED_ERROR = 0.05
"""Largest error in the trial: outputs are of the order of 1, in bfloat16 within 0.02."""
SOURCE = """
    constexpr int E = D / 32;         // elements of a lane
    constexpr int U = 4;              // keys of a warp at a time, so that their loads overlap
    struct alignas(E * sizeof(T)) Lane { T x[E]; };
    __shared__ float sums[WARPS][D];
    __shared__ float maxima[WARPS], weights[WARPS];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row = blockIdx.y, head = blockIdx.x * PART;  // the first of the block's query heads
    const int length = lengths[row];
    const long long slot = (long long)(row * KEY_HEADS + head / GROUP) * keys_shape[2] * D + lane * E;
    const long long first = (long long)(row * KEY_HEADS * GROUP + head) * D;

    float q[PART][E], o[PART][E], maximum[PART], weight[PART];
    #pragma unroll
    for (int g = 0; g < PART; g++) {
        maximum[g] = -3.4e38f;
        weight[g] = 0.f;
        #pragma unroll
        for (int e = 0; e < E; e++) {
            q[g][e] = scale[0] * 1.44269504f * static_cast<float>(queries[first + g * D + lane * E + e]);
            o[g][e] = 0.f;
        }
    }
    for (int begin = warp * U; begin < length; begin += WARPS * U) {
        float score[U][PART];
        Lane k[U], v[U];
        #pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = min(begin + u, length - 1);
            k[u] = *reinterpret_cast<const Lane*>(keys + slot + (long long)at * D);
            v[u] = *reinterpret_cast<const Lane*>(values + slot + (long long)at * D);
        }
        #pragma unroll
        for (int u = 0; u < U; u++) {
            #pragma unroll
            for (int g = 0; g < PART; g++) {
                float dot = 0.f;
                #pragma unroll
                for (int e = 0; e < E; e++) dot += q[g][e] * static_cast<float>(k[u].x[e]);
                #pragma unroll
                for (int step = 16; step; step >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, step);
                score[u][g] = begin + u < length ? dot : -3.4e38f;
            }
        }
        #pragma unroll
        for (int g = 0; g < PART; g++) {
            float highest = maximum[g];
            #pragma unroll
            for (int u = 0; u < U; u++) highest = fmaxf(highest, score[u][g]);
            const float factor = exp2f(maximum[g] - highest);
            maximum[g] = highest;
            weight[g] *= factor;
            #pragma unroll
            for (int e = 0; e < E; e++) o[g][e] *= factor;
            #pragma unroll
            for (int u = 0; u < U; u++) {
                const float p = begin + u < length ? exp2f(score[u][g] - highest) : 0.f;
                weight[g] += p;
                #pragma unroll
                for (int e = 0; e < E; e++) o[g][e] += p * static_cast<float>(v[u].x[e]);
            }
        }
    }
    #pragma unroll
    for (int g = 0; g < PART; g++) {
        if (lane == 0) { maxima[warp] = maximum[g]; weights[warp] = weight[g]; }
        #pragma unroll
        for (int e = 0; e < E; e++) sums[warp][lane * E + e] = o[g][e];
        __syncthreads();
        if (threadIdx.x < D) {
            float highest = maxima[0], total = 0.f, sum = 0.f;
            #pragma unroll
            for (int w = 1; w < WARPS; w++) highest = fmaxf(highest, maxima[w]);
            #pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float factor = exp2f(maxima[w] - highest);
                total += weights[w] * factor;
                sum += sums[w][threadIdx.x] * factor;
            }
            out[first + g * D + threadIdx.x] = static_cast<T>(sum / total);
        }
        __syncthreads();
    }
"""
Kernel = Callable[..., list[mx.array]]


@attrs.frozen(eq=False)
class WholeBuffer:
    """Keys or values of a decode pass: a layer's whole buffer (slots, heads, tokens, dim), of which row i of the pass has slot i. Not
    an array, as `Parts` is none."""

    buffer: mx.array
    region: Region

    def view(self) -> mx.array:
        """(n, heads, keys, dim) view of the rows of the pass, for attention with `Region.mask`."""
        return self.buffer[: self.region.stop, :, : self.region.keys]


def supports(queries: mx.array, keys: WholeBuffer, values: WholeBuffer, options: dict[str, Any]) -> bool:
    """Whether the kernel computes this: one query of each head, equal dimensions of keys and values, no sinks."""
    heads, dim = queries.shape[1], queries.shape[3]
    key_heads = keys.buffer.shape[1]
    return (
        dim in HEAD_DIMS
        and values.buffer.shape[3] == keys.buffer.shape[3] == dim
        and heads % key_heads == 0
        and queries.shape[2] == 1
        and keys.buffer.dtype == values.buffer.dtype == queries.dtype
        and options.keys() == {"scale"}
        and computes(queries.dtype, dim, key_heads, heads // key_heads)
    )


@cache
def computes(dtype: mx.Dtype, dim: int, key_heads: int, group: int) -> bool:
    """Whether the device runs the kernel for such heads, and rightly. Tried once: a device may have fewer registers than the kernel
    needs, or a compiler that refuses it, and then rows get MLX's attention."""
    lengths = np.array(TRIED_LENGTHS, np.int32)
    region = Region(0, lengths, np.ones_like(lengths), 1)
    shape = (len(lengths), key_heads, int(lengths.max()) + 1, dim)
    queries, keys, values = (
        mx.random.normal(size, key=mx.random.key(number)).astype(dtype)
        for number, size in enumerate([(len(lengths), key_heads * group, 1, dim), shape, shape])
    )
    expected = mx.fast.scaled_dot_product_attention(
        *(part.astype(mx.float32) for part in (queries, keys, values)), scale=dim**-0.5, mask=region.mask()[:, None]
    )
    try:
        got = attend(queries, WholeBuffer(keys, region), WholeBuffer(values, region), dim**-0.5)
        right = bool(mx.abs(got.astype(mx.float32) - expected).max().item() < TRIED_ERROR)  # type: ignore[operator]
        reason = "its results are wrong"
    except Exception as error:  # noqa: BLE001 - whatever the device's compiler or driver says, there is another way
        right, reason = False, line_of(error)
    if not right:
        log.warning(
            "attention by lengths is not used for %d heads of %d, %s: %s", key_heads * group, dim, dtype, reason
        )
    return right


def attend(queries: mx.array, keys: WholeBuffer, values: WholeBuffer, scale: float) -> mx.array:
    """Attention of queries (n, heads, 1, dim) over each row's tokens up to the end of the pass. Returns (n, heads, 1, dim)."""
    rows, heads, _, dim = queries.shape
    key_heads = keys.buffer.shape[1]
    group = heads // key_heads
    part = part_of(group, dim)
    return _kernel()(
        inputs=[queries, keys.buffer, values.buffer, keys.region.after, _scalar(scale)],
        template=[("T", queries.dtype), ("D", dim), ("KEY_HEADS", key_heads), ("GROUP", group), ("PART", part), ("WARPS", WARPS)],
        grid=(heads // part * WARPS * 32, rows, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]  # fmt: skip


def part_of(group: int, dim: int) -> int:
    """Number of the query heads of a group that a block computes, which read its keys once: a divisor of the group."""
    limit = min(MAX_PART, MAX_SUMS * 32 // dim)
    return max(part for part in range(1, limit + 1) if group % part == 0)


@cache
def _kernel() -> Kernel:
    made = mx.fast.cuda_kernel(
        name="decode_attention",
        input_names=["queries", "keys", "values", "lengths", "scale"],
        output_names=["out"],
        source=SOURCE,
    )
    return cast(Kernel, made)


@cache
def _scalar(value: float) -> mx.array:
    return mx.array([value], mx.float32)
