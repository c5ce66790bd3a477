// In the place of csrc/ptx/tma.cuh; a tensor map holds what it was made of (tensor_map.cpp).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashattn_ext::ptx {

inline void prefetch_tensor_map(const CUtensorMap*) {}
inline void tma_load_4d(uint32_t smem_dst, const CUtensorMap* map, uint32_t bar, int c0, int c1,
                        int c2, int c3) {
  emulator::load_box(smem_dst, map, bar, c0, c1, c2, c3);
}
inline void tma_store_4d(const CUtensorMap* map, uint32_t smem_src, int c0, int c1, int c2,
                         int c3) {
  emulator::store_box(map, smem_src, c0, c1, c2, c3);
}
inline void bulk_commit() {}
inline void bulk_wait_read() {}
inline void fence_proxy_async() {}

}  // namespace flashattn_ext::ptx
