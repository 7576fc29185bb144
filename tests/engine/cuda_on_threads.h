// What the kernels of decode_attention.cuh and few_rows.cuh use of CUDA, on threads of a CPU: one block after another.
#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#include <algorithm>
using std::min;
struct Dim { int x, y, z; };
static thread_local Dim threadIdx, blockIdx;
static Dim gridDim;
static thread_local int lane_of_thread;
#define __shared__ static
#define __device__ static
#define __forceinline__ inline
static std::barrier<>* block_barrier;
static std::vector<std::barrier<>*> warp_barriers;
static std::vector<float> exchanged;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float value, int step) {
    const int thread = threadIdx.x;
    auto& barrier = *warp_barriers[thread >> 5];
    exchanged[thread] = value;
    barrier.arrive_and_wait();
    const float got = exchanged[(thread & ~31) | ((thread & 31) ^ step)];
    barrier.arrive_and_wait();
    return got;
}
template <typename Kernel> void launch(Dim grid, int threads, Kernel kernel) {
    gridDim = grid;
    warp_barriers.clear();
    std::barrier<> all(threads);
    block_barrier = &all;
    exchanged.resize(threads);
    for (int warp = 0; warp < threads / 32; warp++) warp_barriers.push_back(new std::barrier<>(32));
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; thread++) running.emplace_back([=, &all] {
        for (int z = 0; z < grid.z; z++) for (int y = 0; y < grid.y; y++) for (int x = 0; x < grid.x; x++) {
            threadIdx = {thread, 0, 0};
            blockIdx = {x, y, z};
            kernel();
            all.arrive_and_wait();
        }
    });
    for (auto& thread : running) thread.join();
}
// An array of what the test gives the program; aligned, as the device's are.
template <typename X> X* read(int size) {
    X* array = (X*)aligned_alloc(16, (size * sizeof(X) + 15) / 16 * 16);
    if (fread(array, sizeof(X), size, stdin) != (size_t)size) exit(3);
    return array;
}

// What few_rows.cuh uses besides. Its own instructions are emulated here.
#define EMULATED
struct uint4 { unsigned x, y, z, w; };
inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned char bytes[8], got[4];
    memcpy(bytes, &a, 4), memcpy(bytes + 4, &b, 4);
    for (int i = 0; i < 4; i++) got[i] = bytes[selector >> (4 * i) & 7];
    unsigned result;
    memcpy(&result, got, 4);
    return result;
}
struct bfloat16 {
    uint16_t bits;
    bfloat16() = default;
    explicit bfloat16(float value) {  // rounded to the nearest, ties to even; no NaN
        uint32_t all;
        memcpy(&all, &value, 4);
        bits = (all + 0x7fff + (all >> 16 & 1)) >> 16;
    }
    operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
namespace few_rows {
inline uint4 read_once(const uint4* at) { return *at; }
template <typename T> inline unsigned both(float low, float high) { return T(low).bits | (unsigned)T(high).bits << 16; }
static std::array<std::array<unsigned, 6>, 1024> fragments;
// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". Half k of a register is its k-th number.
template <typename T> inline void multiply(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int thread = threadIdx.x, warp = thread & ~31, lane = thread & 31;
    auto& barrier = *warp_barriers[thread >> 5];
    fragments[thread] = {a0, a1, a2, a3, b0, b1};
    barrier.arrive_and_wait();
    auto number = [](unsigned reg, int half) { return __uint_as_float(reg >> (16 * half) << 16); };
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const int owner = k % 8 / 2, upper = k / 8;
            const unsigned a = fragments[warp + row % 8 * 4 + owner][row / 8 + 2 * upper];
            const unsigned b = fragments[warp + column * 4 + owner][4 + upper];
            sums[i] += number(a, k % 2) * number(b, k % 2);
        }
    }
    barrier.arrive_and_wait();
}
}  // namespace few_rows
