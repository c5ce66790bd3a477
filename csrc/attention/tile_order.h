// In which order the CTAs of a launch take the blocks of a problem. Plain host and device C++.
//
// The grid is one-dimensional (batch * heads may pass 65,535). Heads run in groups small enough
// that what their CTAs read again and again stays in L2; inside a group the head index is fastest,
// and blocks run from the most to the least work, so that a causal launch ends on short CTAs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/divisor.h"
#include "attention/params.h"

namespace flashattn_ext {

// Bytes of shared operands that a group of heads may occupy: well inside the 40-60 MB L2 of
// sm_80 and sm_90.
inline constexpr int64_t kL2GroupBytes = 16 << 20;

struct TileOrder {
  int32_t num_blocks = 0;                     // blocks per head
  int32_t num_heads = 0;                      // heads over the whole batch
  int32_t heads_per_group = 1;                // multiple of the heads that share operands
  bool descending = false;                    // most work at the highest block index
  Divisor by_tiles, by_heads, by_last_heads;  // of a group; heads of the last, which may have fewer

  struct Tile {
    int32_t block, head;  // head counts over batch * heads
  };

  // Below num_tiles(), which the plan keeps within 32 bits.
  FLASHATTN_EXT_HOST_DEVICE Tile tile(int32_t cta) const {
    const int32_t group = by_tiles.divide(cta);
    const int32_t in_group = cta - group * by_tiles.divisor;
    const int32_t first_head = group * heads_per_group;
    const Divisor& heads = num_heads - first_head < heads_per_group ? by_last_heads : by_heads;
    const int32_t rank = heads.divide(in_group);
    return {descending ? num_blocks - 1 - rank : rank,
            first_head + in_group - rank * heads.divisor};
  }

  FLASHATTN_EXT_HOST_DEVICE int64_t num_tiles() const {
    return static_cast<int64_t>(num_blocks) * num_heads;
  }
};

// `bytes_per_unit`: operand bytes shared by each `heads_per_unit` consecutive heads.
inline TileOrder make_tile_order(int32_t num_blocks, int32_t num_heads, int32_t heads_per_unit,
                                 int64_t bytes_per_unit, bool descending) {
  TileOrder order;
  order.num_blocks = num_blocks;
  order.num_heads = num_heads;
  order.descending = descending;
  const int64_t all_units = (num_heads + heads_per_unit - 1) / heads_per_unit;
  int64_t units = bytes_per_unit > 0 ? kL2GroupBytes / bytes_per_unit : all_units;
  units = units < 1 ? 1 : (units > all_units ? all_units : units);
  // Groups of one size where that costs at most half: the long blocks of a last group of few heads
  // would start when nothing is left to fill the other SMs beside them.
  for (int64_t even = units; 2 * even > units; --even) {
    if (all_units % even == 0) {
      units = even;
      break;
    }
  }
  order.heads_per_group = static_cast<int32_t>(units) * heads_per_unit;
  order.by_tiles = Divisor(order.heads_per_group * num_blocks);
  order.by_heads = Divisor(order.heads_per_group);
  order.by_last_heads = Divisor((num_heads - 1) % order.heads_per_group + 1);
  return order;
}

// The order of a launch over query blocks. The query heads of a group share K and V, and a causal
// problem has the most keys at the last queries: descending is longest first. Blocks of equal work
// need no such order: there a group is the heads that share K and V, so that what they read comes
// from memory bit by bit and not all in one wave.
inline TileOrder make_query_tile_order(const FwdParams& p, int32_t block_m) {
  const int64_t kv_bytes = 2LL * p.seqlen_k * (p.head_dim + p.head_dim_v);
  const bool descending = p.window_right < kUnlimited;
  return make_tile_order((p.seqlen_q + block_m - 1) / block_m, p.batch * p.num_heads_q,
                         p.num_heads_q / p.num_heads_k, descending ? kv_bytes : kL2GroupBytes,
                         descending);
}

// The order of a launch over key blocks, each of all query heads that share it. A causal problem
// has the most queries at the first keys: ascending is longest first. CTAs of a head share the rows
// of the query head that they are at, with a window those around their keys. `more_bytes`: of such
// a row, beside Q and dO.
inline TileOrder make_key_tile_order(const FwdParams& p, int32_t block_n, int64_t more_bytes = 0) {
  const int64_t row_bytes = 2LL * (p.head_dim + p.head_dim_v) + more_bytes;
  const int64_t rows =
      std::min<int64_t>(p.seqlen_q, int64_t{p.window_left} + p.window_right + 2 * block_n);
  return make_tile_order((p.seqlen_k + block_n - 1) / block_n, p.batch * p.num_heads_k, 1,
                         row_bytes * rows, false);
}

}  // namespace flashattn_ext
