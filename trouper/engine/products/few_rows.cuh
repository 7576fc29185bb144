// Product of few rows with a weight matrix, for few_rows.py: out (rows, outputs) = x (rows, inputs) times w (outputs, inputs) transposed.
//
// A block has 16 outputs and up to 8 * TILES rows; its warps take turns over the inputs, and the block adds their sums, always in the
// same order: a row's result depends neither on other rows nor on their number. Weights are the left factor of the tensor cores'
// m16n8k16 product (PTX ISA, "Matrix Fragments for mma.m16n8k16"): a lane has numbers of the weights' rows lane / 4 and lane / 4 + 8,
// and of row lane / 4 of x. Which inputs a lane has is free, as long as both factors agree: so a lane reads 16 bytes of a row at once.
#pragma once
namespace few_rows {
using tensor_cores::both, tensor_cores::multiply, tensor_cores::uint;
constexpr int WARPS = 8;

// EMULATED: the test that runs this on a CPU has its own (tests/engine/cuda_on_threads.h).
#ifndef EMULATED
// Each weight is read once: it need not stay in the cache that x is read from.
__device__ __forceinline__ uint4 read_once(const uint4* at) {
    uint4 got;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "l"(at));
    return got;
}
#endif

// Two integers below 2^16, one in each half, as numbers of type T: scale times each, plus bias, rounded once.
template <typename T> __device__ __forceinline__ uint unpacked(uint pair, float scale, float bias) {
    constexpr uint POWER = 0x4b000000u;  // 2^23 as a float, whose last bits are an integer
    const float low = __uint_as_float(POWER | (pair & 0xffffu)) - 8388608.f;
    const float high = __uint_as_float(POWER | (pair >> 16)) - 8388608.f;
    return both<T>(fmaf(low, scale, bias), fmaf(high, scale, bias));
}

// A part of the outputs, in an array of its own: `outputs` of them from `start` on. Blocks do not lie across parts.
template <typename T> struct Part { T* out; int start, outputs; };
// The part in which this block's outputs are. `starts`: of all parts.
template <typename T, int PARTS> __device__ __forceinline__ Part<T> part_of(T* const (&outs)[PARTS], const int* starts, int outputs) {
    Part<T> part = {outs[0], 0, PARTS == 1 ? outputs : starts[1]};
    #pragma unroll
    for (int i = 1; i < PARTS; i++) {
        const int start = starts[i], end = i + 1 < PARTS ? starts[i + 1] : outputs;
        if (static_cast<int>(blockIdx.y) * 16 >= start) part = {outs[i], start, end - start};
    }
    return part;
}

// BITS: 16, w has numbers of type T; 4 or 8, w has integers, the first in the lowest bits, and `scales` and `biases` one number for each
// GROUP of a row. `bias`: (outputs,) if `biased`. `outs`, `starts`: the array of each part,
// and its first output. They are read last: before, they would take registers of the loop.
template <typename T, int BITS, int GROUP, int TILES, int PARTS>
__device__ __forceinline__ void product(const T* x, const void* w, const T* scales, const T* biases, const T* bias, T* const (&outs)[PARTS],
                                        const int* starts, int rows, int inputs, int outputs, bool biased) {
    constexpr int E = 128 / BITS;                         // numbers in 16 bytes of w
    constexpr int U = BITS == 16 && TILES == 1 ? 4 : 2;  // reads of w at a time, so that they overlap
    __shared__ float sums[WARPS][TILES * 8][17];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int first = blockIdx.x * (8 * TILES), column = blockIdx.y * 16;
    const int tiles = min(TILES, (rows - first + 7) / 8);
    const int length = inputs / E, groups = BITS == 16 ? 0 : inputs / GROUP;
    const long long low = min(column + g, outputs - 1), high = min(column + g + 8, outputs - 1);
    const uint4* weights_low = reinterpret_cast<const uint4*>(w) + low * length;
    const uint4* weights_high = reinterpret_cast<const uint4*>(w) + high * length;
    const uint4 zero = {0, 0, 0, 0};
    const uint4* row[TILES];
    float sum[TILES][4];
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
        row[i] = reinterpret_cast<const uint4*>(x + (long long)min(first + 8 * i + g, rows - 1) * inputs);
        sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;
    }
    for (int begin = warp * 4; begin < length; begin += WARPS * 4 * U) {  // the same for all lanes of a warp
        uint4 a[U], b[U];
        float scale_low[U], bias_low[U], scale_high[U], bias_high[U];
        #pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = begin + u * WARPS * 4 + t;
            const bool inside = at < length;
            a[u] = inside ? read_once(weights_low + at) : zero;
            b[u] = inside ? read_once(weights_high + at) : zero;
            if constexpr (BITS < 16) {
                const int group = at * E / GROUP;
                scale_low[u] = inside ? static_cast<float>(scales[low * groups + group]) : 0.f;
                bias_low[u] = inside ? static_cast<float>(biases[low * groups + group]) : 0.f;
                scale_high[u] = inside ? static_cast<float>(scales[high * groups + group]) : 0.f;
                bias_high[u] = inside ? static_cast<float>(biases[high * groups + group]) : 0.f;
            }
        }
        #pragma unroll
        for (int u = 0; u < U; u++) {
            if (begin + u * WARPS * 4 >= length) break;
            const int at = min(begin + u * WARPS * 4 + t, length - 1);  // behind the end weights are 0, and x must not be read
            if constexpr (BITS == 16) {
                #pragma unroll
                for (int i = 0; i < TILES; i++) if (i < tiles) {
                    const uint4 v = row[i][at];
                    multiply<T>(sum[i], a[u].x, b[u].x, a[u].y, b[u].y, v.x, v.y);
                    multiply<T>(sum[i], a[u].z, b[u].z, a[u].w, b[u].w, v.z, v.w);
                }
            } else {
                constexpr int WORDS = BITS / 4;  // words of 8 integers
                const uint words_low[4] = {a[u].x, a[u].y, a[u].z, a[u].w}, words_high[4] = {b[u].x, b[u].y, b[u].z, b[u].w};
                #pragma unroll
                for (int part = 0; part < E / 8; part++) {
                    // Integers that lie 16 bits apart are taken out of a word by one mask: so the numbers of x are paired likewise.
                    uint w_low[4], w_high[4];
                    #pragma unroll
                    for (int p = 0; p < 4; p++) {
                        const int word = part * WORDS + (BITS == 8 ? p / 2 : 0), shift = BITS == 8 ? 8 * (p & 1) : 4 * p;
                        constexpr uint MASK = BITS == 8 ? 0x00ff00ffu : 0x000f000fu;
                        w_low[p] = unpacked<T>(words_low[word] >> shift & MASK, scale_low[u], bias_low[u]);
                        w_high[p] = unpacked<T>(words_high[word] >> shift & MASK, scale_high[u], bias_high[u]);
                    }
                    #pragma unroll
                    for (int i = 0; i < TILES; i++) if (i < tiles) {
                        const uint4 v = row[i][at * (E / 8) + part];
                        const uint x0 = v.x, x1 = BITS == 8 ? v.y : v.z, x2 = BITS == 8 ? v.z : v.y, x3 = v.w;
                        multiply<T>(sum[i], w_low[0], w_high[0], w_low[1], w_high[1], __byte_perm(x0, x1, 0x5410), __byte_perm(x0, x1, 0x7632));
                        multiply<T>(sum[i], w_low[2], w_high[2], w_low[3], w_high[3], __byte_perm(x2, x3, 0x5410), __byte_perm(x2, x3, 0x7632));
                    }
                }
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
        sums[warp][i * 8 + 2 * t][g] = sum[i][0];
        sums[warp][i * 8 + 2 * t + 1][g] = sum[i][1];
        sums[warp][i * 8 + 2 * t][g + 8] = sum[i][2];
        sums[warp][i * 8 + 2 * t + 1][g + 8] = sum[i][3];
    }
    const Part<T> part = part_of(outs, starts, outputs);
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 8 * 16; i += WARPS * 32) {
        const int to = first + i / 16, output = column + i % 16;
        if (to >= rows || output >= outputs) continue;
        float total = 0.f;
        #pragma unroll
        for (int k = 0; k < WARPS; k++) total += sums[k][i / 16][i % 16];
        if (biased) total += static_cast<float>(bias[output]);
        part.out[(long long)to * part.outputs + output - part.start] = static_cast<T>(total);
    }
}
}  // namespace few_rows
