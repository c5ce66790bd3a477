// Eight 16-bit elements as one 16-byte access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flashattn_ext::smxx {

template <typename Element>
struct Vector8 {
  union {
    uint4 bits;
    Element elements[8];
  };

  __device__ __forceinline__ Vector8() : bits{0, 0, 0, 0} {}
  __device__ __forceinline__ explicit Vector8(const Element* ptr)
      : bits(*reinterpret_cast<const uint4*>(ptr)) {}
  __device__ __forceinline__ void store(Element* ptr) const {
    *reinterpret_cast<uint4*>(ptr) = bits;
  }
  __device__ __forceinline__ float operator[](int i) const {
    return static_cast<float>(elements[i]);
  }
  __device__ __forceinline__ void set(int i, float x) { elements[i] = static_cast<Element>(x); }
};

}  // namespace flashattn_ext::smxx
