// Plain shared-memory accesses by 32-bit shared-window address.
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

__device__ __forceinline__ void st_shared_v4(uint32_t addr, int4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(addr), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ int4 ld_shared_v4_b32(uint32_t addr) {
  int4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(addr)
               : "memory");
  return x;
}

// The same bits as floats.
__device__ __forceinline__ void st_shared_v4(uint32_t addr, float4 x) {
  st_shared_v4(addr, make_int4(__float_as_int(x.x), __float_as_int(x.y), __float_as_int(x.z),
                               __float_as_int(x.w)));
}

__device__ __forceinline__ float4 ld_shared_v4(uint32_t addr) {
  const int4 x = ld_shared_v4_b32(addr);
  return make_float4(__int_as_float(x.x), __int_as_float(x.y), __int_as_float(x.z),
                     __int_as_float(x.w));
}

__device__ __forceinline__ float2 ld_shared_v2(uint32_t addr) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(addr) : "memory");
  return x;
}

__device__ __forceinline__ void st_shared_b32(uint32_t addr, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(addr), "r"(x) : "memory");
}

__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t addr) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(addr) : "memory");
  return x;
}

}  // namespace flashattn_ext::ptx
