// Tiles in shared memory as the copy engine writes them with the 128-byte swizzle: chunks of 64
// columns (128 bytes a row), chunk after chunk; and the products of wgmma on them.
#pragma once

#include <cstdint>

#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace flashattn_ext::sm90 {

__host__ __device__ constexpr uint32_t chunk_bytes(int rows) { return 128 * rows; }

// Byte offset of columns [16 kk, 16 kk + 16).
__host__ __device__ constexpr uint32_t column_step(int kk, uint32_t bytes_per_chunk) {
  return (kk / 4) * bytes_per_chunk + (kk % 4) * 32;
}

// Starts acc = X Y^T over kDepth columns, X 64 rows of a tile and Y a tile of 8 * kTiles rows, each
// given by address and bytes per chunk.
template <typename Element, int kDepth, int kTiles>
__device__ __forceinline__ void start_xyt(float (&acc)[kTiles][4], uint32_t sX, uint32_t x_chunk,
                                          uint32_t sY, uint32_t y_chunk) {
  const uint64_t desc_x = ptx::wgmma_descriptor(sX, 0), desc_y = ptx::wgmma_descriptor(sY, 0);
  ptx::wgmma_pin(acc);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kDepth / 16; ++kk) {
    ptx::wgmma_ss<Element, 0>(acc, ptx::wgmma_advance(desc_x, column_step(kk, x_chunk)),
                              ptx::wgmma_advance(desc_y, column_step(kk, y_chunk)), kk != 0);
  }
  ptx::wgmma_commit();
}

// Starts acc += W Z, W (64, 16 * kSteps) as A fragments in registers and Z a tile of 16 * kSteps
// rows, whose columns are those of acc.
template <typename Element, int kSteps, int kTiles>
__device__ __forceinline__ void start_wz(float (&acc)[kTiles][4], uint32_t (&w)[kSteps][4],
                                         uint32_t sZ, uint32_t z_chunk) {
  const uint64_t desc_z = ptx::wgmma_descriptor(sZ, z_chunk);
  ptx::wgmma_pin(acc);
  ptx::wgmma_pin(w);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
    ptx::wgmma_rs<Element, 1>(acc, w[kk], ptx::wgmma_advance(desc_z, kk * chunk_bytes(16)), 1);
  }
  ptx::wgmma_commit();
}

// Starts acc = X Z, X 64 rows of a tile of 16 * kSteps columns and Z as many rows of 64 columns,
// which are those of acc. Every 64 rows of Z lie `z_group` bytes further on.
template <typename Element, int kSteps>
__device__ __forceinline__ void start_xz(float (&acc)[8][4], uint32_t sX, uint32_t x_chunk,
                                         uint32_t sZ, uint32_t z_group) {
  const uint64_t desc_x = ptx::wgmma_descriptor(sX, 0), desc_z = ptx::wgmma_descriptor(sZ, 0);
  ptx::wgmma_pin(acc);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
    const uint32_t z_step = kk / 4 * z_group + kk % 4 * chunk_bytes(16);
    ptx::wgmma_ss<Element, 1>(acc, ptx::wgmma_advance(desc_x, column_step(kk, x_chunk)),
                              ptx::wgmma_advance(desc_z, z_step), kk != 0);
  }
  ptx::wgmma_commit();
}

// Rows [begin, end) of a tile become zero: thread `thread_idx` of `num_threads` does its part, and
// makes it visible to the tensor cores. The threads meet before any of them multiplies.
template <int kChunks>
__device__ __forceinline__ void zero_rows(uint32_t tile, uint32_t bytes_per_chunk, int begin,
                                          int end, int thread_idx, int num_threads) {
  // A row of a chunk is eight 16-byte pieces; their order within the row does not matter here.
  for (int i = 8 * begin + thread_idx; i < 8 * end; i += num_threads) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::st_shared_v4(tile + c * bytes_per_chunk + 16 * i, make_float4(0, 0, 0, 0));
    }
  }
  ptx::fence_proxy_async();  // the tensor cores read these rows next
}

}  // namespace flashattn_ext::sm90
