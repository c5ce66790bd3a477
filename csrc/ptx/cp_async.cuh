// cp.async: 16- and 4-byte copies from global to shared memory that bypass registers (sm_80+).
// PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

// Copies 16 bytes, or writes 16 zero bytes when `valid` is false (the source is then not read).
// Cached in L2 only (.cg); both addresses are 16-byte aligned.
__device__ __forceinline__ void cp_async_16(uint32_t smem_dst, const void* gmem_src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(smem_dst),
               "l"(gmem_src), "r"(valid ? 16 : 0)
               : "memory");
}

// Copies 4 bytes, or writes 4 zero bytes when `valid` is false.
__device__ __forceinline__ void cp_async_4(uint32_t smem_dst, const void* gmem_src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(smem_dst), "l"(gmem_src),
               "r"(valid ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most kPending of this thread's newest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace flashattn_ext::ptx
