// Online softmax whose reference moves late. A row's probabilities are taken relative to a
// reference that is set from the row's maximum and then stays, until probabilities would leave the
// range of SoftmaxRange. Nothing is lost by that: 16-bit P, fp32 sums and fp32 O hold a number of
// any size within their exponent range with the same relative precision. The result differs from
// that of OnlineSoftmax by roundings only.
//
// Two kinds of step. `step` finds the block's maximum first, moves the reference where it must, and
// is right for any block. `step_fixed` computes P from the reference as it stands, with no maximum
// and no traffic between lanes. The row sums, which are needed anyway, show whether a row outgrew
// its range: `take_sums` takes them where none did, and `settle` makes good what did. It needs that
// every row has a reference.
//
// A warp's 16 rows; row g + 8*half of lane 4g+t is [half]. Every decision is taken per row, and the
// warp votes only on whether there is something to do: in a step, a row's bits depend on no other,
// and an ignored row has no say in any vote.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "ptx/math.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"

namespace flashattn_ext {

// A new reference lies kHeadroomLog2 factors of two above the row's maximum, and moves again once P
// would pass kLimit. bf16 has fp32's exponents: P starts far below 1 and may grow up to 1, so that
// O is never larger than with the exact maximum. fp16 has few: P starts at 16, so that a P that is
// lost in subnormal numbers is 2^-28 of the row's largest, and has 2^11 to grow.
template <typename Element>
struct SoftmaxRange;
template <>
struct SoftmaxRange<__nv_bfloat16> {
  static constexpr float kHeadroomLog2 = 20.0f, kLimit = 1.0f, kLimitLog2 = 0.0f;
};
template <>
struct SoftmaxRange<__half> {
  static constexpr float kHeadroomLog2 = -4.0f, kLimit = 32768.0f, kLimitLog2 = 15.0f;
};

template <typename Element>
struct LazySoftmax {
  using Range = SoftmaxRange<Element>;

  float reference[2];  // logit * log2_scale; -inf before the row has seen a key
  float row_sum[2];    // this lane's part
  float rescale[2];    // factor for the output where `must_rescale`
  bool must_rescale;   // some row of the warp moved its reference in the last `step`

  __device__ __forceinline__ LazySoftmax()
      : reference{-INFINITY, -INFINITY}, row_sum{0, 0}, rescale{1, 1}, must_rescale(false) {}

  // A row of which nothing is stored, whatever its logits: P = 0 (or not a number), and no move.
  __device__ __forceinline__ void ignore_row(int half) { reference[half] = INFINITY; }

  // Logits to unnormalised probabilities, in place; apply_rescale is to follow.
  template <int kNTiles>
  __device__ __forceinline__ void step(float (&acc_s)[kNTiles][4], float log2_scale) {
    float top[2];
    row_maxima(top, acc_s, log2_scale);
    // -inf - (-inf), a row that still sees nothing, is not a number and compares false.
    const bool moves[2] = {top[0] - reference[0] > Range::kLimitLog2,
                           top[1] - reference[1] > Range::kLimitLog2};
    must_rescale = __any_sync(0xffffffffu, moves[0] || moves[1]);
    if (must_rescale) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = moves[half] ? top[half] + Range::kHeadroomLog2 : reference[half];
        rescale[half] = moves[half] ? ptx::ex2_approx(__fsub_rn(reference[half], next)) : 1.0f;
        row_sum[half] = __fmul_rn(row_sum[half], rescale[half]);
        reference[half] = next;
      }
    }
    const float ref0 = reference[0] == -INFINITY ? 0.0f : reference[0];
    const float ref1 = reference[1] == -INFINITY ? 0.0f : reference[1];
    float part[2];
    probabilities(part, acc_s, log2_scale, ref0, ref1);
    row_sum[0] = __fadd_rn(row_sum[0], part[0]);
    row_sum[1] = __fadd_rn(row_sum[1], part[1]);
  }

  // Every row of the warp can take `step_fixed`.
  __device__ __forceinline__ bool all_have_reference() const {
    return __all_sync(0xffffffffu, fminf(reference[0], reference[1]) > -INFINITY);
  }

  // Brings the output to the reference that the last `step` moved to.
  template <int kOTiles>
  __device__ __forceinline__ void apply_rescale(float (&acc_o)[kOTiles][4]) const {
    if (!must_rescale) return;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_o[j][e] *= rescale[e / 2];
  }

  // Logits to unnormalised probabilities, in place, relative to the reference as it stands, and
  // this lane's part of the block's row sums; `take_sums` is to follow.
  template <int kNTiles>
  __device__ __forceinline__ void step_fixed(float (&part)[2], float (&acc_s)[kNTiles][4],
                                             float log2_scale) const {
    probabilities(part, acc_s, log2_scale, reference[0], reference[1]);
  }

  // Takes the block's row sums, unless some row of the warp outgrew its reference: then false, and
  // `settle` is to follow. A sum that is not a number comes from a logit that is none: no reference
  // would mend it.
  __device__ __forceinline__ bool take_sums(const float (&part)[2]) {
    if (__any_sync(0xffffffffu, part[0] > Range::kLimit || part[1] > Range::kLimit)) return false;
    row_sum[0] = __fadd_rn(row_sum[0], part[0]);
    row_sum[1] = __fadd_rn(row_sum[1], part[1]);
    return true;
  }

  // Takes the block's row sums and moves the references of rows that outgrew them: their P (in
  // acc_s, packed in p), O and sums are scaled. Where P has overflowed to infinity, logits_of(j,
  // logits) computes the logits of 8-key tile j again. Dearer than `step`, which is the better
  // choice for the next block.
  template <int kNTiles, int kOTiles, typename LogitsOf>
  __device__ __forceinline__ void settle(float (&acc_s)[kNTiles][4], uint32_t (&p)[kNTiles / 2][4],
                                         float (&acc_o)[kOTiles][4], float log2_scale,
                                         const LogitsOf& logits_of) {
    // The block's sums once more, from values of which the compiler does not know that it has added
    // them up: kept for this rare case, they would be spilled in every other.
    float part[2];
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_s[j][e] = ptx::opaque(acc_s[j][e]);
    row_sums(part, acc_s);
    // What overflowed becomes minus its logarithm, which no probability is.
    float top[2] = {128.0f, 128.0f};  // a sum of finite ones can overflow, too
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const bool overflowed =
          fmaxf(fmaxf(acc_s[j][0], acc_s[j][1]), fmaxf(acc_s[j][2], acc_s[j][3])) == INFINITY;
      if (__any_sync(0xffffffffu, overflowed)) {
        float logits[4];
        logits_of(j, logits);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (acc_s[j][e] != INFINITY) continue;
          acc_s[j][e] = -fmaf(logits[e], log2_scale, -reference[e / 2]);
          top[e / 2] = fmaxf(top[e / 2], -acc_s[j][e]);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // By how much the row's largest P passes 1, or an upper bound of it: a finite sum is below
      // 2^exponent. By each row's own numbers: its bits must not depend on the warp's others.
      const float most = quad_max(part[half]), logarithm = quad_max(top[half]);
      const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 126;
      const float growth = most == INFINITY ? logarithm : static_cast<float>(exponent);
      const float next = most > Range::kLimit ? reference[half] + (growth + Range::kHeadroomLog2)
                                              : reference[half];
      const float moved = next == reference[half] ? 0.0f : __fsub_rn(next, reference[half]);
      reference[half] = next;
      // In two factors: 2^-moved may be too small a number where P times it is not.
      const float root = ptx::ex2_approx(-0.5f * moved);
      const auto scaled = [&](float x) { return __fmul_rn(__fmul_rn(x, root), root); };
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kNTiles; ++j)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          acc_s[j][e] =
              acc_s[j][e] < 0.0f ? ptx::ex2_approx(-acc_s[j][e] - moved) : scaled(acc_s[j][e]);
          sum = __fadd_rn(sum, acc_s[j][e]);
        }
      // A row that did not move keeps the sum that it has without this branch.
      row_sum[half] = __fadd_rn(scaled(row_sum[half]), moved == 0.0f ? part[half] : sum);
#pragma unroll
      for (int j = 0; j < kOTiles; ++j)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) acc_o[j][e] = scaled(acc_o[j][e]);
    }
#pragma unroll
    for (int kk = 0; kk < kNTiles / 2; ++kk) tile::pack_a_fragment<Element>(p[kk], acc_s, kk);
  }

  // Completes row_sum over the row's four lanes; 1 / l, or 0 for a row that saw no key, and the
  // row's natural-log LSE (-inf for such a row).
  __device__ __forceinline__ void finish(float (&inv_sum)[2], float (&lse)[2]) const {
    constexpr float kLn2 = 0.6931471805599453f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      const bool empty = sum == 0.0f;  // not where it is not a number
      inv_sum[half] = empty ? 0.0f : ptx::rcp_approx(sum);
      lse[half] = empty ? -INFINITY : (reference[half] + ptx::lg2_approx(sum)) * kLn2;
    }
  }

 private:
  __device__ __forceinline__ static float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  }

  // Each row's largest logit times log2_scale. Two independent chains of maxima per row.
  template <int kNTiles>
  __device__ __forceinline__ static void row_maxima(float (&top)[2],
                                                    const float (&acc_s)[kNTiles][4],
                                                    float log2_scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float a = acc_s[0][2 * half], b = acc_s[0][2 * half + 1];
#pragma unroll
      for (int j = 1; j < kNTiles; ++j) {
        a = fmaxf(a, acc_s[j][2 * half]);
        b = fmaxf(b, acc_s[j][2 * half + 1]);
      }
      top[half] = __fmul_rn(quad_max(fmaxf(a, b)), log2_scale);
    }
  }

  template <int kNTiles>
  __device__ __forceinline__ static void probabilities(float (&part)[2], float (&acc_s)[kNTiles][4],
                                                       float log2_scale, float ref0, float ref1) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      acc_s[j][0] = ptx::ex2_approx(fmaf(acc_s[j][0], log2_scale, -ref0));
      acc_s[j][1] = ptx::ex2_approx(fmaf(acc_s[j][1], log2_scale, -ref0));
      acc_s[j][2] = ptx::ex2_approx(fmaf(acc_s[j][2], log2_scale, -ref1));
      acc_s[j][3] = ptx::ex2_approx(fmaf(acc_s[j][3], log2_scale, -ref1));
    }
    row_sums(part, acc_s);
  }

  // This lane's part of each row's sum.
  template <int kNTiles>
  __device__ __forceinline__ static void row_sums(float (&part)[2],
                                                  const float (&acc_s)[kNTiles][4]) {
    float sum[4] = {acc_s[0][0], acc_s[0][1], acc_s[0][2], acc_s[0][3]};
#pragma unroll
    for (int j = 1; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = __fadd_rn(sum[e], acc_s[j][e]);
    part[0] = __fadd_rn(sum[0], sum[1]);
    part[1] = __fadd_rn(sum[2], sum[3]);
  }
};

}  // namespace flashattn_ext
