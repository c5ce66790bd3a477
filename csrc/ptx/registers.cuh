// Register allocation hints: empty asm statements that emit no instruction.
#pragma once

namespace flashattn_ext::ptx {

// Returns `x` as a value of unknown origin. What a loop derives from it is computed again in every
// iteration instead of being hoisted into registers that live across the whole loop (and spill).
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flashattn_ext::ptx
