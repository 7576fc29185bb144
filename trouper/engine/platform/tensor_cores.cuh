// What kernels use of NVIDIA's tensor cores (compute capability 8.0), as PTX's instructions.
#pragma once
namespace tensor_cores {
using uint = unsigned;

// EMULATED: the tests that run kernels on a CPU have their own (tests/engine/cuda_on_threads.h).
#ifndef EMULATED
// m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"): sums += a times b.
template <typename T> __device__ __forceinline__ void multiply(float (&sums)[4], uint a0, uint a1, uint a2, uint a3, uint b0, uint b1);
// Two numbers of type T, the first in the lower half.
template <typename T> __device__ __forceinline__ uint both(float low, float high);
#define TENSOR_CORES_TYPE(TYPE, MMA, CONVERT) \
    template <> __device__ __forceinline__ void multiply<TYPE>(float (&sums)[4], uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) { \
        asm volatile(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); \
    } \
    template <> __device__ __forceinline__ uint both<TYPE>(float low, float high) { \
        uint pair; \
        asm(CONVERT " %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low)); \
        return pair; \
    }
TENSOR_CORES_TYPE(__nv_bfloat16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "cvt.rn.bf16x2.f32")
TENSOR_CORES_TYPE(__half, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "cvt.rn.f16x2.f32")
#undef TENSOR_CORES_TYPE

// Four matrices of 8 x 8 numbers in shared memory, each lane with the address of a row: lanes 0 to 7 those of the first one.
template <typename T> __device__ __forceinline__ void load(uint (&matrices)[4], const T* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(static_cast<uint>(__cvta_generic_to_shared(row))) : "memory");
}
template <typename T> __device__ __forceinline__ void load_transposed(uint (&matrices)[4], const T* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(static_cast<uint>(__cvta_generic_to_shared(row))) : "memory");
}
// Copy 16 bytes to shared memory, which are there after `wait_for_copies` of the same thread.
template <typename T> __device__ __forceinline__ void copy(T* to, const T* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(static_cast<uint>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif
}  // namespace tensor_cores
