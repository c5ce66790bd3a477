// What one warp of the dK/dV kernel does with a query block, in the two arrangements the registers
// allow. All tiles are in shared memory; scores are transposed: rows are keys, columns queries.
//
//   S^T = K Q^T, P = exp(logit - lse), dV += P^T dO, dP^T = V dO^T, dS = P (dP - delta),
//   dK += dS^T Q
#pragma once

#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "tile/gmem_copy.cuh"
#include "tile/warp_gemm.cuh"

namespace flashattn_ext::sm80 {

// Shared-memory addresses of one query block (kBlockM rows) and its first row.
struct QueryBlock {
  uint32_t sQ, sDo;
  uint32_t sLse, sDelta;  // fp32 rows of lse_log2 and delta
  int m0;
};

// Destination of a warp's rows of dK or dV.
template <typename Element>
struct GradientRows {
  Element* gmem;
  int64_t row_stride;
  int valid_rows, valid_cols;
};

// From logits to P and to P times the derivative of the logit, which differ only with softcap. Each
// group of four elements of accumulator tile (m, j) goes to `take(m, j, p, d_logit)`.
template <int kMTiles, int kNTiles, typename Take>
__device__ __forceinline__ void form_probabilities(const float (&logits)[kMTiles][kNTiles][4],
                                                   const ScoreTransform& transform, uint32_t sLse,
                                                   int lane, const Take& take) {
  const auto form = [&](const auto& derivative) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const float2 lse_log2 = ptx::ld_shared_v2(sLse + 4 * (8 * j + tile::acc_col(lane, 0)));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        float p[4], d_logit[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float logit = logits[m][j][e];
          p[e] = transform.probability(logit, (e & 1) ? lse_log2.y : lse_log2.x);
          d_logit[e] = derivative(p[e], logit);
        }
        take(m, j, p, d_logit);
      }
    }
  };
  if (transform.softcap > 0.0f) {
    form([&](float p, float logit) { return transform.softcap_d_logit(p, logit); });
  } else {
    form([](float p, float) { return p; });
  }
}

// One warp sums both dK and dV of its keys: two accumulators of kHeadDim columns. P and dS never
// leave its registers and no warp waits for another.
template <typename Config>
class SoloWarp {
  using Element = typename Config::Element;
  static constexpr int kMTiles = Config::kMTiles, kHeadDim = Config::kHeadDim;
  static constexpr int kNTiles = Config::kBlockM / 8;
  using Operand = tile::Operand<kHeadDim>;

 public:
  __device__ __forceinline__ SoloWarp(uint32_t sK, uint32_t sV, uint32_t, int warp_idx, int lane)
      : warp_key(warp_idx * 16 * kMTiles),
        lane(lane),
        sK_rows(sK + warp_key * Config::Layout::kPitchBytes),
        sV_rows(sV + warp_key * Config::Layout::kPitchBytes) {
    tile::clear(acc_dk);
    tile::clear(acc_dv);
  }

  __device__ __forceinline__ void step(const QueryBlock& block, const Band& band, int n0,
                                       const ScoreTransform& transform) {
    float acc_s[kMTiles][kNTiles][4];
    tile::clear(acc_s);
    tile::gemm_xyt<Element>(acc_s, Operand::rows_first(sK_rows, lane),
                            Operand::cols_first(block.sQ, lane));
    transform.apply(acc_s);
    if (!band.covers(block.m0, Config::kBlockM, n0 + warp_key, 16 * kMTiles)) {
      apply_mask_transposed(acc_s, band, n0 + warp_key, block.m0, lane);
    }
    uint32_t p_fragments[kMTiles][kNTiles / 2][4];
    const auto keep = [&](int m, int j, const float(&p)[4], const float(&d_logit)[4]) {
      p_fragments[m][j / 2][2 * (j & 1)] = ptx::pack_x2<Element>(p[0], p[1]);
      p_fragments[m][j / 2][2 * (j & 1) + 1] = ptx::pack_x2<Element>(p[2], p[3]);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_s[m][j][e] = d_logit[e];
    };
    form_probabilities(acc_s, transform, block.sLse, lane, keep);
    tile::gemm_wz<Element>(acc_dv, p_fragments, Operand::rows_first(block.sDo, lane));

    float acc_dp[kMTiles][kNTiles][4];
    tile::clear(acc_dp);
    tile::gemm_xyt<Element>(acc_dp, Operand::rows_first(sV_rows, lane),
                            Operand::cols_first(block.sDo, lane));
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const float2 delta = ptx::ld_shared_v2(block.sDelta + 4 * (8 * j + tile::acc_col(lane, 0)));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc_s[m][j][e] *= acc_dp[m][j][e] - ((e & 1) ? delta.y : delta.x);
        }
    }
    tile::gemm_wz<Element>(acc_dk, acc_s, Operand::rows_first(block.sQ, lane));
  }

  // `rows_of(is_dk)` says where this warp's keys of dK or dV go.
  template <typename RowsOf>
  __device__ __forceinline__ void finish(float softmax_scale, const RowsOf& rows_of) {
    store(acc_dv, 1.0f, sV_rows, rows_of(false));
    store(acc_dk, softmax_scale, sK_rows, rows_of(true));
  }

  const int warp_key;  // this warp's first row of the key block

 private:
  using Accumulator = float[kMTiles][kHeadDim / 8][4];

  __device__ __forceinline__ void store(const Accumulator& acc, float factor, uint32_t smem_rows,
                                        const GradientRows<Element>& to) {
    tile::store_rows<Element, kMTiles, kHeadDim>(acc, factor, smem_rows, to.gmem, to.row_stride,
                                                 to.valid_rows, to.valid_cols, lane);
  }

  const int lane;
  const uint32_t sK_rows, sV_rows;
  Accumulator acc_dk, acc_dv;
};

// Two warps share the same keys, so that each sums one accumulator of kHeadDim columns where two
// would not fit. The P warp forms S^T and P^T and sums dV; its partner, the dS warp, forms dP^T and
// dS^T and sums dK. Both run the same products on different tiles:
//   P warp:  (K Q^T) then (P^T) dO       dS warp: (V dO^T) then (dS^T) Q
// P (times the derivative of the logit) crosses in fp32 through shared memory, in accumulator
// order, behind one named barrier per pair. The CTA's barrier of the next query block is what lets
// the P warp overwrite it.
template <typename Config>
class PairedWarp {
  using Element = typename Config::Element;
  static constexpr int kMTiles = Config::kMTiles, kHeadDim = Config::kHeadDim;
  static constexpr int kNTiles = Config::kBlockM / 8;
  using Operand = tile::Operand<kHeadDim>;

 public:
  __device__ __forceinline__ PairedWarp(uint32_t sK, uint32_t sV, uint32_t sP, int warp_idx,
                                        int lane)
      : is_ds_warp(warp_idx >= Config::kNumKeyWarps),
        pair_idx(is_ds_warp ? warp_idx - Config::kNumKeyWarps : warp_idx),
        warp_key(pair_idx * 16 * kMTiles),
        lane(lane),
        own_rows((is_ds_warp ? sV : sK) + warp_key * Config::Layout::kPitchBytes),
        sP_lane(sP + (pair_idx * kMTiles * kNTiles * 32 + lane) * sizeof(float4)) {
    tile::clear(acc);
  }

  __device__ __forceinline__ void step(const QueryBlock& block, const Band& band, int n0,
                                       const ScoreTransform& transform) {
    float acc_s[kMTiles][kNTiles][4];  // S^T, then P^T; of a dS warp dP^T, then dS^T
    tile::clear(acc_s);
    tile::gemm_xyt<Element>(acc_s, Operand::rows_first(own_rows, lane),
                            Operand::cols_first(is_ds_warp ? block.sDo : block.sQ, lane));
    if (!is_ds_warp) {
      transform.apply(acc_s);
      if (!band.covers(block.m0, Config::kBlockM, n0 + warp_key, 16 * kMTiles)) {
        apply_mask_transposed(acc_s, band, n0 + warp_key, block.m0, lane);
      }
      const auto keep_and_hand_over = [&](int m, int j, const float(&p)[4],
                                          const float(&d_logit)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_s[m][j][e] = p[e];
        ptx::st_shared_v4(p_address(m, j),
                          make_float4(d_logit[0], d_logit[1], d_logit[2], d_logit[3]));
      };
      form_probabilities(acc_s, transform, block.sLse, lane, keep_and_hand_over);
    }
    // The pair meets: P of this query block is written, and may be read. The P warp, which has the
    // exponentials to do, comes last and hardly ever waits.
    ptx::named_barrier_sync(1 + pair_idx, 64);
    if (is_ds_warp) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
        const float2 delta = ptx::ld_shared_v2(block.sDelta + 4 * (8 * j + tile::acc_col(lane, 0)));
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          const float4 p = ptx::ld_shared_v4(p_address(m, j));
          acc_s[m][j][0] = p.x * (acc_s[m][j][0] - delta.x);
          acc_s[m][j][1] = p.y * (acc_s[m][j][1] - delta.y);
          acc_s[m][j][2] = p.z * (acc_s[m][j][2] - delta.x);
          acc_s[m][j][3] = p.w * (acc_s[m][j][3] - delta.y);
        }
      }
    }
    tile::gemm_wz<Element>(acc, acc_s,
                           Operand::rows_first(is_ds_warp ? block.sQ : block.sDo, lane));
  }

  template <typename RowsOf>
  __device__ __forceinline__ void finish(float softmax_scale, const RowsOf& rows_of) {
    const GradientRows<Element> to = rows_of(is_ds_warp);
    tile::store_rows<Element, kMTiles, kHeadDim>(acc, is_ds_warp ? softmax_scale : 1.0f, own_rows,
                                                 to.gmem, to.row_stride, to.valid_rows,
                                                 to.valid_cols, lane);
  }

 private:
  const bool is_ds_warp;
  const int pair_idx;

 public:
  const int warp_key;  // this warp's first row of the key block

 private:
  __device__ __forceinline__ uint32_t p_address(int m, int j) const {
    return sP_lane + (m * kNTiles + j) * 32 * sizeof(float4);
  }

  const int lane;
  const uint32_t own_rows;  // K rows of a P warp, V rows of a dS warp
  const uint32_t sP_lane;
  float acc[kMTiles][kHeadDim / 8][4];  // dV of a P warp, dK / scale of a dS warp
};

}  // namespace flashattn_ext::sm80
