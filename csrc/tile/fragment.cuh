// How a warp's registers hold 16-row tiles, and where each lane reads its fragments.
//
// Accumulators: acc[m][j][e] of lane 4g+t is row 16m + g + 8*(e >> 1), column 8j + 2t + (e & 1).
// Packing an accumulator in order gives the A fragments of the next product in order, so P and dS
// go from one product to the next without leaving registers.
#pragma once

#include <cstdint>

#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "tile/swizzle.cuh"

namespace flashattn_ext::tile {

// Row (0..15) of accumulator element e, and its column within the 8-column tile, for `lane`.
__device__ __forceinline__ int acc_row(int lane, int e) { return (lane >> 2) + 8 * (e >> 1); }
__device__ __forceinline__ int acc_col(int lane, int e) { return 2 * (lane & 3) + (e & 1); }

// One lane's view of a swizzled tile, for 16x16 blocks of it that start at rows divisible by 8 and
// columns divisible by 16. All address arithmetic that depends on the lane is done once, here;
// `at` adds compile-time constants (an XOR within the swizzle group and an offset).
template <int kCols>
struct Operand {
  using Layout = SmemLayout<kCols>;
  uint32_t lane_addr;

  // Blocks read as (row, k): the A operand, and with ldmatrix.trans the B operand of P * V.
  __device__ __forceinline__ static Operand rows_first(uint32_t tile_addr, int lane) {
    return {tile_addr + Layout::offset_bytes(lane & 15, lane >> 4)};
  }

  // Blocks read as (n, k): the B operand of X * Y^T.
  __device__ __forceinline__ static Operand cols_first(uint32_t tile_addr, int lane) {
    return {tile_addr + Layout::offset_bytes((lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1)};
  }

  // Address of this lane's 16 bytes of the block at (row, 16 * col16).
  __device__ __forceinline__ uint32_t at(int row, int col16) const {
    constexpr int kGroup = Layout::kGroup;
    const int piece = 2 * col16;
    return (lane_addr ^ ((piece & (kGroup - 1)) << 4)) + (piece / kGroup) * (kGroup * 16) +
           row * Layout::kPitchBytes;
  }
};

// A fragment (16 x 16) from accumulator tiles 2*kk and 2*kk + 1.
template <typename Element, int kNTiles>
__device__ __forceinline__ void pack_a_fragment(uint32_t (&a)[4], const float (&acc)[kNTiles][4],
                                                int kk) {
  a[0] = ptx::pack_x2<Element>(acc[2 * kk][0], acc[2 * kk][1]);
  a[1] = ptx::pack_x2<Element>(acc[2 * kk][2], acc[2 * kk][3]);
  a[2] = ptx::pack_x2<Element>(acc[2 * kk + 1][0], acc[2 * kk + 1][1]);
  a[3] = ptx::pack_x2<Element>(acc[2 * kk + 1][2], acc[2 * kk + 1][3]);
}

// Four lanes that share rows exchange words: x[j] of lane t becomes x[t] of lane j. Of packed
// accumulator tiles j = 0 ... 3, whose rows are spread over the four lanes, lane t then has the
// eight columns of tile t.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x[j] : x[j + 1], 1);
    (odd ? x[j] : x[j + 1]) = other;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? x[j] : x[j + 2], 2);
    (high ? x[j] : x[j + 2]) = other;
  }
}

// acc = f(acc), element by element.
template <int kMTiles, int kNTiles, typename Function>
__device__ __forceinline__ void transform(float (&acc)[kMTiles][kNTiles][4], const Function& f) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][j][e] = f(acc[m][j][e]);
}

template <int kMTiles, int kNTiles>
__device__ __forceinline__ void clear(float (&acc)[kMTiles][kNTiles][4]) {
  transform(acc, [](float) { return 0.0f; });
}

// The same for one 16-row tile.
template <int kNTiles>
__device__ __forceinline__ void clear(float (&acc)[kNTiles][4]) {
#pragma unroll
  for (int j = 0; j < kNTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[j][e] = 0.0f;
}

}  // namespace flashattn_ext::tile
