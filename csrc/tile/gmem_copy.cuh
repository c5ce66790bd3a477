// Copies of (rows, kCols) tiles of 16-bit elements between global and shared memory.
// Rows past `valid_rows` and columns past `valid_cols` read as zero and are never touched in global
// memory. Global strides are in elements.
#pragma once

#include <cstdint>

#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "tile/fragment.cuh"
#include "tile/swizzle.cuh"

namespace flashattn_ext::tile {

constexpr int floor_power_of_two(int x) { return x < 2 ? x : 2 * floor_power_of_two(x / 2); }

// A CTA-wide asynchronous loader. Each thread owns one 16-byte column of the tile and every
// kRowsPerPass-th row; a few threads idle where 16-byte columns do not divide the CTA.
template <int kRows, int kCols, int kNumThreads>
struct TileLoader {
  using Layout = SmemLayout<kCols>;
  static constexpr int kRowsPerPass = floor_power_of_two(kNumThreads / Layout::kPiecesPerRow);
  static_assert(kRowsPerPass >= 1 && kRows % kRowsPerPass == 0);

  int row;      // this thread's first row; past kRowsPerPass for idle threads
  int piece;    // this thread's 16-byte column
  bool in_col;  // column inside the tensor

  __device__ __forceinline__ TileLoader(int thread_idx, int valid_cols)
      : row(thread_idx / Layout::kPiecesPerRow),
        piece(thread_idx % Layout::kPiecesPerRow),
        in_col(piece * 8 < valid_cols) {}

  // Issues the copies of one tile whose first row is at `gmem`; the caller commits the group. Rows
  // before `first_row` read as zero too.
  template <typename Element>
  __device__ __forceinline__ void load(uint32_t smem_tile, const Element* gmem, int64_t row_stride,
                                       int valid_rows, int first_row = 0) const {
    if (row >= kRowsPerPass) return;
    const Element* src = gmem + row * row_stride + piece * 8;
    const int64_t step = kRowsPerPass * row_stride;
#pragma unroll
    for (int i = 0; i < kRows / kRowsPerPass; ++i) {
      const int r = row + i * kRowsPerPass;
      ptx::cp_async_16(smem_tile + Layout::offset_bytes(r, piece), src,
                       in_col && r >= first_row && r < valid_rows);
      src += step;
    }
  }
};

// Writes a warp's accumulator, times a factor per row, to (16*kMTiles, valid_cols) rows of global
// memory through the warp's own rows of a shared tile (at `smem_rows`, first row divisible by 8).
// Only this warp touches those rows, so a warp barrier is enough.
template <typename Element, int kMTiles, int kCols>
__device__ __forceinline__ void store_rows(const float (&acc)[kMTiles][kCols / 8][4],
                                           const float (&factor)[kMTiles][2], uint32_t smem_rows,
                                           Element* gmem, int64_t row_stride, int valid_rows,
                                           int valid_cols, int lane) {
  using Layout = SmemLayout<kCols>;
  __syncwarp();  // every lane is done reading the rows that are reused
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = 16 * m + acc_row(lane, 2 * half);
        const uint32_t packed = ptx::pack_x2<Element>(acc[m][j][2 * half] * factor[m][half],
                                                      acc[m][j][2 * half + 1] * factor[m][half]);
        ptx::st_shared_b32(smem_rows + Layout::offset_bytes(r, j) + 4 * (lane & 3), packed);
      }
  __syncwarp();  // the rows are complete before other lanes read them
  constexpr int kPieces = Layout::kPiecesPerRow;
#pragma unroll 4
  for (int i = lane; i < 16 * kMTiles * kPieces; i += 32) {
    const int r = i / kPieces, piece = i % kPieces;
    if (r < valid_rows && piece * 8 < valid_cols) {
      const float4 x = ptx::ld_shared_v4(smem_rows + Layout::offset_bytes(r, piece));
      *reinterpret_cast<float4*>(gmem + r * row_stride + piece * 8) = x;
    }
  }
}

// The same with one factor for all rows.
template <typename Element, int kMTiles, int kCols>
__device__ __forceinline__ void store_rows(const float (&acc)[kMTiles][kCols / 8][4], float factor,
                                           uint32_t smem_rows, Element* gmem, int64_t row_stride,
                                           int valid_rows, int valid_cols, int lane) {
  float factors[kMTiles][2];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) factors[m][0] = factors[m][1] = factor;
  store_rows<Element, kMTiles, kCols>(acc, factors, smem_rows, gmem, row_stride, valid_rows,
                                      valid_cols, lane);
}

}  // namespace flashattn_ext::tile
