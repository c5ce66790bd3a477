// Portable dQ kernel: one CTA per (query block, head, sequence), looping over key blocks. It is the
// forward without the online softmax: P comes from the saved LSE, so nothing is rescaled and dQ is
// summed by one CTA in a fixed order (no atomics, repeatable to the bit).
//
// Grid:   one-dimensional, in the order of attention/tile_order.h.
// Warps:  each owns 16 * kMTiles query rows; lse_log2 and delta of a row are registers.
// Shared: Q and dO (kBlockM, kHeadDim), then kStages tiles each of K and V (kBlockN, kHeadDim).
//         dQ leaves through Q's rows.
// Math:   S = Q K^T, P = exp(logit - lse), dP = dO V^T, dS = P (dP - delta), dQ = scale dS K.
#pragma once

#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/score.cuh"
#include "attention/seqlen_info.cuh"
#include "attention/tile_order.h"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "tile/gmem_copy.cuh"
#include "tile/warp_gemm.cuh"

namespace flashattn_ext::sm80 {

template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumWarps_,
          int kStages_>
struct BwdDqConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kStages = kStages_;

  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kMTiles = kBlockM / (16 * kNumWarps);
  static_assert(kBlockM == 16 * kMTiles * kNumWarps, "whole 16-row tiles per warp");
  static_assert(kStages == 1 || kStages == 2);

  using Layout = tile::SmemLayout<kHeadDim>;
  static constexpr uint32_t kKvTileBytes = Layout::tile_bytes(kBlockN);
  static constexpr uint32_t kOffsetDo = Layout::tile_bytes(kBlockM);
  static constexpr uint32_t kOffsetK = 2 * Layout::tile_bytes(kBlockM);
  static constexpr uint32_t kOffsetV = kOffsetK + kStages * kKvTileBytes;
  static constexpr uint32_t kSmemBytes = kOffsetV + kStages * kKvTileBytes;

  using QLoader = tile::TileLoader<kBlockM, kHeadDim, kNumThreads>;
  using KvLoader = tile::TileLoader<kBlockN, kHeadDim, kNumThreads>;
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads)
    flash_bwd_dq_sm80_kernel(const __grid_constant__ BwdParams params,
                             const __grid_constant__ ScoreTransform transform,
                             const __grid_constant__ TileOrder order) {
  using Element = typename Config::Element;
  constexpr int kMTiles = Config::kMTiles, kHeadDim = Config::kHeadDim;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;

  const TileOrder::Tile tile_idx = order.tile(blockIdx.x);
  const int batch_idx = tile_idx.head / params.num_heads_q;
  const int head_idx = tile_idx.head - batch_idx * params.num_heads_q;
  const int kv_head_idx = head_idx / (params.num_heads_q / params.num_heads_k);
  const SeqlenSide side_q = query_side(params, batch_idx);
  const SeqlenSide side_k = key_side(params, batch_idx);
  const int m0 = tile_idx.block * kBlockM;
  if (m0 >= side_q.length) return;
  const Band band(params, side_q.length, side_k.length);
  const BlockRange blocks = band.key_blocks(m0, kBlockM, kBlockN);

  const int thread_idx = threadIdx.x, lane = thread_idx & 31, warp_idx = thread_idx >> 5;
  const int warp_row = warp_idx * 16 * kMTiles;  // this warp's first row of the query block
  const int valid_rows = side_q.length - m0 - warp_row;

  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t sQ = ptx::smem_address(smem), sDo = sQ + Config::kOffsetDo;
  const uint32_t sK = sQ + Config::kOffsetK, sV = sQ + Config::kOffsetV;

  const Element* gQ = head_ptr(static_cast<const Element*>(params.q), params.q_strides, batch_idx,
                               side_q.start + m0, head_idx);
  const Element* gDo = head_ptr(static_cast<const Element*>(params.dout), params.dout_strides,
                                batch_idx, side_q.start + m0, head_idx);
  const Element* gK = head_ptr(static_cast<const Element*>(params.k), params.k_strides, batch_idx,
                               side_k.start, kv_head_idx);
  const Element* gV = head_ptr(static_cast<const Element*>(params.v), params.v_strides, batch_idx,
                               side_k.start, kv_head_idx);
  const typename Config::KvLoader k_loader(thread_idx, params.head_dim);
  const typename Config::KvLoader v_loader(thread_idx, params.head_dim_v);
  const auto load_kv = [&](int n_block, int stage) {
    const int n0 = n_block * kBlockN;
    k_loader.load(sK + stage * Config::kKvTileBytes, gK + n0 * params.k_strides.row,
                  params.k_strides.row, side_k.length - n0);
    v_loader.load(sV + stage * Config::kKvTileBytes, gV + n0 * params.v_strides.row,
                  params.v_strides.row, side_k.length - n0);
  };

  const uint32_t warp_offset = warp_row * Config::Layout::kPitchBytes;
  const auto q_operand = tile::Operand<kHeadDim>::rows_first(sQ + warp_offset, lane);
  const auto do_operand = tile::Operand<kHeadDim>::rows_first(sDo + warp_offset, lane);
  float acc_dq[kMTiles][kHeadDim / 8][4];
  tile::clear(acc_dq);

  // The gradient of a row that sees no key goes nowhere, whatever it holds: it reads as zero.
  const BlockRange seeing = band.seeing_rows();
  if (blocks.end > blocks.begin) {
    typename Config::QLoader(thread_idx, params.head_dim)
        .load(sQ, gQ, params.q_strides.row, side_q.length - m0);
    typename Config::QLoader(thread_idx, params.head_dim_v)
        .load(sDo, gDo, params.dout_strides.row, seeing.end - m0, seeing.begin - m0);
    load_kv(blocks.end - 1, 0);
    ptx::cp_async_commit_group();
  }

  float lse_log2[kMTiles][2], delta[kMTiles][2];
  const int64_t stats_offset = batch_idx * params.lse_batch_stride +
                               head_idx * params.lse_head_stride + side_q.start + m0 + warp_row;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + tile::acc_row(lane, 2 * half);
      const bool valid = row < valid_rows;
      lse_log2[m][half] = valid ? params.lse_log2[stats_offset + row] : INFINITY;
      delta[m][half] = valid ? params.delta[stats_offset + row] : 0.0f;
    }

#pragma unroll 1
  for (int n_block = blocks.end - 1, stage = 0; n_block >= blocks.begin; --n_block) {
    // This thread's copies have landed; the barrier adds everybody else's, and says that all warps
    // are done with the other stage, which the next copies overwrite.
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    if constexpr (Config::kStages == 2) {
      if (n_block > blocks.begin) load_kv(n_block - 1, stage ^ 1);
      ptx::cp_async_commit_group();
    }
    const uint32_t sK_stage = sK + stage * Config::kKvTileBytes;
    const uint32_t sV_stage = sV + stage * Config::kKvTileBytes;

    const int n0 = n_block * kBlockN;
    float acc_s[kMTiles][kBlockN / 8][4];
    tile::clear(acc_s);
    tile::gemm_xyt<Element>(acc_s, q_operand, tile::Operand<kHeadDim>::cols_first(sK_stage, lane));
    transform.apply(acc_s);
    if (!band.covers(m0 + warp_row, 16 * kMTiles, n0, kBlockN)) {
      apply_mask(acc_s, band, m0 + warp_row, n0, lane);
    }
    // acc_s becomes P, times the derivative of the softcap where there is one.
    const auto form_p = [&](auto&& finish) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int j = 0; j < kBlockN / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float logit = acc_s[m][j][e];
            acc_s[m][j][e] = finish(transform.probability(logit, lse_log2[m][e >> 1]), logit);
          }
    };
    if (transform.softcap > 0.0f) {
      form_p([&](float p, float logit) { return transform.softcap_d_logit(p, logit); });
    } else {
      form_p([](float p, float) { return p; });
    }
    float acc_dp[kMTiles][kBlockN / 8][4];
    tile::clear(acc_dp);
    tile::gemm_xyt<Element>(acc_dp, do_operand,
                            tile::Operand<kHeadDim>::cols_first(sV_stage, lane));
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_s[m][j][e] *= acc_dp[m][j][e] - delta[m][e >> 1];
    tile::gemm_wz<Element>(acc_dq, acc_s, tile::Operand<kHeadDim>::rows_first(sK_stage, lane));
    if constexpr (Config::kStages == 2) {
      stage ^= 1;
    } else {
      __syncthreads();  // all warps are done with K and V, which the next copies overwrite
      if (n_block > blocks.begin) load_kv(n_block - 1, 0);
      ptx::cp_async_commit_group();
    }
  }

  Element* gDq = head_ptr(static_cast<Element*>(params.dq), params.dq_strides, batch_idx,
                          side_q.start + m0 + warp_row, head_idx);
  tile::store_rows<Element, kMTiles, kHeadDim>(acc_dq, transform.softmax_scale, sQ + warp_offset,
                                               gDq, params.dq_strides.row, valid_rows,
                                               params.head_dim, lane);
}

}  // namespace flashattn_ext::sm80
