// Special-function and packed-conversion instructions.
// PTX ISA, "Floating Point Instructions: ex2, lg2, rcp" and "Data Movement: cvt".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashattn_ext::ptx {

// 2^x; relative error about 2^-22; 2^-inf = 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// log2(x); absolute error about 2^-22 between 1/2 and 2, relative beyond.
__device__ __forceinline__ float lg2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// 1/x; relative error about 2^-23; 1/inf = 0.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Rounds to nearest even and packs: `lo` in bits 0-15, `hi` in bits 16-31.
template <typename Element>
__device__ __forceinline__ uint32_t pack_x2(float lo, float hi);

template <>
__device__ __forceinline__ uint32_t pack_x2<__nv_bfloat16>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

template <>
__device__ __forceinline__ uint32_t pack_x2<__half>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

}  // namespace flashattn_ext::ptx
