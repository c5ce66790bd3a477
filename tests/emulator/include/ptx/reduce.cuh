// In the place of csrc/ptx/reduce.cuh.
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

inline void red_add_v4(float* dst, const float (&x)[4]) {
  for (int e = 0; e < 4; ++e) dst[e] += x[e];
}
inline void store_or_add_v4(float* dst, const float (&x)[4], bool store) {
  for (int e = 0; e < 4; ++e) dst[e] = (store ? 0.0f : dst[e]) + x[e];
}
inline void st_release(uint32_t* dst, uint32_t x) {
  *dst = x;
  emulator::got_on();
}
inline void wait_for_count(const uint32_t* count, uint32_t wanted) {
  emulator::wait_until([&] { return *count >= wanted; });
}

}  // namespace flashattn_ext::ptx
