// What the tests of LazySoftmax share: a warp's rows of logits in blocks of keys, and the whole
// rows in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "fragment_io.cuh"
#include "harness.h"

namespace flashattn_ext::testing {

inline constexpr int kRows = 16;
inline constexpr int kNTiles = 4;
inline constexpr int kCols = 8 * kNTiles;  // keys of a block, and columns of O
inline constexpr int kSize = kRows * kCols;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Where a lane keeps what it knows of its row g + 8*half: every lane of a row must know the same.
__device__ inline int row_slot(int half) {
  const int lane = threadIdx.x % 32;
  return (8 * half + lane / 4) * 4 + lane % 4;
}

// The end of a warp's rows: O is normalised and leaves with the LSE of each lane.
template <class Softmax>
__device__ void write_rows(const Softmax& softmax, float (&acc_o)[1][kNTiles][4], float* out,
                           float* lse_rows) {
  float inv_sum[2], lse[2];
  softmax.finish(inv_sum, lse);
  for (int half = 0; half < 2; ++half) {
    for (int j = 0; j < kNTiles; ++j)
      for (int e = 0; e < 2; ++e) acc_o[0][j][2 * half + e] *= inv_sum[half];
    lse_rows[row_slot(half)] = lse[half];
  }
  write_fragment(acc_o, out);
}

// What a kernel leaves behind. O gains P itself in every step, as if V were the identity.
struct LazyResult {
  std::vector<float> probabilities;  // (steps, kRows, kCols): P of each step, in fp32
  std::vector<float> references;     // (steps, kRows, 4): after each step, one of each lane
  std::vector<float> out;            // (kRows, kCols)
  std::vector<float> lse;            // (kRows, 4)

  float reference(int step, int row) const { return references[(step * kRows + row) * 4]; }
};

inline int num_steps(const std::vector<float>& logits) {
  return static_cast<int>(logits.size()) / kSize;
}

// Multiples of 1/64 up to `magnitude`.
inline std::vector<float> random_logits(int steps, int magnitude, uint32_t seed) {
  std::vector<float> logits =
      random_integers<float>(steps * kSize, -64 * magnitude, 64 * magnitude, seed);
  for (float& x : logits) x /= 64.0f;
  return logits;
}

// Bits, which are equal where NaN are.
inline std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), 4 * values.size());
  return bits;
}

// Every lane of a row knows the row's reference.
inline void check_lanes_agree(const LazyResult& actual, int step, int row, const char* what) {
  const std::vector<uint32_t> bits = bits_of(actual.references);
  const uint32_t* lanes = &bits[(step * kRows + row) * 4];
  for (int lane = 1; lane < 4; ++lane) {
    check(lanes[lane] == lanes[0], "%s: step %d, row %d: lanes 0 and %d disagree on the reference",
          what, step, row, lane);
  }
}

// P of one step relative to the reference that the row has after it. Exponents have magnitudes that
// sum up to `reach` on their way and are rounded to 2^-24 of that; 2^x errs by 2^-22 of itself, and
// may be flushed to 0 below 2^-126.
inline void check_probability(float got, double exponent, double reach, const char* what, int step,
                              int row, int col) {
  const double expected = std::exp2(exponent);
  if (std::isnan(expected)) {
    check(std::isnan(got), "%s: step %d: P(%d, %d): got %.9g, wanted NaN", what, step, row, col,
          got);
    return;
  }
  const double relative = expected == 0.0 ? 0.0 : 0x1p-20 + 0x1p-24 * reach;
  check(std::abs(got - expected) <= relative * expected + 1e-37,
        "%s: step %d: P(%d, %d): got %.9g, wanted %.9g within a relative %.2g", what, step, row,
        col, got, expected, relative);
}

// O and the LSE against the whole rows in double precision. They do not show what the reference
// was, but for roundings. In units of log2, a term's exponent passes through x - (an older
// reference) and (the last reference) - (that one): each is rounded once, and by as much as it is
// large. Per step there are 2^x of P and up to two factors of 2^x for what came before, of 2^-22
// each, and the roundings of two products and a sum. `p_rounding`: the relative rounding of P on
// its way to O, which the sum l does not see. A row with a logit that is NaN or +inf has no
// softmax: O and LSE are NaN. A row that sees no key has O = 0 and LSE = -inf.
inline void check_rows(const std::vector<float>& logits, float log2_scale, double p_rounding,
                       const LazyResult& actual, const char* what) {
  const int steps = num_steps(logits);
  const double base = (8 + 4 * steps) * 0x1p-22, ln2 = std::log(2.0);
  for (int row = 0; row < kRows; ++row) {
    const auto x = [&](int step, int col) {
      return double{log2_scale} * logits[(step * kRows + row) * kCols + col];
    };
    double max = -INFINITY, sum = 0.0;
    bool is_number = true;
    for (int step = 0; step < steps; ++step)
      for (int col = 0; col < kCols; ++col) {
        is_number &= x(step, col) < INFINITY;
        max = std::max(max, x(step, col));
      }
    const bool empty = max == -INFINITY;
    for (int step = 0; step < steps; ++step)
      for (int col = 0; col < kCols; ++col) sum += empty ? 0.0 : std::exp2(x(step, col) - max);
    const double lse = empty ? -INFINITY : max + std::log2(sum);  // in log2

    double moved = 0.0, last = -INFINITY;  // how far the reference went, and where to
    for (int step = 0; step < steps; ++step) {
      const double now = actual.reference(step, row);
      if (last != -INFINITY) moved += now - last;
      last = now;
    }
    const auto weight = [&](int step, int col) {
      return empty ? 0.0 : std::exp2(x(step, col) - lse);
    };
    const auto term_error = [&](int step, int col) {
      return base + 0x1p-24 * (std::abs(last - x(step, col)) + 2.0 * moved);
    };
    double sum_error = 0.0;  // relative
    for (int step = 0; step < steps; ++step)
      for (int col = 0; col < kCols; ++col) {
        const double w = weight(step, col);
        if (w > 0.0) sum_error += w * term_error(step, col);
      }

    for (int lane = 0; lane < 4; ++lane) {
      const float got = actual.lse[4 * row + lane];
      const double tolerance = 4e-6 + sum_error + 0x1p-22 * std::abs(ln2 * lse);
      const bool right = !is_number ? std::isnan(got)
                         : empty    ? got == -INFINITY
                                    : std::abs(got - ln2 * lse) <= tolerance;
      check(right, "%s: lse of row %d in lane %d: got %.9g, wanted %.9g within %.2g", what, row,
            lane, got, is_number ? ln2 * lse : NAN, tolerance);
    }
    for (int col = 0; col < kCols; ++col) {
      double expected = 0.0, tolerance = 0.0;
      for (int step = 0; step < steps; ++step) {
        const double w = weight(step, col);
        expected += w;
        if (w > 0.0) tolerance += w * (p_rounding + term_error(step, col) + sum_error);
      }
      const float got = actual.out[row * kCols + col];
      const bool right = !is_number ? std::isnan(got)
                         : empty    ? got == 0.0f
                                    : std::abs(got - expected) <= tolerance + 1e-30;
      check(right, "%s: O(%d, %d): got %.9g, wanted %.9g within %.2g", what, row, col, got,
            is_number ? expected : NAN, tolerance);
    }
  }
}

}  // namespace flashattn_ext::testing
