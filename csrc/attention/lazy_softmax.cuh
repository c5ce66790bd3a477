// Online softmax whose reference moves late: a row's probabilities are taken relative to a
// reference that follows the running maximum only when that has grown past it by more than a factor
// of 2^kSlackLog2. Until then P is up to 2^kSlackLog2 instead of 1, which fp32 sums and 16-bit P
// hold with the same relative precision, and the output needs no rescaling. The result differs from
// that of OnlineSoftmax by roundings only.
//
// One 16-row tile per warp; row g + 8*half of lane 4g+t is [half].
#pragma once

#include <cmath>

#include "ptx/math.cuh"

namespace flashattn_ext {

struct LazySoftmax {
  static constexpr float kSlackLog2 = 8.0f;

  float reference[2];  // in logits; -inf before the row has seen a key
  float row_sum[2];    // this lane's part
  float rescale[2];    // factor for the output where `must_rescale`
  bool must_rescale;   // some row of the warp moved its reference in the last step

  __device__ __forceinline__ LazySoftmax()
      : reference{-INFINITY, -INFINITY}, row_sum{0, 0}, rescale{1, 1}, must_rescale(false) {}

  // Logits to unnormalised probabilities, in place.
  template <int kNTiles>
  __device__ __forceinline__ void step(float (&acc_s)[kNTiles][4], float log2_scale) {
    float new_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Two independent chains of maxima, then the row's four lanes.
      float a = acc_s[0][2 * half], b = acc_s[0][2 * half + 1];
#pragma unroll
      for (int j = 1; j < kNTiles; ++j) {
        a = fmaxf(a, acc_s[j][2 * half]);
        b = fmaxf(b, acc_s[j][2 * half + 1]);
      }
      a = fmaxf(a, b);
      a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 2));
      a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 1));
      new_max[half] = fmaxf(a, reference[half]);
    }
    // -inf - (-inf), a row that still sees nothing, is not a number and compares false.
    const bool moves[2] = {(new_max[0] - reference[0]) * log2_scale > kSlackLog2,
                           (new_max[1] - reference[1]) * log2_scale > kSlackLog2};
    must_rescale = __any_sync(0xffffffffu, moves[0] || moves[1]);
    if (must_rescale) {
      // Row by row: a row's bits must not depend on the other rows of its warp.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = moves[half] ? new_max[half] : reference[half];
        // The difference of the rounded references that P is taken relative to: what the two round
        // to cancels out, however large the logits are.
        rescale[half] = moves[half]
                            ? ptx::ex2_approx(__fsub_rn(__fmul_rn(reference[half], log2_scale),
                                                        __fmul_rn(next, log2_scale)))
                            : 1.0f;
        row_sum[half] = __fmul_rn(row_sum[half], rescale[half]);
        reference[half] = next;
      }
    }
    const float ref0 = reference[0] == -INFINITY ? 0.0f : __fmul_rn(reference[0], log2_scale);
    const float ref1 = reference[1] == -INFINITY ? 0.0f : __fmul_rn(reference[1], log2_scale);
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      acc_s[j][0] = ptx::ex2_approx(fmaf(acc_s[j][0], log2_scale, -ref0));
      acc_s[j][1] = ptx::ex2_approx(fmaf(acc_s[j][1], log2_scale, -ref0));
      acc_s[j][2] = ptx::ex2_approx(fmaf(acc_s[j][2], log2_scale, -ref1));
      acc_s[j][3] = ptx::ex2_approx(fmaf(acc_s[j][3], log2_scale, -ref1));
    }
    float sum[4] = {acc_s[0][0], acc_s[0][1], acc_s[0][2], acc_s[0][3]};
#pragma unroll
    for (int j = 1; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = __fadd_rn(sum[e], acc_s[j][e]);
    row_sum[0] = __fadd_rn(row_sum[0], __fadd_rn(sum[0], sum[1]));
    row_sum[1] = __fadd_rn(row_sum[1], __fadd_rn(sum[2], sum[3]));
  }

  // Brings the output to the reference that the last step moved to.
  template <int kOTiles>
  __device__ __forceinline__ void apply_rescale(float (&acc_o)[kOTiles][4]) const {
    if (!must_rescale) return;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
      acc_o[j][0] *= rescale[0];
      acc_o[j][1] *= rescale[0];
      acc_o[j][2] *= rescale[1];
      acc_o[j][3] *= rescale[1];
    }
  }

  // Completes row_sum over the row's four lanes; 1 / l, or 0 for a row that saw no key, and the
  // row's natural-log LSE (-inf for such a row).
  __device__ __forceinline__ void finish(float (&inv_sum)[2], float (&lse)[2],
                                         float log2_scale) const {
    constexpr float kLn2 = 0.6931471805599453f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      const bool empty = reference[half] == -INFINITY;
      inv_sum[half] = empty ? 0.0f : 1.0f / sum;
      lse[half] = empty ? -INFINITY : fmaf(reference[half], log2_scale * kLn2, logf(sum));
    }
  }
};

}  // namespace flashattn_ext
