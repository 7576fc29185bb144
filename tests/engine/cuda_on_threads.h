// What the kernels of decode_attention.cuh, prefill_attention.cuh and few_rows.cuh use of CUDA, on a CPU: one block after another. Each thread of a block has a stack of
// its own, and runs until it waits; which one runs next is drawn, so that a barrier that is missing shows in one order or another. Threads of the
// system did the same, but the kernel's time to switch between 128 of them was most of what a test took.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>
#include <algorithm>
#include <ucontext.h>
using std::max;
using std::min;
struct Dim { int x, y, z; };
static Dim threadIdx, blockIdx, gridDim;
#define __shared__ static
#define __device__ static
#define __forceinline__ inline
struct Barrier { int threads, arrived = 0, passed = 0; };
struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    Dim block = {0, 0, 0};
    const Barrier* waits_at = nullptr;
    int passed = 0;
    bool done = false;
    bool ready() const { return !done && (!waits_at || waits_at->passed != passed); }
};
static std::vector<Thread> running;
static std::vector<Barrier> warp_barriers;
static Barrier block_barrier;
static std::vector<float> exchanged;
static std::function<void()> work;
static ucontext_t launcher;
static int current;
static std::minstd_rand dice(1);
// Go on with any thread that can. Ends the program where all wait: some never come to the barrier.
inline void others_run() {
    const int from = current, threads = running.size(), first = dice() % threads;
    int next = 0;
    while (next < threads && !running[(first + next) % threads].ready()) next++;
    if (next == threads) {
        const auto done = [](const Thread& thread) { return thread.done; };
        if (!std::all_of(running.begin(), running.end(), done)) fprintf(stderr, "a barrier that not all threads reach\n"), exit(4);
        setcontext(&launcher);
    }
    current = (first + next) % threads;
    if (current == from) return;
    running[from].block = blockIdx;
    threadIdx = {current, 0, 0}, blockIdx = running[current].block;
    swapcontext(&running[from].context, &running[current].context);
}
inline void wait_at(Barrier& barrier) {
    Thread& thread = running[current];
    if (++barrier.arrived == barrier.threads) {
        barrier.arrived = 0, barrier.passed++;
    } else {
        thread.waits_at = &barrier, thread.passed = barrier.passed;
    }
    others_run();
    thread.waits_at = nullptr;
}
inline void __syncthreads() { wait_at(block_barrier); }
inline float __shfl_xor_sync(unsigned, float value, int step) {
    const int thread = threadIdx.x;
    auto& barrier = warp_barriers[thread >> 5];
    exchanged[thread] = value;
    wait_at(barrier);
    const float got = exchanged[(thread & ~31) | ((thread & 31) ^ step)];
    wait_at(barrier);
    return got;
}
static void run_all_blocks() {
    for (int z = 0; z < gridDim.z; z++) for (int y = 0; y < gridDim.y; y++) for (int x = 0; x < gridDim.x; x++) {
        blockIdx = {x, y, z};
        work();
        wait_at(block_barrier);
    }
    running[current].done = true;
    others_run();
}
template <typename Kernel> void launch(Dim grid, int threads, Kernel kernel) {
    gridDim = grid, work = kernel, current = 0, threadIdx = {0, 0, 0};
    block_barrier = {threads};
    warp_barriers.assign(threads / 32, Barrier{32});
    exchanged.resize(threads);
    running = std::vector<Thread>(threads);
    for (auto& thread : running) {
        getcontext(&thread.context);
        thread.stack.resize(256 * 1024);
        thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.context, run_all_blocks, 0);
    }
    swapcontext(&launcher, &running[0].context);
}
// An array of what the test gives the program; aligned, as the device's are.
template <typename X> X* read(int size) {
    X* array = (X*)aligned_alloc(16, (size * sizeof(X) + 15) / 16 * 16);
    if (fread(array, sizeof(X), size, stdin) != (size_t)size) exit(3);
    return array;
}

// What kernels on tensor cores use besides. Instructions of tensor_cores.cuh and few_rows.cuh are emulated here.
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
}  // namespace few_rows
namespace tensor_cores {
template <typename T> inline unsigned both(float low, float high) { return T(low).bits | (unsigned)T(high).bits << 16; }
static std::array<std::array<unsigned, 6>, 1024> fragments;
// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". Half k of a register is its k-th number.
template <typename T> inline void multiply(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int thread = threadIdx.x, warp = thread & ~31, lane = thread & 31;
    auto& barrier = warp_barriers[thread >> 5];
    fragments[thread] = {a0, a1, a2, a3, b0, b1};
    wait_at(barrier);
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
    wait_at(barrier);
}
static std::array<const void*, 1024> rows_of_matrices;
// PTX ISA, "ldmatrix": a lane gets two numbers of row lane / 4 of each matrix, or of its column.
template <typename T> inline void load(unsigned (&matrices)[4], const T* row, bool transposed = false) {
    const int thread = threadIdx.x, warp = thread & ~31, lane = thread & 31;
    auto& barrier = warp_barriers[thread >> 5];
    rows_of_matrices[thread] = row;
    wait_at(barrier);
    for (int i = 0; i < 4; i++) {
        const auto number = [&](int of) {
            const int at = lane / 4, other = lane % 4 * 2 + of;
            return (unsigned)((const T*)rows_of_matrices[warp + i * 8 + (transposed ? other : at)])[transposed ? at : other].bits;
        };
        matrices[i] = number(0) | number(1) << 16;
    }
    wait_at(barrier);
}
template <typename T> inline void load_transposed(unsigned (&matrices)[4], const T* row) { load(matrices, row, true); }
// Copies arrive when they are waited for.
static std::array<std::vector<std::array<const void*, 2>>, 1024> copies;
template <typename T> inline void copy(T* to, const T* from) { copies[threadIdx.x].push_back({to, from}); }
inline void wait_for_copies() {
    for (const auto& [to, from] : copies[threadIdx.x]) memcpy((void*)to, from, 16);
    copies[threadIdx.x].clear();
}
}  // namespace tensor_cores
