// Portable forward kernel: one CTA per (query block, head, sequence), key blocks from the last to
// the first (so the masked ones come first), online softmax, one output tile.
//
// Grid:   one-dimensional, in the order of attention/tile_order.h.
// Warps:  each owns 16 * kMTiles query rows: scores, softmax and output of a row stay in one warp.
// Shared: Q (kBlockM, kHeadDim), then kStages tiles each of K and V (kBlockN, kHeadDim), all in the
//         swizzled layout of tile/swizzle.cuh. The output leaves through Q's rows.
// Math:   S = Q K^T; logits, mask; m, l, O by the online softmax; O / l; lse = m + ln l.
#pragma once

#include "attention/mask.cuh"
#include "attention/online_softmax.cuh"
#include "attention/params.h"
#include "attention/score.cuh"
#include "attention/seqlen_info.cuh"
#include "attention/tile_order.h"
#include "ptx/cp_async.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/gmem_copy.cuh"
#include "tile/warp_gemm.cuh"

namespace flashattn_ext::sm80 {

template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumWarps_,
          int kStages_>
struct FwdConfig {
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
  static constexpr uint32_t kOffsetK = Layout::tile_bytes(kBlockM);
  static constexpr uint32_t kOffsetV = kOffsetK + kStages * kKvTileBytes;
  static constexpr uint32_t kSmemBytes = kOffsetV + kStages * kKvTileBytes;

  using QLoader = tile::TileLoader<kBlockM, kHeadDim, kNumThreads>;
  using KvLoader = tile::TileLoader<kBlockN, kHeadDim, kNumThreads>;
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads)
    flash_fwd_sm80_kernel(const __grid_constant__ FwdParams params,
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

  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t sQ = ptx::smem_address(smem);
  const uint32_t sK = sQ + Config::kOffsetK, sV = sQ + Config::kOffsetV;

  const Element* gQ = head_ptr(static_cast<const Element*>(params.q), params.q_strides, batch_idx,
                               side_q.start + m0, head_idx);
  const Element* gK = head_ptr(static_cast<const Element*>(params.k), params.k_strides, batch_idx,
                               side_k.start, kv_head_idx);
  const Element* gV = head_ptr(static_cast<const Element*>(params.v), params.v_strides, batch_idx,
                               side_k.start, kv_head_idx);
  const typename Config::QLoader q_loader(thread_idx, params.head_dim);
  // With wide heads the loaders are built where they load, from an opaque thread index: their
  // addresses then need no registers while the products run. Narrow heads have the registers.
  const auto loader_thread = [&] { return kHeadDim > 128 ? ptx::opaque(thread_idx) : thread_idx; };
  const auto load_k = [&](int n_block, int stage) {
    const int n0 = n_block * kBlockN;
    const typename Config::KvLoader loader(loader_thread(), params.head_dim);
    loader.load(sK + stage * Config::kKvTileBytes, gK + n0 * params.k_strides.row,
                params.k_strides.row, side_k.length - n0);
  };
  const auto load_v = [&](int n_block, int stage) {
    const int n0 = n_block * kBlockN;
    const typename Config::KvLoader loader(loader_thread(), params.head_dim_v);
    loader.load(sV + stage * Config::kKvTileBytes, gV + n0 * params.v_strides.row,
                params.v_strides.row, side_k.length - n0);
  };

  const auto q_operand =
      tile::Operand<kHeadDim>::rows_first(sQ + warp_row * Config::Layout::kPitchBytes, lane);
  OnlineSoftmax<kMTiles> softmax;
  float acc_o[kMTiles][kHeadDim / 8][4];
  tile::clear(acc_o);

  if (blocks.end > blocks.begin) {
    q_loader.load(sQ, gQ, params.q_strides.row, side_q.length - m0);
    load_k(blocks.end - 1, 0);
    if constexpr (Config::kStages == 2) load_v(blocks.end - 1, 0);
    ptx::cp_async_commit_group();
  }

#pragma unroll 1
  for (int n_block = blocks.end - 1, stage = 0; n_block >= blocks.begin; --n_block) {
    // This thread's copies have landed; the barrier adds everybody else's, and says that all warps
    // are done with the buffers of the previous step, which the next copies overwrite.
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    if constexpr (Config::kStages == 2) {
      if (n_block > blocks.begin) {
        load_k(n_block - 1, stage ^ 1);
        load_v(n_block - 1, stage ^ 1);
      }
    } else {
      load_v(n_block, 0);
    }
    ptx::cp_async_commit_group();

    const int n0 = n_block * kBlockN;
    float acc_s[kMTiles][kBlockN / 8][4];
    tile::clear(acc_s);
    tile::gemm_xyt<Element>(
        acc_s, q_operand,
        tile::Operand<kHeadDim>::cols_first(sK + stage * Config::kKvTileBytes, lane));

    if constexpr (Config::kStages == 1) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // V has landed; all warps are done with K, which the next copy overwrites
      if (n_block > blocks.begin) load_k(n_block - 1, 0);
      ptx::cp_async_commit_group();
    }

    transform.apply(acc_s);
    if (!band.covers(m0 + warp_row, 16 * kMTiles, n0, kBlockN)) {
      apply_mask(acc_s, band, m0 + warp_row, n0, lane);
    }
    softmax.step(acc_s, acc_o, transform.log2_scale);
    tile::gemm_wz<Element>(
        acc_o, acc_s, tile::Operand<kHeadDim>::rows_first(sV + stage * Config::kKvTileBytes, lane));
    if constexpr (Config::kStages == 2) stage ^= 1;
  }

  float inv_sum[kMTiles][2], lse[kMTiles][2];
  softmax.finish(inv_sum, lse, transform.log2_scale);
  const int valid_rows = side_q.length - m0 - warp_row;
  float* gLse = params.lse + batch_idx * params.lse_batch_stride +
                head_idx * params.lse_head_stride + side_q.start + m0 + warp_row;
  if ((lane & 3) == 0) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * m + tile::acc_row(lane, 2 * half);
        if (row < valid_rows) gLse[row] = lse[m][half];
      }
  }
  Element* gO = head_ptr(static_cast<Element*>(params.out), params.out_strides, batch_idx,
                         side_q.start + m0 + warp_row, head_idx);
  tile::store_rows<Element, kMTiles, kHeadDim>(
      acc_o, inv_sum, sQ + warp_row * Config::Layout::kPitchBytes, gO, params.out_strides.row,
      valid_rows, params.head_dim_v, lane);
}

}  // namespace flashattn_ext::sm80
