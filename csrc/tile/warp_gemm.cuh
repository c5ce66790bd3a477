// Tile products of one warp with mma.sync. The warp owns 16 * kMTiles rows of the result.
#pragma once

#include <cstdint>

#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "tile/fragment.cuh"

namespace flashattn_ext::tile {

// acc (16*kMTiles, 8*kNTiles) += X (16*kMTiles, kDepth) * Y (8*kNTiles, kDepth)^T.
// `x` is a rows_first view at the warp's first row, `y` a cols_first view.
template <typename Element, int kMTiles, int kNTiles, int kDepth>
__device__ __forceinline__ void gemm_xyt(float (&acc)[kMTiles][kNTiles][4],
                                         const Operand<kDepth>& x, const Operand<kDepth>& y) {
  static_assert(kNTiles % 2 == 0, "one ldmatrix.x4 feeds two 8-column tiles");
#pragma unroll
  for (int kk = 0; kk < kDepth / 16; ++kk) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) ptx::ldmatrix_x4(a[m], x.at(16 * m, kk));
#pragma unroll
    for (int j = 0; j < kNTiles / 2; ++j) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, y.at(16 * j, kk));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<Element>(acc[m][2 * j], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(acc[m][2 * j + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// acc (16*kMTiles, kCols) += W (16*kMTiles, 16*kSteps) * Z (16*kSteps, kCols), W as A fragments;
// `z` is a rows_first view.
template <typename Element, int kMTiles, int kSteps, int kCols>
__device__ __forceinline__ void gemm_wz(float (&acc)[kMTiles][kCols / 8][4],
                                        const uint32_t (&w)[kMTiles][kSteps][4],
                                        const Operand<kCols>& z) {
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk)
#pragma unroll
    for (int j = 0; j < kCols / 16; ++j) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, z.at(16 * kk, j));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<Element>(acc[m][2 * j], w[m][kk], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(acc[m][2 * j + 1], w[m][kk], b[2], b[3]);
      }
    }
}

// The same with W an accumulator (16*kMTiles, 8*kKTiles), rounded to Element step by step: the
// fragments of one step are all that is live beside it.
template <typename Element, int kMTiles, int kKTiles, int kCols>
__device__ __forceinline__ void gemm_wz(float (&acc)[kMTiles][kCols / 8][4],
                                        const float (&w)[kMTiles][kKTiles][4],
                                        const Operand<kCols>& z) {
  static_assert(kKTiles % 2 == 0, "one A fragment covers two 8-column tiles of W");
#pragma unroll
  for (int kk = 0; kk < kKTiles / 2; ++kk) {
    uint32_t step[kMTiles][1][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) pack_a_fragment<Element>(step[m][0], w[m], kk);
    gemm_wz<Element>(acc, step, z.advance_rows(16 * kk));
  }
}

}  // namespace flashattn_ext::tile
