// Tile products of one warp with mma.sync. The warp owns 16 * kMTiles rows of the result.
#pragma once

#include <cstdint>

#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "tile/fragment.cuh"

namespace flashattn_ext::tile {

// B fragments are loaded this many steps (of 16 columns) before their products: enough to cover the
// latency of ldmatrix behind four mma, few enough registers to keep two row tiles in flight.
inline constexpr int kPrefetch = 2;

// acc (16*kMTiles, 8*kNTiles) += X (16*kMTiles, kDepth) * Y (8*kNTiles, kDepth)^T.
// `x` is a rows_first view at the warp's first row, `y` a cols_first view.
template <typename Element, int kMTiles, int kNTiles, int kDepth>
__device__ __forceinline__ void gemm_xyt(float (&acc)[kMTiles][kNTiles][4],
                                         const Operand<kDepth>& x, const Operand<kDepth>& y) {
  static_assert(kNTiles % 2 == 0, "one ldmatrix.x4 feeds two 8-column tiles");
  constexpr int kPairs = kNTiles / 2, kTotal = kDepth / 16 * kPairs;
  uint32_t a[2][kMTiles][4], b[kPrefetch + 1][4];
  const auto load_a = [&](int kk) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) ptx::ldmatrix_x4(a[kk & 1][m], x.at(16 * m, kk));
  };
  const auto load_b = [&](int step) {
    ptx::ldmatrix_x4(b[step % (kPrefetch + 1)], y.at(16 * (step % kPairs), step / kPairs));
  };
  load_a(0);
#pragma unroll
  for (int step = 0; step < kPrefetch && step < kTotal; ++step) load_b(step);
#pragma unroll
  for (int step = 0; step < kTotal; ++step) {
    const int kk = step / kPairs, j = step % kPairs;
    if (step + kPrefetch < kTotal) load_b(step + kPrefetch);
    if (j == (kPairs > 1 ? 1 : 0) && kk + 1 < kDepth / 16) load_a(kk + 1);
    const uint32_t(&bs)[4] = b[step % (kPrefetch + 1)];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      ptx::mma_m16n8k16<Element>(acc[m][2 * j], a[kk & 1][m], bs[0], bs[1]);
      ptx::mma_m16n8k16<Element>(acc[m][2 * j + 1], a[kk & 1][m], bs[2], bs[3]);
    }
  }
}

// acc (16*kMTiles, kCols) += W (16*kMTiles, 16*kSteps) * Z (16*kSteps, kCols); `z` is a rows_first
// view, and `fragments(a, kk)` gives the A fragments of W's columns from 16*kk.
template <typename Element, int kSteps, int kMTiles, int kCols, typename Fragments>
__device__ __forceinline__ void gemm_fragments_z(float (&acc)[kMTiles][kCols / 8][4],
                                                 const Fragments& fragments,
                                                 const Operand<kCols>& z) {
  constexpr int kPairs = kCols / 16, kTotal = kSteps * kPairs;
  uint32_t a[kMTiles][4], b[kPrefetch + 1][4];
  const auto load_b = [&](int step) {
    ptx::ldmatrix_x4_trans(b[step % (kPrefetch + 1)], z.at(16 * (step / kPairs), step % kPairs));
  };
#pragma unroll
  for (int step = 0; step < kPrefetch && step < kTotal; ++step) load_b(step);
#pragma unroll
  for (int step = 0; step < kTotal; ++step) {
    const int kk = step / kPairs, j = step % kPairs;
    if (j == 0) fragments(a, kk);
    if (step + kPrefetch < kTotal) load_b(step + kPrefetch);
    const uint32_t(&bs)[4] = b[step % (kPrefetch + 1)];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      ptx::mma_m16n8k16<Element>(acc[m][2 * j], a[m], bs[0], bs[1]);
      ptx::mma_m16n8k16<Element>(acc[m][2 * j + 1], a[m], bs[2], bs[3]);
    }
  }
}

// The same with W packed before.
template <typename Element, int kMTiles, int kSteps, int kCols>
__device__ __forceinline__ void gemm_wz(float (&acc)[kMTiles][kCols / 8][4],
                                        const uint32_t (&w)[kMTiles][kSteps][4],
                                        const Operand<kCols>& z) {
  const auto fragments = [&](uint32_t(&a)[kMTiles][4], int kk) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][i] = w[m][kk][i];
  };
  gemm_fragments_z<Element, kSteps>(acc, fragments, z);
}

// The same with W an accumulator (16*kMTiles, 8*kKTiles), rounded to Element step by step: the
// fragments of one step are all that is live beside it.
template <typename Element, int kMTiles, int kKTiles, int kCols>
__device__ __forceinline__ void gemm_wz(float (&acc)[kMTiles][kCols / 8][4],
                                        const float (&w)[kMTiles][kKTiles][4],
                                        const Operand<kCols>& z) {
  static_assert(kKTiles % 2 == 0, "one A fragment covers two 8-column tiles of W");
  const auto fragments = [&](uint32_t(&a)[kMTiles][4], int kk) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) pack_a_fragment<Element>(a[m], w[m], kk);
  };
  gemm_fragments_z<Element, kKTiles / 2>(acc, fragments, z);
}

}  // namespace flashattn_ext::tile
