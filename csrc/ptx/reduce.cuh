// Additions in global memory that return nothing, and the flags that put them in order.
// PTX ISA, "Parallel Synchronization and Communication: red"; the 16-byte form needs sm_90.
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

// *dst += x, each of the four on its own; dst is 16-byte aligned.
__device__ __forceinline__ void red_add_v4(float* dst, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(dst), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// The same, or with `store` *dst = x: no branch, which products in flight would not outlive.
__device__ __forceinline__ void store_or_add_v4(float* dst, const float (&x)[4], bool store) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "@!p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(dst),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<uint32_t>(store))
      : "memory");
}

// *dst = x; who sees x in wait_for_count sees everything this thread did, or knew of, before.
__device__ __forceinline__ void st_release(uint32_t* dst, uint32_t x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;\n" ::"l"(dst), "r"(x) : "memory");
}

// Waits until *count is at least `wanted`. The loop is in the assembly so that the compiler does
// not take it for a place where lanes part.
__device__ __forceinline__ void wait_for_count(const uint32_t* count, uint32_t wanted) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 x;\n"
      "again:\n"
      "ld.acquire.gpu.global.u32 x, [%0];\n"
      "setp.lt.u32 p, x, %1;\n"
      "@p bra again;\n}\n" ::"l"(count),
      "r"(wanted)
      : "memory");
}

}  // namespace flashattn_ext::ptx
