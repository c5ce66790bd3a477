// Portable dK/dV kernel: one CTA per (key block, KV head, sequence), looping over the query heads of
// the group and their query blocks. dK and dV stay in registers until the end: no atomics, no
// fp32 buffer, repeatable to the bit, and no copies of K and V per query head.
//
// Grid:   one-dimensional, in the order of attention/tile_order.h.
// Warps:  two roles on the same key rows. A P warp forms S^T and P^T and sums dV; its partner, the
//         dS warp, forms dP^T and dS^T and sums dK. Each owns 16 * kMTiles key rows, so that one
//         accumulator of kHeadDim columns fits the registers where two would not.
//         Both run the same products on different tiles: A B1^T, then (result) B2.
//           P warp:  A = K, B1 = Q,  B2 = dO      dS warp: A = V, B1 = dO, B2 = Q
// Shared: K, V (kBlockN, kHeadDim); kStages tiles each of Q and dO (kBlockM, kHeadDim); P^T in fp32
//         in accumulator order; kStages rows of lse_log2 and delta. dV leaves through the P warp's
//         rows of K, dK through the dS warp's rows of V.
// Barriers: the CTA's, once per query block; per pair of warps one named barrier "P is written".
// Math:   S^T = K Q^T, P = exp(logit - lse), dV = P^T dO, dP^T = V dO^T, dS = P (dP - delta),
//         dK = scale dS^T Q.
#pragma once

#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/score.cuh"
#include "attention/seqlen_info.cuh"
#include "attention/tile_order.h"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "tile/gmem_copy.cuh"
#include "tile/warp_gemm.cuh"

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
  static constexpr int kNumPairs = kNumWarps / 2;
  static constexpr int kMTiles = kBlockN / (16 * kNumPairs);
  static_assert(kBlockN == 16 * kMTiles * kNumPairs, "whole 16-row tiles per pair of warps");
  static_assert(kStages == 1 || kStages == 2);

  using Layout = tile::SmemLayout<kHeadDim>;
  static constexpr uint32_t kQTileBytes = Layout::tile_bytes(kBlockM);
  static constexpr uint32_t kOffsetV = Layout::tile_bytes(kBlockN);
  static constexpr uint32_t kOffsetQ = 2 * Layout::tile_bytes(kBlockN);
  static constexpr uint32_t kOffsetDo = kOffsetQ + kStages * kQTileBytes;
  static constexpr uint32_t kOffsetP = kOffsetDo + kStages * kQTileBytes;
  static constexpr uint32_t kOffsetLse = kOffsetP + 4 * kBlockM * kBlockN;
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
                              const __grid_constant__ TileOrder order) {
  using Element = typename Config::Element;
  constexpr int kMTiles = Config::kMTiles, kHeadDim = Config::kHeadDim;
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
  const bool is_ds_warp = warp_idx >= Config::kNumPairs;
  const int pair_idx = is_ds_warp ? warp_idx - Config::kNumPairs : warp_idx;
  const int warp_key = pair_idx * 16 * kMTiles;  // this warp's first row of the key block
  const int pair_barrier = 1 + pair_idx;

  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t sK = ptx::smem_address(smem), sV = sK + Config::kOffsetV;
  const uint32_t sQ = sK + Config::kOffsetQ, sDo = sK + Config::kOffsetDo;
  const uint32_t sP = sK + Config::kOffsetP +
                      (pair_idx * kMTiles * (kBlockM / 8) * 32 + lane) * sizeof(float4);
  const uint32_t sLse = sK + Config::kOffsetLse, sDelta = sK + Config::kOffsetDelta;

  const typename Config::QLoader q_loader(thread_idx, params.head_dim);
  const typename Config::QLoader do_loader(thread_idx, params.head_dim_v);
  const auto load_step = [&](const QueryBlockIterator& it, int stage) {
    const int m0 = it.block * kBlockM;
    const int head_idx = kv_head_idx * group_size + it.head_in_group;
    const Element* gQ = head_ptr(static_cast<const Element*>(params.q), params.q_strides,
                                 batch_idx, side_q.start + m0, head_idx);
    const Element* gDo = head_ptr(static_cast<const Element*>(params.dout), params.dout_strides,
                                  batch_idx, side_q.start + m0, head_idx);
    q_loader.load(sQ + stage * Config::kQTileBytes, gQ, params.q_strides.row, side_q.length - m0);
    do_loader.load(sDo + stage * Config::kQTileBytes, gDo, params.dout_strides.row,
                   side_q.length - m0);
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
    const Element* gK = head_ptr(static_cast<const Element*>(params.k), params.k_strides,
                                 batch_idx, side_k.start + n0, kv_head_idx);
    const Element* gV = head_ptr(static_cast<const Element*>(params.v), params.v_strides,
                                 batch_idx, side_k.start + n0, kv_head_idx);
    typename Config::KvLoader(thread_idx, params.head_dim)
        .load(sK, gK, params.k_strides.row, side_k.length - n0);
    typename Config::KvLoader(thread_idx, params.head_dim_v)
        .load(sV, gV, params.v_strides.row, side_k.length - n0);
    load_step(next, 0);
  }

  const ScoreTransform transform(params);
  const uint32_t warp_offset = warp_key * Config::Layout::kPitchBytes;
  const uint32_t own_rows = (is_ds_warp ? sV : sK) + warp_offset;
  const auto a_operand = tile::Operand<kHeadDim>::rows_first(own_rows, lane);
  const uint32_t sB1 = is_ds_warp ? sDo : sQ, sB2 = is_ds_warp ? sQ : sDo;
  float acc[kMTiles][kHeadDim / 8][4];  // dV of a P warp, dK / scale of a dS warp
  tile::clear(acc);

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

    float acc_s[kMTiles][kBlockM / 8][4];  // S^T, then P^T, of a P warp; dP^T, then dS^T, of a dS warp
    tile::clear(acc_s);
    tile::gemm_xyt<Element>(acc_s, a_operand,
                            tile::Operand<kHeadDim>::cols_first(sB1 + stage_bytes, lane));
    const uint32_t stat_bytes = 4 * (stage * kBlockM + tile::acc_col(lane, 0));
    if (!is_ds_warp) {
      transform.apply(acc_s);
      if (!band.covers(m0, kBlockM, n0 + warp_key, 16 * kMTiles)) {
        apply_mask_transposed(acc_s, band, n0 + warp_key, m0, lane);
      }
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 lse_log2 = ptx::ld_shared_v2(sLse + stat_bytes + 32 * j);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          float d_logit[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float p =
                transform.probability(acc_s[m][j][e], (e & 1) ? lse_log2.y : lse_log2.x);
            d_logit[e] = transform.d_logit(p, acc_s[m][j][e]);
            acc_s[m][j][e] = p;
          }
          ptx::st_shared_v4(sP + (m * (kBlockM / 8) + j) * 32 * sizeof(float4),
                            make_float4(d_logit[0], d_logit[1], d_logit[2], d_logit[3]));
        }
      }
      ptx::named_barrier_arrive(pair_barrier, 64);  // P of this step is written
    } else {
      ptx::named_barrier_sync(pair_barrier, 64);  // wait until the partner has written P
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 delta = ptx::ld_shared_v2(sDelta + stat_bytes + 32 * j);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          const float4 p = ptx::ld_shared_v4(sP + (m * (kBlockM / 8) + j) * 32 * sizeof(float4));
          acc_s[m][j][0] = p.x * (acc_s[m][j][0] - delta.x);
          acc_s[m][j][1] = p.y * (acc_s[m][j][1] - delta.y);
          acc_s[m][j][2] = p.z * (acc_s[m][j][2] - delta.x);
          acc_s[m][j][3] = p.w * (acc_s[m][j][3] - delta.y);
        }
      }
    }
    tile::gemm_wz<Element>(acc, acc_s,
                           tile::Operand<kHeadDim>::rows_first(sB2 + stage_bytes, lane));
    if constexpr (Config::kStages == 2) {
      stage ^= 1;
    } else {
      __syncthreads();  // all warps are done with Q and dO, which the next copies overwrite
      if (step + 1 < num_steps) load_step(next, 0);
    }
  }

  float factor[kMTiles][2];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
    factor[m][0] = factor[m][1] = is_ds_warp ? transform.softmax_scale : 1.0f;
  const Strides& out_strides = is_ds_warp ? params.dk_strides : params.dv_strides;
  Element* gOut =
      head_ptr(static_cast<Element*>(is_ds_warp ? params.dk : params.dv), out_strides, batch_idx,
               side_k.start + n0 + warp_key, kv_head_idx);
  tile::store_rows<Element, kMTiles, kHeadDim>(
      acc, factor, own_rows, gOut, out_strides.row, side_k.length - n0 - warp_key,
      is_ds_warp ? params.head_dim : params.head_dim_v, lane);
}

}  // namespace flashattn_ext::sm80
