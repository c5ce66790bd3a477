// mbarrier objects in shared memory: arrivals and bytes of asynchronous copies, waited for by
// phase. PTX ISA, "Parallel Synchronization and Communication: mbarrier" (sm_90+ for the byte
// counts).
//
// A barrier completes a phase when its expected arrivals are there and its expected bytes have
// landed; then the next phase begins. wait(parity) returns once the phase of that parity is over,
// so on a fresh barrier wait(1) returns at once and wait(0) waits for the first completion.
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(bar) : "memory");
}

// One arrival that also announces `bytes` of copies which complete on this barrier.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(bar), "r"(bytes)
               : "memory");
}

// The loop is in the assembly so that the compiler does not take it for a place where lanes part.
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

}  // namespace flashattn_ext::ptx
