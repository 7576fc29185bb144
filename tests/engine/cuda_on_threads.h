// What the kernels of decode_kernel.py use of CUDA, on threads of a CPU: one block after another.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>
#include <algorithm>
using std::min;
struct Dim { int x, y, z; };
static thread_local Dim threadIdx, blockIdx;
static Dim gridDim;
static thread_local int lane_of_thread;
#define __shared__ static
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
