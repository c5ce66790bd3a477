// In the place of csrc/ptx/math.cuh.
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

inline float ex2_approx(float x) { return std::exp2(x); }
inline float lg2_approx(float x) { return std::log2(x); }
inline float rcp_approx(float x) { return 1.0f / x; }

template <typename Element>
uint16_t to_16_bits(float x) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  } else {
    return __half_as_ushort(__float2half_rn(x));
  }
}
template <typename Element>
float from_16_bits(uint32_t bits) {
  const auto low = static_cast<uint16_t>(bits);
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __bfloat162float(__ushort_as_bfloat16(low));
  } else {
    return __half2float(__ushort_as_half(low));
  }
}

template <typename Element>
uint32_t pack_x2(float lo, float hi) {
  return to_16_bits<Element>(lo) | static_cast<uint32_t>(to_16_bits<Element>(hi)) << 16;
}

}  // namespace flashattn_ext::ptx
