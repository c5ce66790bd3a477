// What the tests of tile/ and attention/ share: whole matrices in and out of a warp's registers and
// of a swizzled tile. Written from the documented mappings, not from the code under test.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "tile/swizzle.cuh"

namespace flashattn_ext::testing {

// Accumulator element (m, j, e) of lane 4g+t is row 16m + g + 8*(e >> 1), column 8j + 2t + (e & 1).
template <int kNTiles>
__host__ __device__ inline int fragment_index(int lane, int m, int j, int e) {
  const int g = lane / 4, t = lane % 4;
  return (16 * m + g + (e >= 2 ? 8 : 0)) * 8 * kNTiles + 8 * j + 2 * t + e % 2;
}

// `matrix` is row-major, (16*kMTiles, 8*kNTiles).
template <int kMTiles, int kNTiles>
__device__ inline void read_fragment(float (&acc)[kMTiles][kNTiles][4], const float* matrix) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        acc[m][j][e] = matrix[fragment_index<kNTiles>(threadIdx.x % 32, m, j, e)];
}

template <int kMTiles, int kNTiles>
__device__ inline void write_fragment(const float (&acc)[kMTiles][kNTiles][4], float* matrix) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        matrix[fragment_index<kNTiles>(threadIdx.x % 32, m, j, e)] = acc[m][j][e];
}

// Where element (row, col) of a tile lies, in elements from its base.
template <int kCols>
__host__ __device__ inline int tile_index(int row, int col) {
  return tile::SmemLayout<kCols>::offset_bytes(row, col / 8) / 2 + col % 8;
}

// All threads of the CTA fill `tile` from a row-major (rows, kCols) matrix; the caller
// synchronises.
template <int kCols, typename Element>
__device__ inline void fill_tile(Element* tile, const Element* matrix, int rows) {
  for (int i = threadIdx.x; i < rows * kCols; i += blockDim.x) {
    tile[tile_index<kCols>(i / kCols, i % kCols)] = matrix[i];
  }
}

}  // namespace flashattn_ext::testing
