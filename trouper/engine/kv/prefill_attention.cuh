// Attention of prompts' chunks by the rows' lengths, for prefill_kernel.py, where its method is described: queries (rows, heads, width, D),
// keys and values (slots, key heads, capacity, D), for each row its slot and the tokens in KV before the pass. `out`: (rows, width, heads, D).
// With a RING, position p has the index p % RING; if APPENDED, the pass's own tokens lie behind the ring, as the buffers' last `width` ones.
#pragma once
namespace prefill_attention {
using tensor_cores::uint;
constexpr float LOG2E = 1.44269504f, LOWEST = -3.4e38f;

// A tile of `D` numbers a row in shared memory. Pieces of 16 bytes change columns by the row, so that rows lie in different banks.
template <int D, typename T> __device__ __forceinline__ T* piece(T* tile, int row, int number) {
    constexpr int FACTOR = D / 8 & -(D / 8), COLUMNS = FACTOR < 8 ? FACTOR : 8;
    return tile + row * D + ((number ^ (row & (COLUMNS - 1))) * 8);
}

// Begin to copy rows from `begin` on into a tile, each from its index. Rows behind `last` repeat it: what lies there may be no numbers.
template <int D, int ROWS, int THREADS, typename T, typename Index>
__device__ __forceinline__ void fetch(T* tile, const T* rows, int begin, int last, Index index) {
    for (int i = threadIdx.x; i < ROWS * D / 8; i += THREADS) {
        const int row = i / (D / 8), number = i % (D / 8);
        tensor_cores::copy(piece<D>(tile, row, number), rows + (long long)index(min(begin + row, last)) * D + number * 8);
    }
}

// Blocks (tiles of QUERIES queries, heads, rows) of QUERIES * 2 threads: a warp has 16 queries.
template <typename T, int D, int QUERIES, int KEYS, int WINDOW, int RING, bool APPENDED, bool SINKS>
__device__ __forceinline__ void attend(const T* queries, const T* keys, const T* values, const int* rows, float scale, const T* sinks,
                                       T* out, int heads, int width, int key_heads, int capacity) {
    constexpr int THREADS = QUERIES * 2;
    alignas(16) __shared__ T query_tile[QUERIES * D];
    alignas(16) __shared__ T key_tile[KEYS * D];
    alignas(16) __shared__ T value_tile[KEYS * D];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // Tiles at the end attend to more keys: they begin first.
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERIES, head = blockIdx.y;
    const int slot = rows[2 * blockIdx.z], before = rows[2 * blockIdx.z + 1];
    const int end = before + min(first + QUERIES, width);
    const long long of_head = ((long long)slot * key_heads + head / (heads / key_heads)) * capacity * D;
    const auto index = [=](int position) {
        if constexpr (RING == 0) return position;
        return APPENDED && position >= before ? capacity - width + position - before : position % (RING ? RING : 1);
    };
    const int from = WINDOW ? max(0, before + first - (WINDOW - 1)) / KEYS * KEYS : 0;
    fetch<D, QUERIES, THREADS>(query_tile, queries + ((long long)blockIdx.z * heads + head) * width * D, first, width - 1, [](int query) { return query; });
    fetch<D, KEYS, THREADS>(key_tile, keys + of_head, from, end - 1, index);

    // A lane has two queries: of rows lane / 4 and lane / 4 + 8 of the warp's.
    const int lowest = before + first + warp * 16;  // Position of the warp's first query.
    float o[D / 8][4], maximum[2] = {LOWEST, LOWEST}, weight[2] = {0.f, 0.f};
    #pragma unroll
    for (int d = 0; d < D / 8; d++) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.f;
    scale *= LOG2E;
    for (int begin = from; begin < end; begin += KEYS) {
        tensor_cores::wait_for_copies();
        __syncthreads();  // The keys are there, and nobody reads the last values.
        fetch<D, KEYS, THREADS>(value_tile, values + of_head, begin, end - 1, index);
        float s[KEYS / 8][4];
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
        #pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint a[4];
            tensor_cores::load(a, piece<D>(query_tile, warp * 16 + (lane & 15), 2 * k + (lane >> 4)));
            #pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                uint b[4];
                tensor_cores::load(b, piece<D>(key_tile, n * 16 + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
                tensor_cores::multiply<T>(s[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
                tensor_cores::multiply<T>(s[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
        tensor_cores::wait_for_copies();
        __syncthreads();  // The values are there, and nobody reads the keys.
        if (begin + KEYS < end) fetch<D, KEYS, THREADS>(key_tile, keys + of_head, begin + KEYS, end - 1, index);

        const bool masked = begin + KEYS > lowest + 1 || (WINDOW && begin <= lowest + 15 - WINDOW);
        float highest[2] = {maximum[0], maximum[1]};
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = begin + n * 8 + lane % 4 * 2 + i % 2;
                const int query = lowest + lane / 4 + i / 2 * 8;
                s[n][i] = masked && (key > query || (WINDOW && key <= query - WINDOW)) ? LOWEST : s[n][i] * scale;
                highest[i / 2] = fmaxf(highest[i / 2], s[n][i]);
            }
        }
        float factor[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xffffffffu, highest[i], 1));
            highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xffffffffu, highest[i], 2));
            factor[i] = exp2f(maximum[i] - highest[i]);
            maximum[i] = highest[i];
            weight[i] *= factor[i];
            if (WINDOW && highest[i] == LOWEST) highest[i] = 0.f;  // No key yet: all weights are 0.
        }
        #pragma unroll
        for (int d = 0; d < D / 8; d++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) o[d][i] *= factor[i / 2];
        }
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                s[n][i] = exp2f(s[n][i] - highest[i / 2]);
                weight[i / 2] += s[n][i];
            }
        }
        #pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            const uint a[4] = {tensor_cores::both<T>(s[2 * n][0], s[2 * n][1]), tensor_cores::both<T>(s[2 * n][2], s[2 * n][3]),
                               tensor_cores::both<T>(s[2 * n + 1][0], s[2 * n + 1][1]), tensor_cores::both<T>(s[2 * n + 1][2], s[2 * n + 1][3])};
            #pragma unroll
            for (int d = 0; d < D / 16; d++) {
                uint b[4];
                tensor_cores::load_transposed(b, piece<D>(value_tile, n * 16 + (lane & 15), 2 * d + (lane >> 4)));
                tensor_cores::multiply<T>(o[2 * d], a[0], a[1], a[2], a[3], b[0], b[1]);
                tensor_cores::multiply<T>(o[2 * d + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        weight[i] += __shfl_xor_sync(0xffffffffu, weight[i], 1);
        weight[i] += __shfl_xor_sync(0xffffffffu, weight[i], 2);
        const int query = first + warp * 16 + lane / 4 + i * 8;
        if (query >= width) continue;
        float factor = 1.f;
        if (SINKS) {
            const float sink = LOG2E * static_cast<float>(sinks[head]), higher = fmaxf(maximum[i], sink);
            factor = exp2f(maximum[i] - higher);
            weight[i] = weight[i] * factor + exp2f(sink - higher);
        }
        factor /= weight[i];
        uint* to = reinterpret_cast<uint*>(out + (((long long)blockIdx.z * width + query) * heads + head) * D) + lane % 4;
        #pragma unroll
        for (int d = 0; d < D / 8; d++) to[d * 4] = tensor_cores::both<T>(o[d][2 * i] * factor, o[d][2 * i + 1] * factor);
    }
}
}  // namespace prefill_attention
