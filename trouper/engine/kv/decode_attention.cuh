// Attention of decoding rows by their lengths, for decode_kernel.py, where its method is described: queries (rows, heads, width, D), keys and
// values (rows, KEY_HEADS, capacity, D), a length for each row.
#pragma once
namespace decode_attention {
constexpr float LOG2E = 1.44269504f, LOWEST = -3.4e38f;

// Blocks (KEY_HEADS * parts of PART queries that share a head, rows, splits) of WARPS * 32 threads. `out`: (rows, heads, width, D), or if
// SPLIT, which is the number of tokens of a split, (rows, heads, width, splits, D + 2) float32: sums, their maximum, and their weight.
template <typename T, typename O, int D, int KEY_HEADS, int GROUP, int PART, int WARPS, int WINDOW, int RING, bool SINKS, int SPLIT>
__device__ __forceinline__ void attend(const T* queries, const T* keys, const T* values, const int* lengths, float scale, const T* sinks,
                                       O* out, int width, int capacity) {
    constexpr int E = D / 32;         // elements of a lane
    constexpr int U = 4;              // keys of a warp at a time, so that their loads overlap
    struct alignas(E * sizeof(T)) Lane { T x[E]; };
    __shared__ float sums[WARPS][D];
    __shared__ float maxima[WARPS], weights[WARPS];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int shared = GROUP * width;  // queries that share a head of keys
    const int blocks = (shared + PART - 1) / PART;
    const int row = blockIdx.y, key_head = blockIdx.x / blocks, part = blockIdx.x % blocks * PART;
    const int length = lengths[row];
    const long long group = row * KEY_HEADS + key_head;
    const long long slot = group * capacity * D + lane * E;

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
            q[g][e] = scale * LOG2E * static_cast<float>(queries[(group * shared + query[g]) * D + lane * E + e]);
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
}

// Joins splits (rows, heads, width, count, D + 2) to `out` (rows, heads, width, D): a block of D threads for each query. A split without a
// key has the lowest maximum and a sum of 0.
template <typename T, int D, bool SINKS>
__device__ __forceinline__ void join(const float* splits, const T* sinks, T* out, int heads, int width, int count) {
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
        const float sink = LOG2E * static_cast<float>(sinks[query / width % heads]);
        const float higher = fmaxf(highest, sink);
        sum *= exp2f(highest - higher);
        total = total * exp2f(highest - higher) + exp2f(sink - higher);
    }
    out[query * D + threadIdx.x] = static_cast<T>(sum / total);
}
}  // namespace decode_attention
