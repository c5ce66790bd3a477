// The buffer in which the fused backward kernel sums dQ: fp32, in the order in which accumulators
// hold it, so that a lane adds 16 bytes and a warp whole lines. Plain host and device C++.
//
// A query block of Br rows is Br * bucket / 4096 pieces of 64 rows and 64 columns. A piece is eight
// groups of eight columns; a group is a float4 per thread of a warpgroup, what wgmma leaves it of
// these columns. (query head, block, piece) are contiguous, blocks being those of all sequences:
// a packed one begins at block start / Br + index, which leaves room for the last, partial block of
// every sequence.
#pragma once

#include <cstdint>

#include "attention/divisor.h"

namespace flashattn_ext::sm90 {

struct BwdDqBuffer {
  static constexpr int32_t kPieceFloats = 64 * 64;

  int64_t blocks;  // of a query head
  int32_t block_floats;

  BwdDqBuffer(bool varlen, int64_t batch, int64_t seqlen_q, int64_t total_q, int32_t block_m,
              int32_t bucket)
      : blocks(varlen ? total_q / block_m + batch : batch * ((seqlen_q + block_m - 1) / block_m)),
        block_floats(block_m * bucket) {}

  int64_t bytes(int64_t num_heads_q) const { return 4 * num_heads_q * blocks * block_floats; }
  // A counter of tiles, and in order one for each block; a multiple of 16.
  int64_t counter_bytes(int64_t num_heads_q, bool in_order) const {
    return (4 + (in_order ? 4 * num_heads_q * blocks : 0) + 15) / 16 * 16;
  }

  // The first block of a sequence, among those of a head.
  FLASHATTN_EXT_HOST_DEVICE static int64_t first_block(bool varlen, int32_t batch_idx,
                                                       int64_t start, int32_t seqlen_q,
                                                       int32_t block_m) {
    return varlen ? start / block_m + batch_idx
                  : static_cast<int64_t>(batch_idx) * ((seqlen_q + block_m - 1) / block_m);
  }
};

}  // namespace flashattn_ext::sm90
