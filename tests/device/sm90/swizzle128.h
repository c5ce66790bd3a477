// Where the tests expect the elements of a tile in shared memory, written from the documented
// layout: chunks of 64 columns one after the other, rows of 128 bytes, and within a row the 16-byte
// piece p at position p ^ (row & 7).
#pragma once

namespace flashattn_ext::testing {

inline constexpr int kChunkCols = 64;

// Index of element (row, col) of a tile of `rows` rows, in 16-bit elements from its base, which is
// aligned to 1024 bytes.
__host__ __device__ inline int chunked_index(int row, int col, int rows) {
  const int chunk = col / kChunkCols, piece = col % kChunkCols / 8;
  return (chunk * rows + row) * kChunkCols + (piece ^ (row & 7)) * 8 + col % 8;
}

inline constexpr int chunked_size(int rows, int cols) {
  return (cols + kChunkCols - 1) / kChunkCols * rows * kChunkCols;
}

}  // namespace flashattn_ext::testing
