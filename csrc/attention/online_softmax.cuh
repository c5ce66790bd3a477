// The online softmax of a warp's rows: running maximum m, running denominator l, and the rescaling
// of the unnormalised output O when the maximum moves (Milakov & Gimelshein 2018; deferred
// normalisation as in FlashAttention-2).
#pragma once

#include <cmath>

#include "ptx/math.cuh"

namespace flashattn_ext {

// Row r = 16m + g + 8*half of lane 4g+t is [m][half]. The four lanes of a row share row_max; each
// keeps the part of row_sum that its own columns add, summed over the four only at the end. Where
// the compiler could fuse a multiplication into an addition, the choice is written out: a row's
// bits must not depend on which registers it sits in.
template <int kMTiles>
struct OnlineSoftmax {
  float row_max[kMTiles][2];
  float row_sum[kMTiles][2];

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = -INFINITY;
        row_sum[m][half] = 0.0f;
      }
  }

  // Turns logits into unnormalised probabilities in place and rescales acc_o to the new maximum.
  template <int kNTiles, int kOTiles>
  __device__ __forceinline__ void step(float (&acc_s)[kMTiles][kNTiles][4],
                                       float (&acc_o)[kMTiles][kOTiles][4], float log2_scale) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old_max = row_max[m][half];
        float new_max = old_max;
#pragma unroll
        for (int j = 0; j < kNTiles; ++j)
          new_max = fmaxf(new_max, fmaxf(acc_s[m][j][2 * half], acc_s[m][j][2 * half + 1]));
        new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 1));
        new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 2));
        row_max[m][half] = new_max;
        // A row that has seen nothing yet subtracts 0: 2^(-inf - 0) = 0, never 2^(-inf + inf).
        const float reference = new_max == -INFINITY ? 0.0f : __fmul_rn(new_max, log2_scale);
        // Rounded as `reference` was: a maximum that stays rescales by exactly 1. Fused, the error
        // of the product would come back in every block, and in the same direction.
        const float rescale = ptx::ex2_approx(__fsub_rn(__fmul_rn(old_max, log2_scale), reference));
        float sum = __fmul_rn(row_sum[m][half], rescale);
#pragma unroll
        for (int j = 0; j < kNTiles; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float p =
                ptx::ex2_approx(fmaf(acc_s[m][j][2 * half + e], log2_scale, -reference));
            acc_s[m][j][2 * half + e] = p;
            sum = __fadd_rn(sum, p);
          }
        row_sum[m][half] = sum;
#pragma unroll
        for (int j = 0; j < kOTiles; ++j) {
          acc_o[m][j][2 * half] *= rescale;
          acc_o[m][j][2 * half + 1] *= rescale;
        }
      }
  }

  // Completes row_sum over the row's four lanes; returns 1 / l, or 0 for a row that saw no key,
  // and the row's natural-log LSE (-inf for such a row).
  __device__ __forceinline__ void finish(float (&inv_sum)[kMTiles][2], float (&lse)[kMTiles][2],
                                         float log2_scale) {
    constexpr float kLn2 = 0.6931471805599453f;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = row_sum[m][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const bool empty = sum == 0.0f;  // not where it is not a number
        inv_sum[m][half] = empty ? 0.0f : 1.0f / sum;
        lse[m][half] = empty ? -INFINITY : fmaf(row_max[m][half], log2_scale * kLn2, logf(sum));
      }
  }
};

}  // namespace flashattn_ext
