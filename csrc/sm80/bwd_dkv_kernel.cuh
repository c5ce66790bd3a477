// Portable dK/dV kernel: one CTA per (key block, KV head, sequence), looping over the query heads
// of the group and their query blocks. dK and dV stay in registers until the end: no atomics, no
// fp32 buffer, repeatable to the bit, and no copies of K and V per query head.
//
// Grid:   one-dimensional, in the order of attention/tile_order.h.
// Warps:  up to head dim 64 each sums dK and dV of its keys (SoloWarp); above, two warps share keys
//         and each sums one of the two (PairedWarp). See bwd_dkv_warp.cuh.
// Shared: K, V (kBlockN, kHeadDim); kStages tiles each of Q and dO (kBlockM, kHeadDim); P^T in fp32
//         where warps come in pairs; kStages rows of lse_log2 and delta. dV and dK leave through
//         the warps' own rows of K and V.
// Barriers: the CTA's, once per query block; per pair of warps a named one, where P changes hands.
#pragma once

#include <type_traits>

#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/score.cuh"
#include "attention/seqlen_info.cuh"
#include "attention/tile_order.h"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "sm80/bwd_dkv_warp.cuh"
#include "sm80/tiles.h"
#include "tile/gmem_copy.cuh"

namespace flashattn_ext::sm80 {

template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumWarps_,
          int kStages_>
struct BwdDkvConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kStages = kStages_;

  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr bool kPaired = pairs_warps(kHeadDim);
  static constexpr int kNumKeyWarps = kPaired ? kNumWarps / 2 : kNumWarps;
  static constexpr int kMTiles = kBlockN / (16 * kNumKeyWarps);
  static_assert(kBlockN == 16 * kMTiles * kNumKeyWarps, "whole 16-row tiles per warp");
  static_assert(kStages == 1 || kStages == 2);
  static_assert(kBlockM <= kNumThreads, "one thread loads each row's lse_log2 and delta");

  using Layout = tile::SmemLayout<kHeadDim>;
  static constexpr uint32_t kQTileBytes = Layout::tile_bytes(kBlockM);
  static constexpr uint32_t kOffsetV = Layout::tile_bytes(kBlockN);
  static constexpr uint32_t kOffsetQ = 2 * Layout::tile_bytes(kBlockN);
  static constexpr uint32_t kOffsetDo = kOffsetQ + kStages * kQTileBytes;
  static constexpr uint32_t kOffsetP = kOffsetDo + kStages * kQTileBytes;
  static constexpr uint32_t kOffsetLse = kOffsetP + (kPaired ? 4 * kBlockM * kBlockN : 0);
  static constexpr uint32_t kOffsetDelta = kOffsetLse + 4 * kStages * kBlockM;
  static constexpr uint32_t kSmemBytes = kOffsetDelta + 4 * kStages * kBlockM;

  using QLoader = tile::TileLoader<kBlockM, kHeadDim, kNumThreads>;
  using KvLoader = tile::TileLoader<kBlockN, kHeadDim, kNumThreads>;
};

// Walks the query blocks of a KV head's group: all blocks of the first query head, then the next.
struct QueryBlockIterator {
  BlockRange blocks;
  int32_t block;
  int32_t head_in_group;

  __device__ __forceinline__ explicit QueryBlockIterator(BlockRange blocks)
      : blocks(blocks), block(blocks.begin), head_in_group(0) {}

  __device__ __forceinline__ void next() {
    if (++block == blocks.end) {
      block = blocks.begin;
      ++head_in_group;
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads)
    flash_bwd_dkv_sm80_kernel(const __grid_constant__ BwdParams params,
                              const __grid_constant__ ScoreTransform transform,
                              const __grid_constant__ TileOrder order) {
  using Element = typename Config::Element;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;

  const TileOrder::Tile tile_idx = order.tile(blockIdx.x);
  const int batch_idx = tile_idx.head / params.num_heads_k;
  const int kv_head_idx = tile_idx.head - batch_idx * params.num_heads_k;
  const int group_size = params.num_heads_q / params.num_heads_k;
  const SeqlenSide side_q = query_side(params, batch_idx);
  const SeqlenSide side_k = key_side(params, batch_idx);
  const int n0 = tile_idx.block * kBlockN;
  if (n0 >= side_k.length) return;
  const Band band(params, side_q.length, side_k.length);
  const BlockRange blocks = band.query_blocks(n0, kBlockN, kBlockM);
  const int num_steps = (blocks.end - blocks.begin) * group_size;

  const int thread_idx = threadIdx.x, lane = thread_idx & 31, warp_idx = thread_idx >> 5;

  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t sK = ptx::smem_address(smem), sV = sK + Config::kOffsetV;
  const uint32_t sQ = sK + Config::kOffsetQ, sDo = sK + Config::kOffsetDo;
  const uint32_t sLse = sK + Config::kOffsetLse, sDelta = sK + Config::kOffsetDelta;

  const typename Config::QLoader q_loader(thread_idx, params.head_dim);
  const typename Config::QLoader do_loader(thread_idx, params.head_dim_v);
  // The gradient of a row that sees no key goes nowhere, whatever it holds: it reads as zero.
  const BlockRange seeing = band.seeing_rows();
  const auto load_step = [&](const QueryBlockIterator& it, int stage) {
    const int m0 = it.block * kBlockM;
    const int head_idx = kv_head_idx * group_size + it.head_in_group;
    const Element* gQ = head_ptr(static_cast<const Element*>(params.q), params.q_strides, batch_idx,
                                 side_q.start + m0, head_idx);
    const Element* gDo = head_ptr(static_cast<const Element*>(params.dout), params.dout_strides,
                                  batch_idx, side_q.start + m0, head_idx);
    q_loader.load(sQ + stage * Config::kQTileBytes, gQ, params.q_strides.row, side_q.length - m0);
    do_loader.load(sDo + stage * Config::kQTileBytes, gDo, params.dout_strides.row, seeing.end - m0,
                   seeing.begin - m0);
    // Rows past the end become lse = delta = 0: with Q = dO = 0 there, P is 1 at most and meets
    // only zeros.
    if (thread_idx < kBlockM) {
      const int64_t offset = batch_idx * params.lse_batch_stride +
                             head_idx * params.lse_head_stride + side_q.start + m0 + thread_idx;
      const bool valid = m0 + thread_idx < side_q.length;
      const uint32_t row_bytes = 4 * (stage * kBlockM + thread_idx);
      ptx::cp_async_4(sLse + row_bytes, params.lse_log2 + offset, valid);
      ptx::cp_async_4(sDelta + row_bytes, params.delta + offset, valid);
    }
    ptx::cp_async_commit_group();
  };

  QueryBlockIterator next(blocks);
  if (num_steps > 0) {
    const Element* gK = head_ptr(static_cast<const Element*>(params.k), params.k_strides, batch_idx,
                                 side_k.start + n0, kv_head_idx);
    const Element* gV = head_ptr(static_cast<const Element*>(params.v), params.v_strides, batch_idx,
                                 side_k.start + n0, kv_head_idx);
    typename Config::KvLoader(thread_idx, params.head_dim)
        .load(sK, gK, params.k_strides.row, side_k.length - n0);
    typename Config::KvLoader(thread_idx, params.head_dim_v)
        .load(sV, gV, params.v_strides.row, side_k.length - n0);
    load_step(next, 0);
  }

  using Warp = std::conditional_t<Config::kPaired, PairedWarp<Config>, SoloWarp<Config>>;
  Warp warp(sK, sV, sK + Config::kOffsetP, warp_idx, lane);

#pragma unroll 1
  for (int step = 0, stage = 0; step < num_steps; ++step) {
    const int m0 = next.block * kBlockM;
    // This thread's copies have landed; the barrier adds everybody else's, and says that all warps
    // are done with the previous step: the other stage may be overwritten, and so may P.
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    next.next();
    if constexpr (Config::kStages == 2) {
      if (step + 1 < num_steps) load_step(next, stage ^ 1);
    }
    const uint32_t stage_bytes = stage * Config::kQTileBytes;
    const uint32_t stat_bytes = 4 * stage * kBlockM;
    warp.step({sQ + stage_bytes, sDo + stage_bytes, sLse + stat_bytes, sDelta + stat_bytes, m0},
              band, n0, transform);
    if constexpr (Config::kStages == 2) {
      stage ^= 1;
    } else {
      __syncthreads();  // all warps are done with Q and dO, which the next copies overwrite
      if (step + 1 < num_steps) load_step(next, 0);
    }
  }

  warp.finish(transform.softmax_scale, [&](bool is_dk) -> GradientRows<Element> {
    const Strides& strides = is_dk ? params.dk_strides : params.dv_strides;
    Element* gmem = head_ptr(static_cast<Element*>(is_dk ? params.dk : params.dv), strides,
                             batch_idx, side_k.start + n0 + warp.warp_key, kv_head_idx);
    return {gmem, strides.row, side_k.length - n0 - warp.warp_key,
            is_dk ? params.head_dim : params.head_dim_v};
  });
}

}  // namespace flashattn_ext::sm80
