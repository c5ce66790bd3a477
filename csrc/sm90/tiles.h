// Tile table of the Hopper kernels: one row per instantiated kernel (see sm80/tiles.h). Plain C++.
#pragma once

#include <cstdint>

namespace flashattn_ext::sm90 {

// Forward: persistent CTAs of one producer warpgroup and `consumers` of 64 query rows each.
struct FwdTile {
  int32_t bucket;   // head-dim bucket: the smallest that holds max(head_dim, head_dim_v)
  int32_t block_n;  // Bc: keys
  int32_t consumers;
  bool q_in_regs;

  static constexpr int32_t kStages = 2;  // K and V tiles in flight

  constexpr int32_t block_m() const { return 64 * consumers; }  // Br: query rows
  constexpr int32_t num_warps() const { return 4 * (consumers + 1); }
  // Q, kStages tiles each of K and V, and the barriers.
  constexpr int32_t smem_bytes() const {
    return 2 * bucket * (block_m() + 2 * kStages * block_n) +
           8 * (2 * consumers + 4 * kStages + 4) + 8;
  }
  constexpr bool operator==(const FwdTile& other) const {
    return bucket == other.bucket && block_n == other.block_n && consumers == other.consumers &&
           q_in_regs == other.q_in_regs;
  }
};

inline constexpr FwdTile kFwdTiles[] = {
    {64, 128, 3, false},
    {128, 128, 2, true},
    {256, 80, 2, false},
};

}  // namespace flashattn_ext::sm90
