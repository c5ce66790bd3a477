// Division by a number that is known when the kernel is launched: a multiplication and a shift.
// Plain host and device C++.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHATTN_EXT_HOST_DEVICE __host__ __device__
#else
#define FLASHATTN_EXT_HOST_DEVICE
#endif

namespace flashattn_ext {

// x / divisor for 0 <= x < 2^31: the high half of x * ceil(2^(31 + l) / divisor), shifted by l - 1,
// where l is the least with divisor <= 2^l (Granlund & Montgomery 1994).
struct Divisor {
  int32_t divisor = 1;
  uint32_t multiplier = 0;
  int32_t shift = 0;

  Divisor() = default;
  explicit Divisor(int32_t divisor) : divisor(divisor) {
    if (divisor <= 1) return;  // 2^31 would need another bit
    int32_t log2 = 1;
    while ((int64_t{1} << log2) < divisor) ++log2;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + divisor - 1) / divisor);
    shift = log2 - 1;
  }

  FLASHATTN_EXT_HOST_DEVICE int32_t divide(int32_t x) const {
    if (divisor <= 1) return x;
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(x)) * multiplier;
    return static_cast<int32_t>(static_cast<uint32_t>(product >> 32) >> shift);
  }
};

}  // namespace flashattn_ext
