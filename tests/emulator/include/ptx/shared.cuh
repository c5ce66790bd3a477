// In the place of csrc/ptx/shared.cuh.
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

inline uint32_t smem_address(const void* pointer) { return emulator::shared_address(pointer); }

template <typename T>
T load_shared(uint32_t address) {
  T x;
  std::memcpy(&x, emulator::shared(address, sizeof(T)), sizeof(T));
  return x;
}
template <typename T>
void store_shared(uint32_t address, const T& x) {
  std::memcpy(emulator::shared(address, sizeof(T)), &x, sizeof(T));
}

inline int4 ld_shared_v4_b32(uint32_t address) { return load_shared<int4>(address); }
inline float4 ld_shared_v4(uint32_t address) { return load_shared<float4>(address); }
inline float2 ld_shared_v2(uint32_t address) { return load_shared<float2>(address); }
inline uint32_t ld_shared_b32(uint32_t address) { return load_shared<uint32_t>(address); }
inline void st_shared_v4(uint32_t address, int4 x) { store_shared(address, x); }
inline void st_shared_v4(uint32_t address, float4 x) { store_shared(address, x); }
inline void st_shared_b32(uint32_t address, uint32_t x) { store_shared(address, x); }

}  // namespace flashattn_ext::ptx
