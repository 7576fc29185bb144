"""The CUDA kernel of attention by lengths (`decode_attention.py`), and its launch.

The method is that of flash decoding (Dao et al. 2023). A block has one row, one head of keys, and up to four of the queries that share
it; its warps take turns over the keys, each with its own running maximum, and the block joins their sums. Buffers longer than
`SPLIT_TOKENS` are split between blocks, whose sums a second kernel joins. Splits begin at multiples of that length, and those behind a
row's end add exact zeros: a row's result depends neither on other rows nor on the length of the buffers.

Several queries of a head (drafts that are verified) are like more heads in a group: query w of a pass of `width` tokens attends to
width - 1 - w keys less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import attrs
import mlx.core as mx

HEAD_DIMS = (64, 128, 256)
MAX_PART, MAX_SUMS = 4, 16
"""Maximum number of queries that a block computes, and of elements of their sums that a thread holds: more would need more registers
than 512 threads can have, and CUDA would refuse the launch (seen with eight heads of 128)."""
WARPS = 16
SPLIT_TOKENS = 1024
"""On an H200 (4B shape), a layer of one row of 20,000 tokens: 91, 85 and 82 us with splits of 256, 512 and 1,024, 118 by cuDNN; of
2,000: 41, 41, 44 and 31; 128 rows of 500: 230, 208, 174 and 297."""
SOURCE = """
    constexpr int E = D / 32;         // elements of a lane
    constexpr int U = 4;              // keys of a warp at a time, so that their loads overlap
    constexpr float LOG2E = 1.44269504f, LOWEST = -3.4e38f;
    struct alignas(E * sizeof(T)) Lane { T x[E]; };
    __shared__ float sums[WARPS][D];
    __shared__ float maxima[WARPS], weights[WARPS];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int width = queries_shape[2], shared = GROUP * width;  // queries that share a head of keys
    const int blocks = (shared + PART - 1) / PART;
    const int row = blockIdx.y, key_head = blockIdx.x / blocks, part = blockIdx.x % blocks * PART;
    const int length = lengths[row];
    const long long group = row * KEY_HEADS + key_head;
    const long long slot = group * keys_shape[2] * D + lane * E;

    float q[PART][E], o[PART][E], maximum[PART], weight[PART];
    int query[PART], end[PART];       // the last block of a group may repeat its last query
    #pragma unroll
    for (int g = 0; g < PART; g++) {
        query[g] = min(part + g, shared - 1);
        end[g] = length - (width - 1) + query[g] % width;
        maximum[g] = LOWEST;
        weight[g] = 0.f;
        #pragma unroll
        for (int e = 0; e < E; e++) {
            q[g][e] = scale[0] * LOG2E * static_cast<float>(queries[(group * shared + query[g]) * D + lane * E + e]);
            o[g][e] = 0.f;
        }
    }
    const int stored = RING ? min(length, RING) : length;
    const int stop = SPLIT ? min(stored, (int)(blockIdx.z + 1) * SPLIT) : stored;
    for (int begin = (SPLIT ? blockIdx.z * SPLIT : 0) + warp * U; begin < stop; begin += WARPS * U) {
        float score[U][PART];
        bool visible[U][PART];
        Lane k[U], v[U];
        #pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = min(begin + u, stop - 1);
            k[u] = *reinterpret_cast<const Lane*>(keys + slot + (long long)at * D);
            v[u] = *reinterpret_cast<const Lane*>(values + slot + (long long)at * D);
        }
        #pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = begin + u;
            // The token at index `at` of a ring is the last one whose position is congruent to it.
            const int position = RING ? length - 1 - (length - 1 - at) % (RING ? RING : 1) : at;
            #pragma unroll
            for (int g = 0; g < PART; g++) {
                float dot = 0.f;
                #pragma unroll
                for (int e = 0; e < E; e++) dot += q[g][e] * static_cast<float>(k[u].x[e]);
                #pragma unroll
                for (int step = 16; step; step >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, step);
                visible[u][g] = at < stop && position < end[g] && (!WINDOW || position >= end[g] - WINDOW);
                score[u][g] = visible[u][g] ? dot : LOWEST;
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
                const float p = visible[u][g] ? exp2f(score[u][g] - highest) : 0.f;
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
            const long long to = group * shared + query[g];
            if (SPLIT) {
                float* split = (float*)out + (to * gridDim.z + blockIdx.z) * (D + 2);
                split[threadIdx.x] = sum;
                if (threadIdx.x == 0) { split[D] = highest; split[D + 1] = total; }
            } else {
                if (SINKS) {
                    const float sink = LOG2E * static_cast<float>(sinks[(key_head * shared + query[g]) / width]);
                    const float higher = fmaxf(highest, sink);
                    sum *= exp2f(highest - higher);
                    total = total * exp2f(highest - higher) + exp2f(sink - higher);
                }
                out[to * D + threadIdx.x] = static_cast<O>(sum / total);
            }
        }
        __syncthreads();
    }
"""
JOIN = """
    constexpr float LOG2E = 1.44269504f;
    const int count = splits_shape[3];
    const long long query = blockIdx.x;  // of all rows and heads
    const float* split = splits + query * count * (D + 2);
    float highest = split[D], total = 0.f, sum = 0.f;
    for (int s = 1; s < count; s++) highest = fmaxf(highest, split[s * (D + 2) + D]);
    for (int s = 0; s < count; s++) {
        const float factor = exp2f(split[s * (D + 2) + D] - highest);
        total += split[s * (D + 2) + D + 1] * factor;
        sum += split[s * (D + 2) + threadIdx.x] * factor;
    }
    if (SINKS) {
        const float sink = LOG2E * static_cast<float>(sinks[query / splits_shape[2] % splits_shape[1]]);
        const float higher = fmaxf(highest, sink);
        sum *= exp2f(highest - higher);
        total = total * exp2f(highest - higher) + exp2f(sink - higher);
    }
    out[query * D + threadIdx.x] = static_cast<T>(sum / total);
"""
"""Blocks of D threads. A split without a key has the lowest maximum and a sum of 0."""
Kernel = Callable[..., list[mx.array]]


@attrs.frozen
class Heads:
    """What the kernel is compiled for."""

    dtype: mx.Dtype
    dim: int
    key_heads: int
    group: int
    """Number of query heads for each head of keys."""
    window: int = 0
    """Number of keys that a query attends to at most, its own included; 0: all."""
    ring: int = 0
    """Length of the ring in which the token at position p has the index p % ring; 0: none."""
    sinks: bool = False
    """Whether each query head has a sink: a logit that takes part in the softmax and has no value."""


@attrs.frozen(eq=False)
class KernelCall:
    """Arguments of one call of attention."""

    queries: mx.array
    """(n, heads, width, dim)."""
    keys: mx.array
    values: mx.array
    """(at least n, key heads, tokens, dim) each."""
    lengths: mx.array
    """(n,) int32: number of tokens of each row, of which the last `width` are the queries' own."""
    scale: float
    sinks: mx.array | None = None
    """(heads,)."""


def run(heads: Heads, call: KernelCall) -> mx.array:
    """Attention of each row's queries over its tokens: (n, heads, width, dim)."""
    queries, keys = call.queries, call.keys
    rows, all_heads, width, dim = queries.shape
    tokens = min(keys.shape[2], heads.ring) if heads.ring else keys.shape[2]
    splits = -(-tokens // SPLIT_TOKENS)
    split = splits > 1
    part = part_of(heads.group * width, dim)
    sinks = _no_sinks(queries.dtype) if call.sinks is None else call.sinks
    shape, dtype = ((rows, all_heads, width, splits, dim + 2), mx.float32) if split else (queries.shape, queries.dtype)
    [out] = _kernel()(
        inputs=[queries, keys, call.values, call.lengths, _scalar(call.scale), sinks],
        template=[("T", queries.dtype), ("O", dtype), ("D", dim), ("KEY_HEADS", heads.key_heads), ("GROUP", heads.group),
                  ("PART", part), ("WARPS", WARPS), ("WINDOW", heads.window), ("RING", heads.ring), ("SINKS", heads.sinks),
                  ("SPLIT", SPLIT_TOKENS if split else 0)],
        grid=(heads.key_heads * -(-heads.group * width // part) * WARPS * 32, rows, splits),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )  # fmt: skip
    if not split:
        return out
    return _join()(
        inputs=[out, sinks],
        template=[("T", queries.dtype), ("D", dim), ("SINKS", heads.sinks)],
        grid=(rows * all_heads * width * dim, 1, 1),
        threadgroup=(dim, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]  # fmt: skip


def part_of(shared: int, dim: int) -> int:
    """Number of queries that a block computes, which read their keys once, if `shared` share a head of keys."""
    blocks = -(-shared // min(MAX_PART, MAX_SUMS * 32 // dim))
    return -(-shared // blocks)


@cache
def _kernel() -> Kernel:
    names = ["queries", "keys", "values", "lengths", "scale", "sinks"]
    return cast(
        Kernel, mx.fast.cuda_kernel(name="decode_attention", input_names=names, output_names=["out"], source=SOURCE)
    )


@cache
def _join() -> Kernel:
    names = ["splits", "sinks"]
    return cast(
        Kernel, mx.fast.cuda_kernel(name="decode_attention_join", input_names=names, output_names=["out"], source=JOIN)
    )


@cache
def _scalar(value: float) -> mx.array:
    return mx.array([value], mx.float32)


@cache
def _no_sinks(dtype: mx.Dtype) -> mx.array:
    return mx.zeros(1, dtype)
