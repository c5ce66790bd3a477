// From raw products q.k to logits, and from logits to probabilities: one definition for all
// kernels.
//
// Where nothing but a positive scale is asked for, the scale is folded into the exponential: the
// "logits" are then the raw products and `log2_scale` is softmax_scale * log2(e). Otherwise the
// logits are formed in place and `log2_scale` is log2(e).
#pragma once

#include <cmath>

#include "attention/mask.cuh"
#include "attention/params.h"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace flashattn_ext {

inline constexpr float kLog2e = 1.4426950408889634f;

// Built on the host and passed to the kernel beside the params, so that its values are
// constant-bank operands and take no registers.
struct ScoreTransform {
  float softmax_scale;
  float softcap;  // 0 = off
  float inv_softcap;
  float log2_scale;  // probability = 2^(logit * log2_scale - reference)
  bool in_place;     // logits differ from the raw products

  explicit ScoreTransform(const FwdParams& p)
      : softmax_scale(p.softmax_scale),
        softcap(p.softcap),
        inv_softcap(p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f),
        // A scale of zero or less would turn the row maximum into a minimum and -inf into NaN.
        in_place(p.softcap > 0.0f || p.softmax_scale <= 0.0f) {
    log2_scale = in_place ? kLog2e : softmax_scale * kLog2e;
  }

  // Raw products to logits; the softcap's tanh(y) = 1 - 2 / (1 + e^(2y)).
  template <int kMTiles, int kNTiles>
  __device__ __forceinline__ void apply(float (&acc)[kMTiles][kNTiles][4]) const {
    if (!in_place) return;
    if (softcap > 0.0f) {
      const float to_y = softmax_scale * inv_softcap;
      tile::transform(acc, [&](float x) {
        // Near 0 the exponential form cancels; there the odd Taylor series, whose first dropped
        // term is below 4e-7 of y for |y| < 1/4.
        const float y = x * to_y, y2 = y * y;
        const float series =
            y * fmaf(y2, fmaf(y2, fmaf(y2, -17.0f / 315.0f, 2.0f / 15.0f), -1.0f / 3.0f), 1.0f);
        const float exponential =
            fmaf(-2.0f, ptx::rcp_approx(1.0f + ptx::ex2_approx(2.0f * kLog2e * y)), 1.0f);
        return softcap * (fabsf(y) < 0.25f ? series : exponential);
      });
    } else {
      tile::transform(acc, [&](float x) { return x * softmax_scale; });
    }
  }

  // exp(logit - lse) of the backward. lse_log2 is +inf for a row that sees no key: P = 0.
  __device__ __forceinline__ float probability(float logit, float lse_log2) const {
    return ptx::ex2_approx(fmaf(logit, log2_scale, -lse_log2));
  }

  // P times d logit / d (scale * q.k), where that is not P itself: 1 - tanh^2 with softcap. A
  // masked logit is -inf (its tanh is not a number); its P is 0 and stays 0.
  __device__ __forceinline__ float softcap_d_logit(float p, float logit) const {
    const float y = logit * inv_softcap;
    return p == 0.0f ? 0.0f : p * fmaf(-y, y, 1.0f);
  }
};

// How many of a lane's columns of a fragment row, 8*j + e with e in {0, 1}, lie before column
// `end`.
__device__ __forceinline__ int columns_before(int end) { return 2 * (end >> 3) + min(end & 7, 2); }

// Sets to -inf, in one row of a lane's fragment, the scores outside [first, end); both bounds are
// relative to the lane's first column. One bit per column: bits become predicates seven at a time.
template <int kNTiles>
__device__ __forceinline__ void hide_outside(float (&acc)[kNTiles][4], int half, int first,
                                             int end) {
  constexpr int kBits = 2 * kNTiles;
  static_assert(kBits <= 32, "one bit per column");
  const int before_first = min(max(columns_before(first), 0), kBits);
  const int before_end = min(max(columns_before(end), 0), kBits);
  const auto low_bits = [](int n) { return n == 32 ? ~0u : (1u << n) - 1; };
  const uint32_t visible = low_bits(before_end) & ~low_bits(before_first);
#pragma unroll
  for (int j = 0; j < kNTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if ((visible >> (2 * j + e) & 1) == 0) acc[j][2 * half + e] = -INFINITY;
    }
}

// Sets to -inf the scores of a warp's fragment, (16*kMTiles queries from `row0`) x (8*kNTiles keys
// from `col0`), that the band hides.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void apply_mask(float (&acc)[kMTiles][kNTiles][4], const Band& band,
                                           int row0, int col0, int lane) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + 16 * m + tile::acc_row(lane, 2 * half);
      const int lane_col = col0 + tile::acc_col(lane, 0);
      const int first = band.first_key(row) - lane_col;
      const int end = band.end_key(row) - lane_col;
      hide_outside(acc[m], half, first, end);
    }
}

// The same for transposed scores: (16*kMTiles keys from `key0`) x (8*kNTiles queries from `row0`).
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void apply_mask_transposed(float (&acc)[kMTiles][kNTiles][4],
                                                      const Band& band, int key0, int row0,
                                                      int lane) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = key0 + 16 * m + tile::acc_row(lane, 2 * half);
      const int lane_row = row0 + tile::acc_col(lane, 0);
      const int first = band.first_row(key) - lane_row;
      const int end = band.end_row(key) - lane_row;
      hide_outside(acc[m], half, first, end);
    }
}

}  // namespace flashattn_ext
