// The tensor memory accelerator: copies of boxes of a tensor, by coordinates, with out-of-range
// elements read as zero (sm_90+). The tensor map lies in a __grid_constant__ kernel parameter.
// PTX ISA, "Data Movement: cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashattn_ext::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Starts the copy of one box to shared memory; its bytes complete on `bar`. One thread issues it.
__device__ __forceinline__ void tma_load_4d(uint32_t smem_dst, const CUtensorMap* map, uint32_t bar,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(smem_dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Starts the copy of one box from shared memory; elements outside the tensor are not written. The
// issuing thread's copies form groups: see bulk_commit and bulk_wait_read.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t smem_src, int c0,
                                             int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(
          map),
      "r"(smem_src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Closes the group of this thread's stores so far.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Waits until this thread's groups have read their shared memory, which may then be reused.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}

// Orders this thread's ordinary accesses to shared memory before later ones of the copy engine and
// the tensor cores (the "async proxy").
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace flashattn_ext::ptx
