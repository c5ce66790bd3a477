// Named CTA barriers: barrier 0 is __syncthreads(); 1-15 are free.
// PTX ISA, "Parallel Synchronization and Communication: barrier.cta".
#pragma once

namespace flashattn_ext::ptx {

// Waits until `num_threads` threads have come to barrier `id`.
__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
  asm volatile("barrier.cta.sync %0, %1;\n" ::"r"(id), "r"(num_threads) : "memory");
}

// Counts towards the barrier without waiting for it.
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
  asm volatile("barrier.cta.arrive %0, %1;\n" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace flashattn_ext::ptx
