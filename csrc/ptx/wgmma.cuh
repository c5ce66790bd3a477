// wgmma: a warpgroup's asynchronous product C (64, N) += A (64, 16) B (16, N) with fp32
// accumulators (sm_90a). PTX ISA, "Asynchronous warpgroup level matrix instructions".
//
// B comes from shared memory through a descriptor; A from a descriptor (ss) or registers (rs).
// Lane 4g+t of warp w holds of C, as acc[j][e], row 16w + g + 8*(e >> 1), column 8j + 2t + (e & 1),
// and of A what mma.sync m16n8k16 holds. The instruction returns before it is done: accumulators
// and A registers may not be touched until wgmma_wait says so, and the compiler does not know.
// Hence wgmma_pin, which ties registers to their place in the program.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashattn_ext::ptx {

// Orders register writes before the wgmma that read them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most kPending of the newest groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// No access to these registers moves across this point.
template <int kTiles>
__device__ __forceinline__ void wgmma_pin(float (&acc)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(acc[j][e])::"memory");
}

template <int kTiles>
__device__ __forceinline__ void wgmma_pin(uint32_t (&fragments)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(fragments[j][e])::"memory");
}

// Descriptor of a tile in shared memory with the 128-byte swizzle, rows of 64 elements. `leading`:
// bytes between 64-column chunks, for operands whose columns are not the depth (0 otherwise).
// Eight rows are 1024 bytes. Tiles are aligned to 1024 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem_addr, uint32_t leading_bytes) {
  constexpr uint64_t kStride8Rows = 1024 >> 4, kSwizzle128 = 1;
  return static_cast<uint64_t>((smem_addr & 0x3ffff) >> 4) |
         (static_cast<uint64_t>(leading_bytes >> 4) << 16) | (kStride8Rows << 32) |
         (kSwizzle128 << 62);
}

// The descriptor of the place `bytes` (a multiple of 16) further on. In 32 bits: no tile crosses
// the end of the address field.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// Operand lists of the instruction: accumulators are %0 ... of acc[j][e], four per 8 columns.
#define FLASHATTN_EXT_ACC(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
#define FLASHATTN_EXT_ACC4(j) \
  FLASHATTN_EXT_ACC(j), FLASHATTN_EXT_ACC(j + 1), FLASHATTN_EXT_ACC(j + 2), FLASHATTN_EXT_ACC(j + 3)
#define FLASHATTN_EXT_ACC8(j) FLASHATTN_EXT_ACC4(j), FLASHATTN_EXT_ACC4(j + 4)
#define FLASHATTN_EXT_REGS_32                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHATTN_EXT_REGS_40 \
  FLASHATTN_EXT_REGS_32       \
  ", "                        \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHATTN_EXT_REGS_48 \
  FLASHATTN_EXT_REGS_40       \
  ", "                        \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHATTN_EXT_REGS_56 \
  FLASHATTN_EXT_REGS_48       \
  ", "                        \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHATTN_EXT_REGS_64                                                        \
  FLASHATTN_EXT_REGS_32                                                              \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHATTN_EXT_REGS_96                                                        \
  FLASHATTN_EXT_REGS_64                                                              \
  ", "                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHATTN_EXT_REGS_128                                                                 \
  FLASHATTN_EXT_REGS_64                                                                        \
  ", "                                                                                         \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111, "                                                                                     \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"

// A from shared memory, with the depth as its columns: descA, descB, accumulate. TRANS_B = 1 when
// the columns of B's rows are N rather than the depth.
#define FLASHATTN_EXT_WGMMA_SS(N, TYPE, TRANS_B, REGS, A, B, P, ...)                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                   \
               ", 0;\n"                                                                  \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS \
               "}, "                                                                     \
               "%" #A ", %" #B ", p, 1, 1, 0, " #TRANS_B ";\n}\n"                        \
               : __VA_ARGS__                                                             \
               : "l"(desc_a), "l"(desc_b), "r"(accumulate))
// A from registers.
#define FLASHATTN_EXT_WGMMA_RS(N, TYPE, TRANS_B, REGS, A0, A1, A2, A3, B, P, ...)               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                          \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS        \
               "}, "                                                                            \
               "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, " #TRANS_B ";\n}\n" \
               : __VA_ARGS__                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(accumulate))

// acc (64, 8 * kTiles) = [acc +] A B^T (kTransB = 0) or A B (kTransB = 1), both by descriptors.
template <typename Element, int kTransB, int kTiles>
__device__ __forceinline__ void wgmma_ss(float (&acc)[kTiles][4], uint64_t desc_a, uint64_t desc_b,
                                         int accumulate);
// The same with A in registers.
template <typename Element, int kTransB, int kTiles>
__device__ __forceinline__ void wgmma_rs(float (&acc)[kTiles][4], const uint32_t (&a)[4],
                                         uint64_t desc_b, int accumulate);

#define FLASHATTN_EXT_WGMMA_ONE(ELEMENT, TYPE, TRANS_B, N, TILES, REGS, R0, R1, R2, R3, R4, R5, \
                                ...)                                                            \
  template <>                                                                                   \
  __device__ __forceinline__ void wgmma_ss<ELEMENT, TRANS_B, TILES>(                            \
      float(&acc)[TILES][4], uint64_t desc_a, uint64_t desc_b, int accumulate) {                \
    FLASHATTN_EXT_WGMMA_SS(N, TYPE, TRANS_B, REGS, R0, R1, R2, __VA_ARGS__);                    \
  }                                                                                             \
  template <>                                                                                   \
  __device__ __forceinline__ void wgmma_rs<ELEMENT, TRANS_B, TILES>(                            \
      float(&acc)[TILES][4], const uint32_t(&a)[4], uint64_t desc_b, int accumulate) {          \
    FLASHATTN_EXT_WGMMA_RS(N, TYPE, TRANS_B, REGS, R0, R1, R2, R3, R4, R5, __VA_ARGS__);        \
  }
#define FLASHATTN_EXT_WGMMA(...)                                 \
  FLASHATTN_EXT_WGMMA_ONE(__nv_bfloat16, "bf16", 0, __VA_ARGS__) \
  FLASHATTN_EXT_WGMMA_ONE(__nv_bfloat16, "bf16", 1, __VA_ARGS__) \
  FLASHATTN_EXT_WGMMA_ONE(__half, "f16", 0, __VA_ARGS__)         \
  FLASHATTN_EXT_WGMMA_ONE(__half, "f16", 1, __VA_ARGS__)

FLASHATTN_EXT_WGMMA(64, 8, FLASHATTN_EXT_REGS_32, 32, 33, 34, 35, 36, 37, FLASHATTN_EXT_ACC8(0))
FLASHATTN_EXT_WGMMA(80, 10, FLASHATTN_EXT_REGS_40, 40, 41, 42, 43, 44, 45, FLASHATTN_EXT_ACC8(0),
                    FLASHATTN_EXT_ACC(8), FLASHATTN_EXT_ACC(9))
FLASHATTN_EXT_WGMMA(96, 12, FLASHATTN_EXT_REGS_48, 48, 49, 50, 51, 52, 53, FLASHATTN_EXT_ACC8(0),
                    FLASHATTN_EXT_ACC4(8))
FLASHATTN_EXT_WGMMA(112, 14, FLASHATTN_EXT_REGS_56, 56, 57, 58, 59, 60, 61, FLASHATTN_EXT_ACC8(0),
                    FLASHATTN_EXT_ACC4(8), FLASHATTN_EXT_ACC(12), FLASHATTN_EXT_ACC(13))
FLASHATTN_EXT_WGMMA(128, 16, FLASHATTN_EXT_REGS_64, 64, 65, 66, 67, 68, 69, FLASHATTN_EXT_ACC8(0),
                    FLASHATTN_EXT_ACC8(8))
FLASHATTN_EXT_WGMMA(192, 24, FLASHATTN_EXT_REGS_96, 96, 97, 98, 99, 100, 101, FLASHATTN_EXT_ACC8(0),
                    FLASHATTN_EXT_ACC8(8), FLASHATTN_EXT_ACC8(16))
FLASHATTN_EXT_WGMMA(256, 32, FLASHATTN_EXT_REGS_128, 128, 129, 130, 131, 132, 133,
                    FLASHATTN_EXT_ACC8(0), FLASHATTN_EXT_ACC8(8), FLASHATTN_EXT_ACC8(16),
                    FLASHATTN_EXT_ACC8(24))

#undef FLASHATTN_EXT_WGMMA
#undef FLASHATTN_EXT_WGMMA_ONE
#undef FLASHATTN_EXT_WGMMA_RS
#undef FLASHATTN_EXT_WGMMA_SS
#undef FLASHATTN_EXT_REGS_128
#undef FLASHATTN_EXT_REGS_96
#undef FLASHATTN_EXT_REGS_64
#undef FLASHATTN_EXT_REGS_56
#undef FLASHATTN_EXT_REGS_48
#undef FLASHATTN_EXT_REGS_40
#undef FLASHATTN_EXT_REGS_32
#undef FLASHATTN_EXT_ACC8
#undef FLASHATTN_EXT_ACC4
#undef FLASHATTN_EXT_ACC

}  // namespace flashattn_ext::ptx
