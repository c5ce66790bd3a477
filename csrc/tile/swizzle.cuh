// Layout of a row-major tile of 16-bit elements in shared memory.
//
// A row is kCols elements (kCols / 8 pieces of 16 bytes). Piece p of row r is stored at piece
// p XOR f(r), so that the eight rows an 8x8 matrix load touches at one piece fall into eight
// different groups of four banks, for loads with and without transposition and for 16-byte copies:
//   kCols % 64 == 0 (pitch a multiple of 128 bytes): f(r) = r & 7
//   kCols % 64 == 32 (pitch 64 or 192 bytes; odd rows already sit half a line further):
//                                                    f(r) = (r >> 1) & 3
#pragma once

#include <cstdint>

namespace flashattn_ext::tile {

template <int kCols>
struct SmemLayout {
  static_assert(kCols % 32 == 0, "a row is a whole number of 64-byte groups");

  static constexpr int kPitchBytes = kCols * 2;
  static constexpr int kPiecesPerRow = kCols / 8;
  // Pieces permute within aligned groups of this many.
  static constexpr int kGroup = kCols % 64 == 0 ? 8 : 4;

  __host__ __device__ static constexpr int row_xor(int row) {
    return kGroup == 8 ? (row & 7) : ((row >> 1) & 3);
  }

  // Byte offset of piece `piece` of row `row` from the tile's base.
  __host__ __device__ static constexpr uint32_t offset_bytes(int row, int piece) {
    return static_cast<uint32_t>(row * kPitchBytes + ((piece ^ row_xor(row)) << 4));
  }

  __host__ __device__ static constexpr uint32_t tile_bytes(int rows) { return rows * kPitchBytes; }
};

}  // namespace flashattn_ext::tile
