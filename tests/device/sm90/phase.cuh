// A look at an mbarrier. The kernels only ever wait, so that ptx/ has nothing that returns before a
// phase is over.
#pragma once

#include <cstdint>

namespace flashattn_ext::testing {

// Whether the phase of this parity is over.
__device__ inline bool is_over(uint32_t bar, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}\n"
      : "=r"(over)
      : "r"(bar), "r"(parity)
      : "memory");
  return over != 0;
}

}  // namespace flashattn_ext::testing
