// Tile table of the Hopper kernels: one row per instantiated kernel (see sm80/tiles.h). Plain C++.
#pragma once

#include <cstdint>

namespace flashattn_ext::sm90 {

inline constexpr int32_t kAnyLength = INT32_MAX;

// Forward: persistent CTAs of one producer warpgroup and `consumers` of 64 query rows each.
struct FwdTile {
  int32_t bucket, bucket_v;  // holds every head_dim and head_dim_v up to these
  int32_t block_n;           // Bc: keys
  int32_t consumers;
  int32_t ctas_per_sm;         // two fill each other's pauses between short tiles
  int32_t k_stages, v_stages;  // K and V tiles in flight
  bool q_in_regs;              // Q as A fragments in registers; else read from shared memory
  bool ping_pong;              // consumers queue their products one after the other
  bool cross_tile;             // the next tile's first product runs behind this one's last
  bool tma_store;              // O through shared memory; else from registers
  bool fixed_reference;        // softmax without a running maximum
  bool draw_equal_tiles;       // CTAs draw tiles of equal work, too, rather than take every grid-th
  // The row is for problems whose queries see up to so many keys: without a mask, and with a causal
  // mask or window.
  int32_t most_keys, most_keys_masked;

  constexpr int32_t block_m() const { return 64 * consumers; }  // Br: query rows
  constexpr int32_t num_warps() const { return 4 * (consumers + 1); }

  // Shared memory. A tile is stored as chunks of 64 columns.
  static constexpr int32_t kTileSlots = 2;
  constexpr int32_t tile_slot_bytes() const { return 48 + 32 * consumers; }
  static constexpr int32_t chunk_bytes(int32_t rows) { return 128 * rows; }
  constexpr int32_t qk_chunks() const { return (bucket + 63) / 64; }
  constexpr int32_t v_chunks() const { return (bucket_v + 63) / 64; }
  constexpr int32_t num_barriers() const {
    return 2 * (consumers + k_stages + v_stages + kTileSlots) + 1;
  }
  constexpr int32_t smem_bytes() const {
    return chunk_bytes(block_m()) * (qk_chunks() + (tma_store ? v_chunks() : 0)) +
           chunk_bytes(block_n) * (k_stages * qk_chunks() + v_stages * v_chunks()) +
           8 * num_barriers() + tile_slot_bytes() * kTileSlots;
  }
};

// Measurements: docs/tuning.md.
inline constexpr FwdTile kFwdTiles[] = {
    {64, 64, 64, 2, 2, 4, 4, false, false, false, true, true, true, 1024, 4096},
    {64, 64, 128, 3, 1, 4, 3, false, true, false, true, true, true, kAnyLength, kAnyLength},
    {96, 96, 128, 2, 1, 3, 2, true, true, true, true, true, false, kAnyLength, kAnyLength},
    {128, 128, 64, 2, 1, 5, 5, true, true, false, true, true, true, 0, 1100},
    {128, 128, 128, 2, 1, 3, 2, true, true, true, true, true, false, kAnyLength, kAnyLength},
    {192, 128, 128, 2, 1, 2, 2, false, true, true, false, false, true, kAnyLength, kAnyLength},
    {192, 192, 112, 2, 1, 2, 2, false, true, true, false, false, true, kAnyLength, kAnyLength},
    {256, 256, 80, 2, 1, 2, 2, false, true, true, false, false, false, kAnyLength, kAnyLength},
};

// dQ kernel: a CTA per (query block, head), of one producer warpgroup and `consumers` of 64 query
// rows each. A problem runs in the smallest bucket that holds both head dims.
struct BwdDqTile {
  int32_t bucket, bucket_v;
  int32_t block_n;  // Bc: keys
  int32_t consumers;
  int32_t k_stages, v_stages;  // K and V tiles in flight

  constexpr int32_t block_m() const { return 64 * consumers; }  // Br: query rows
  constexpr int32_t num_warps() const { return 4 * (consumers + 1); }
  constexpr int32_t chunks() const { return (bucket + 63) / 64; }
  constexpr int32_t v_chunks() const { return (bucket_v + 63) / 64; }
  constexpr int32_t num_barriers() const { return 2 + 2 * (k_stages + v_stages); }
  // Q and K, dO and V; barriers.
  constexpr int32_t smem_bytes() const {
    return FwdTile::chunk_bytes(block_m() + k_stages * block_n) * chunks() +
           FwdTile::chunk_bytes(block_m() + v_stages * block_n) * v_chunks() + 8 * num_barriers();
  }
};

inline constexpr BwdDqTile kBwdDqTiles[] = {
    {64, 64, 64, 3, 3, 3},   {96, 96, 64, 2, 3, 3},   {128, 128, 64, 2, 3, 3},
    {192, 128, 64, 2, 3, 3}, {192, 192, 64, 2, 3, 2}, {256, 256, 64, 2, 2, 1},
};

// dK/dV kernel: a CTA per (key block, KV head), of one producer warpgroup and two consumers,
// looping over the group's query heads and blocks.
struct BwdDkvTile {
  int32_t bucket, bucket_v;
  int32_t block_m;  // Br: query rows
  int32_t stages;   // Q and dO tiles in flight
  bool roles;       // consumers share 64 keys and sum one gradient each; else 64 keys each

  static constexpr int32_t consumers = 2;
  constexpr int32_t block_n() const { return roles ? 64 : 64 * consumers; }  // Bc: keys
  constexpr int32_t num_warps() const { return 4 * (consumers + 1); }
  constexpr int32_t chunks() const { return (bucket + 63) / 64; }
  constexpr int32_t v_chunks() const { return (bucket_v + 63) / 64; }
  constexpr int32_t num_barriers() const { return 2 + (roles ? 7 : 5) * stages; }
  constexpr int32_t scores_bytes() const {  // P in fp32
    return roles ? stages * 4 * block_m * block_n() : 0;
  }
  // K and Q, V and dO; scores; lse_log2 and delta; barriers.
  constexpr int32_t smem_bytes() const {
    return FwdTile::chunk_bytes(block_n() + stages * block_m) * (chunks() + v_chunks()) +
           scores_bytes() + 2 * 4 * stages * block_m + 8 * num_barriers();
  }
};

inline constexpr BwdDkvTile kBwdDkvTiles[] = {
    {64, 64, 128, 3, false}, {96, 96, 64, 3, false},  {128, 128, 64, 3, false},
    {192, 128, 64, 3, true}, {192, 192, 64, 2, true}, {256, 256, 64, 2, true},
};

// Fused kernel: CTAs of one producer warpgroup and two consumers of 64 keys each, which take tiles
// (key block, KV head) and also add what their keys give of dQ to a buffer (bwd_dq_buffer.h).
struct BwdFusedTile {
  int32_t least_head_dim, bucket;  // the larger head dim lies between
  int32_t block_m;                 // Br: query rows
  int32_t stages;                  // Q and dO tiles in flight
  bool in_order;                   // CTAs add to dQ one after the other
  // From as many keys of a query on the row is faster than the next, which adds in order.
  int32_t least_keys;

  static constexpr int32_t consumers = 2;
  static constexpr int32_t ds_stages = 3, turn_stages = 2;
  static constexpr int32_t tile_slots = 2, work_bytes = 80;     // what a CTA does for a tile
  constexpr int32_t block_n() const { return 64 * consumers; }  // Bc: keys
  constexpr int32_t num_warps() const { return 4 * (consumers + 1); }
  constexpr int32_t chunks() const { return (bucket + 63) / 64; }
  constexpr int32_t v_chunks() const { return chunks(); }
  constexpr int32_t num_barriers() const {
    return 3 + 5 * stages + ds_stages + 2 * tile_slots + (in_order ? 3 * turn_stages : 0);
  }
  constexpr int32_t scores_bytes() const { return ds_stages * 2 * block_m * block_n(); }  // dS
  constexpr int32_t smem_bytes() const {
    return FwdTile::chunk_bytes(2 * block_n() + 2 * stages * block_m) * chunks() + scores_bytes() +
           2 * 4 * stages * block_m + 8 * num_barriers() + tile_slots * work_bytes;
  }
};

// Measurements: docs/tuning.md.
inline constexpr BwdFusedTile kBwdFusedTiles[] = {
    {8, 64, 128, 2, false, 3000},
    {8, 64, 128, 2, true, 0},
    {97, 128, 64, 3, false, 1500},
    {97, 128, 64, 3, true, 0},
};

}  // namespace flashattn_ext::sm90
