// Tile tables of the portable kernels: one row per instantiated kernel, read by the plan (which
// picks a row) and by the launchers (which instantiate exactly these rows). Plain C++.
//
// The comment signs at line ends keep one row per line.
//
// Choice: within a head-dim bucket the first row whose `min_smem_bytes` the device offers wins.
// Shared-memory classes: 227 KB (sm_90, sm_100), 163 KB (sm_80), 99 KB (sm_86, sm_89, sm_120).
#pragma once

#include <cstdint>

namespace flashattn_ext::sm80 {

inline constexpr int32_t kSmem227 = 227 * 1024;
inline constexpr int32_t kSmem163 = 163 * 1024;
inline constexpr int32_t kSmem99 = 99 * 1024;

// A problem runs in the smallest bucket that holds max(head_dim, head_dim_v).
inline constexpr int32_t kHeadDimBuckets[] = {32, 64, 96, 128, 192, 256};

struct TileShape {
  int32_t bucket;          // head-dim bucket
  int32_t min_smem_bytes;  // offered to devices with at least this much shared memory per block
  int32_t block_m;         // Br: query rows
  int32_t block_n;         // Bc: keys
  int32_t num_warps;
  // Streamed tiles in flight: 1 (two barriers per step) or 2 (one barrier per step).
  int32_t stages;
};

// Forward: one CTA per (query block, head), looping over key blocks.
struct FwdTile : TileShape {
  // Q, then `stages` tiles each of K and V.
  constexpr int32_t smem_bytes() const { return 2 * bucket * (block_m + 2 * stages * block_n); }
};

inline constexpr FwdTile kFwdTiles[] = {
    {32, kSmem99, 128, 64, 4, 2},    //
    {64, kSmem99, 128, 64, 4, 2},    //
    {96, kSmem99, 128, 64, 4, 2},    //
    {128, kSmem227, 128, 64, 4, 2},  //
    {128, kSmem163, 128, 64, 4, 1},  //
    {128, kSmem99, 64, 64, 4, 1},    //
    {192, kSmem99, 64, 64, 4, 1},    //
    // Two CTAs of four warps where they fit, else one of eight.
    {256, kSmem227, 64, 64, 4, 1},   //
    {256, kSmem163, 128, 64, 8, 1},  //
    {256, kSmem99, 64, 64, 4, 1},    //
};

// dQ kernel: one CTA per (query block, head), looping over key blocks.
struct BwdDqTile : TileShape {
  // Q and dO, then `stages` tiles each of K and V.
  constexpr int32_t smem_bytes() const { return 2 * bucket * (2 * block_m + 2 * stages * block_n); }
};

inline constexpr BwdDqTile kBwdDqTiles[] = {
    {32, kSmem99, 128, 64, 4, 2},   //
    {64, kSmem99, 128, 64, 4, 2},   //
    {96, kSmem99, 128, 32, 4, 2},   //
    {128, kSmem99, 128, 32, 4, 2},  //
    {192, kSmem99, 64, 64, 4, 1},   //
    {256, kSmem99, 64, 32, 4, 1},   //
};

// dK/dV kernel: one CTA per (key block, KV head), looping over the group's query heads and blocks.
// Up to this head dim a warp's registers hold dK and dV of 32 keys; above, pairs of warps share
// keys and hand P over through shared memory (bwd_dkv_warp.cuh).
constexpr bool pairs_warps(int32_t bucket) { return bucket > 64; }

struct BwdDkvTile : TileShape {
  // K and V, `stages` tiles each of Q and dO, P in fp32 for pairs, and `stages` rows of lse and
  // delta.
  constexpr int32_t smem_bytes() const {
    return 2 * bucket * (2 * block_n + 2 * stages * block_m) +
           (pairs_warps(bucket) ? 4 * block_m * block_n : 0) + 2 * 4 * stages * block_m;
  }
};

inline constexpr BwdDkvTile kBwdDkvTiles[] = {
    {32, kSmem99, 64, 128, 4, 2},   //
    {64, kSmem99, 32, 128, 4, 2},   //
    {96, kSmem99, 64, 64, 4, 2},    //
    {128, kSmem227, 64, 64, 4, 2},  //
    {128, kSmem99, 64, 64, 4, 1},   //
    {192, kSmem163, 64, 64, 8, 2},  //
    {192, kSmem99, 32, 32, 4, 2},   //
    {256, kSmem227, 64, 64, 8, 2},  //
    {256, kSmem99, 32, 32, 4, 1},   //
};

}  // namespace flashattn_ext::sm80
