// In which order the CTAs of a launch take the blocks of a problem. Plain host and device C++.
//
// The grid is one-dimensional (batch * heads may pass 65,535). Heads run in groups small enough
// that what their CTAs read again and again stays in L2; inside a group the head index is fastest,
// and blocks run from the most to the least work, so that a causal launch ends on short CTAs.
#pragma once

#include <cstdint>

#include "attention/params.h"

#ifdef __CUDACC__
#define FLASHATTN_EXT_HOST_DEVICE __host__ __device__
#else
#define FLASHATTN_EXT_HOST_DEVICE
#endif

namespace flashattn_ext {

// Bytes of shared operands that a group of heads may occupy: well inside the 40-60 MB L2 of
// sm_80 and sm_90.
inline constexpr int64_t kL2GroupBytes = 24 << 20;

struct TileOrder {
  int32_t num_blocks = 0;       // blocks per head
  int32_t num_heads = 0;        // heads over the whole batch
  int32_t heads_per_group = 1;  // multiple of the heads that share operands
  bool descending = false;      // most work at the highest block index

  struct Tile {
    int32_t block, head;  // head counts over batch * heads
  };

  FLASHATTN_EXT_HOST_DEVICE Tile tile(int64_t cta) const {
    const int64_t per_group = static_cast<int64_t>(heads_per_group) * num_blocks;
    const int32_t group = static_cast<int32_t>(cta / per_group);
    const int32_t in_group = static_cast<int32_t>(cta - group * per_group);
    const int32_t first_head = group * heads_per_group;
    const int32_t left = num_heads - first_head;
    const int32_t heads = left < heads_per_group ? left : heads_per_group;
    const int32_t rank = in_group / heads;
    return {descending ? num_blocks - 1 - rank : rank, first_head + in_group % heads};
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
  int64_t units = bytes_per_unit > 0 ? kL2GroupBytes / bytes_per_unit : num_heads;
  const int64_t max_units = (num_heads + heads_per_unit - 1) / heads_per_unit;
  units = units < 1 ? 1 : (units > max_units ? max_units : units);
  order.heads_per_group = static_cast<int32_t>(units) * heads_per_unit;
  return order;
}

// The order of a launch over query blocks. The query heads of a group share K and V, and a causal
// problem has the most keys at the last queries: descending is longest first.
inline TileOrder make_query_tile_order(const FwdParams& p, int32_t block_m) {
  const int64_t kv_bytes = 2LL * p.seqlen_k * (p.head_dim + p.head_dim_v);
  return make_tile_order((p.seqlen_q + block_m - 1) / block_m, p.batch * p.num_heads_q,
                         p.num_heads_q / p.num_heads_k, kv_bytes, p.window_right < kUnlimited);
}

}  // namespace flashattn_ext
