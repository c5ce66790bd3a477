// Register allocation: hints to the compiler, and moving registers between warpgroups (sm_90a).
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

// Returns `x` as a value of unknown origin. What is derived from it is computed there, instead of
// being kept in registers (and spilled) because it was, or will be, computed elsewhere as well.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// Returns `x`, of which all lanes of the warp have the same, as a value of which the compiler knows
// that. Descriptors and addresses made from it stay in uniform registers.
template <typename Int>
__device__ __forceinline__ Int uniform(Int x) {
  return static_cast<Int>(__reduce_or_sync(0xffffffffu, static_cast<uint32_t>(x)));
}

// Gives up or takes registers so that each thread of the warpgroup has kCount of them (a multiple
// of 8). Every warp of the warpgroup executes it. PTX ISA, "setmaxnreg".
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

}  // namespace flashattn_ext::ptx
