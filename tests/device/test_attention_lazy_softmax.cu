// LazySoftmax over several blocks of keys: its probabilities step by step against the reference it
// says it has, when that reference moves, and the whole row in double precision.
#include <cmath>

#include "attention/lazy_softmax.cuh"
#include "fragment_io.cuh"
#include "harness.h"

namespace flashattn_ext::testing {
namespace {

constexpr int kRows = 16;
constexpr int kNTiles = 4;
constexpr int kCols = 8 * kNTiles;  // keys of a block, and columns of O
constexpr int kSize = kRows * kCols;

// One warp. `logits` is (steps, kRows, kCols) and so is `probabilities`, what each step made of
// them. `references` is (steps, kRows, 4) and `rescaled` (steps): the state after each step. O
// gains P itself in every step, as if V were the identity.
__global__ void lazy_softmax_kernel(const float* logits, int steps, float log2_scale,
                                    float* probabilities, float* references, int* rescaled,
                                    float* out, float* lse_rows) {
  const int lane = threadIdx.x;
  // Every lane of a row must know the same; each writes its own.
  const auto row_slot = [&](int half) { return (8 * half + lane / 4) * 4 + lane % 4; };
  LazySoftmax softmax;
  float acc_o[1][kNTiles][4] = {};
  for (int step = 0; step < steps; ++step) {
    float acc_s[1][kNTiles][4];
    read_fragment(acc_s, logits + step * kSize);
    softmax.step(acc_s[0], log2_scale);
    softmax.apply_rescale(acc_o[0]);
    for (int j = 0; j < kNTiles; ++j)
      for (int e = 0; e < 4; ++e) acc_o[0][j][e] += acc_s[0][j][e];
    write_fragment(acc_s, probabilities + step * kSize);
    for (int half = 0; half < 2; ++half) {
      references[step * kRows * 4 + row_slot(half)] = softmax.reference[half];
    }
    if (lane == 0) rescaled[step] = softmax.must_rescale;
  }
  float inv_sum[2], lse[2];
  softmax.finish(inv_sum, lse, log2_scale);
  for (int half = 0; half < 2; ++half) {
    for (int j = 0; j < kNTiles; ++j)
      for (int e = 0; e < 2; ++e) acc_o[0][j][2 * half + e] *= inv_sum[half];
    lse_rows[row_slot(half)] = lse[half];
  }
  write_fragment(acc_o, out);
}

struct Result {
  std::vector<float> probabilities;  // (steps, kRows, kCols)
  std::vector<float> references;     // (steps, kRows, 4): one of each lane
  std::vector<int> rescaled;         // (steps)
  std::vector<float> out;            // (kRows, kCols)
  std::vector<float> lse;            // (kRows, 4)
};

Result run(const std::vector<float>& logits, float log2_scale) {
  const int steps = static_cast<int>(logits.size()) / kSize;
  const DeviceBuffer<float> gLogits(logits);
  DeviceBuffer<float> probabilities(logits.size()), references(steps * kRows * 4);
  DeviceBuffer<float> out(kSize), lse(kRows * 4);
  DeviceBuffer<int> rescaled(steps);
  launch({}, lazy_softmax_kernel, gLogits.data(), steps, log2_scale, probabilities.data(),
         references.data(), rescaled.data(), out.data(), lse.data());
  return {probabilities.to_host(), references.to_host(), rescaled.to_host(), out.to_host(),
          lse.to_host()};
}

// ---- Each step ----

// 2^x errs by 2^-22 of itself, and by as much as x does: two roundings of logit * log2_scale.
double probability_tolerance(double logit, double reference, double log2_scale) {
  return 1e-6 + 0x1p-23 * std::abs(log2_scale) * (std::abs(logit) + std::abs(reference));
}

// A row's reference is its running maximum or stays what it was; it is never more than the slack
// behind, and nothing moves while no row of the warp is further behind. P is relative to it.
void check_steps(const std::vector<float>& logits, float log2_scale, const Result& actual,
                 const char* what) {
  const int steps = static_cast<int>(logits.size()) / kSize;
  std::vector<float> maxima(kRows, -INFINITY), references(kRows, -INFINITY);
  for (int step = 0; step < steps; ++step) {
    bool some_row_is_behind = false;
    for (int row = 0; row < kRows; ++row) {
      const float* row_logits = &logits[(step * kRows + row) * kCols];
      for (int col = 0; col < kCols; ++col) maxima[row] = std::max(maxima[row], row_logits[col]);
      some_row_is_behind |= (maxima[row] - references[row]) * log2_scale > LazySoftmax::kSlackLog2;
    }
    check((actual.rescaled[step] != 0) == some_row_is_behind,
          "%s: step %d: must_rescale is %d although %s row has outgrown the slack", what, step,
          actual.rescaled[step], some_row_is_behind ? "some" : "no");
    for (int row = 0; row < kRows; ++row) {
      const float old_reference = references[row];
      const float* now = &actual.references[(step * kRows + row) * 4];
      for (int lane = 0; lane < 4; ++lane) {
        check(now[lane] == old_reference || (some_row_is_behind && now[lane] == maxima[row]),
              "%s: step %d, row %d, lane %d: the reference is %.9g, wanted %.9g%s", what, step, row,
              lane, now[lane], old_reference, some_row_is_behind ? " or the maximum" : "");
        check(now[lane] == now[0], "%s: step %d, row %d: lanes disagree on the reference", what,
              step, row);
      }
      references[row] = now[0];
      const bool empty = maxima[row] == -INFINITY;
      check(
          empty || (maxima[row] - now[0]) * log2_scale <= LazySoftmax::kSlackLog2,
          "%s: step %d, row %d: the reference is %.9g, more than the slack below the maximum %.9g",
          what, step, row, now[0], maxima[row]);
      for (int col = 0; col < kCols; ++col) {
        const int i = (step * kRows + row) * kCols + col;
        const double logit = logits[i];
        const bool hidden = logit == -INFINITY;
        const double expected = hidden ? 0.0 : std::exp2((logit - now[0]) * log2_scale);
        const double relative = hidden ? 0.0 : probability_tolerance(logit, now[0], log2_scale);
        check(std::abs(actual.probabilities[i] - expected) <= relative * expected + 1e-37,
              "%s: step %d: P(%d, %d): got %.9g, wanted %.9g within a relative %.2g", what, step,
              row, col, actual.probabilities[i], expected, relative);
      }
    }
  }
}

// ---- The whole row ----

// O and the LSE do not show what the reference was. Every term of O carries the error of its P and
// of at most one rescaling per step; so does their sum.
void check_rows(const std::vector<float>& logits, float log2_scale, const Result& actual,
                const char* what) {
  const int steps = static_cast<int>(logits.size()) / kSize;
  const double scale = log2_scale * std::log(2.0);
  for (int row = 0; row < kRows; ++row) {
    const auto logit = [&](int step, int col) {
      return scale * logits[(step * kRows + row) * kCols + col];
    };
    double max = -INFINITY, sum = 0.0;
    for (int step = 0; step < steps; ++step)
      for (int col = 0; col < kCols; ++col) max = std::max(max, logit(step, col));
    const bool empty = max == -INFINITY;
    for (int step = 0; step < steps; ++step)
      for (int col = 0; col < kCols; ++col) sum += empty ? 0.0 : std::exp(logit(step, col) - max);
    const double lse = empty ? -INFINITY : max + std::log(sum);
    const double relative = 1e-5 + (empty ? 0.0 : 1e-6 * std::abs(max));
    for (int lane = 0; lane < 4; ++lane) {
      const float got = actual.lse[4 * row + lane];
      check(empty ? got == -INFINITY : std::abs(got - lse) <= 1e-5 + 1e-6 * std::abs(lse),
            "%s: lse of row %d in lane %d: got %.9g, wanted %.9g", what, row, lane, got, lse);
    }
    for (int col = 0; col < kCols; ++col) {
      double expected = 0.0;
      for (int step = 0; step < steps && !empty; ++step) {
        expected += std::exp(logit(step, col) - lse);
      }
      const float got = actual.out[row * kCols + col];
      check(empty ? got == 0.0f : std::abs(got - expected) <= relative * expected + 1e-30,
            "%s: O(%d, %d): got %.9g, wanted %.9g within a relative %.2g", what, row, col, got,
            expected, relative);
    }
  }
}

Result check_all(const std::vector<float>& logits, float log2_scale, const char* what) {
  const Result actual = run(logits, log2_scale);
  check_steps(logits, log2_scale, actual, what);
  check_rows(logits, log2_scale, actual, what);
  return actual;
}

// Multiples of 1/64 up to `magnitude`.
std::vector<float> random_logits(int steps, int magnitude, uint32_t seed) {
  std::vector<float> logits =
      random_integers<float>(steps * kSize, -64 * magnitude, 64 * magnitude, seed);
  for (float& x : logits) x /= 64.0f;
  return logits;
}

const DeviceTest random_rows("lazy_softmax.random", [] {
  check_all(random_logits(1, 3, 1), 1.0f, "one block");
  check_all(random_logits(5, 3, 2), 0.7f, "five blocks");
  check_all(random_logits(5, 40, 3), 0.5f, "five peaky blocks");
  std::vector<float> logits = random_logits(4, 3, 4);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += i % 3 == 0 ? 5000.0f : 4995.0f;
  check_all(logits, 1.0f, "a large offset");
});

// Rows by their number modulo 8: 0 sees nothing at all; 1 nothing in the first block, 2 in the
// last, 3 in the middle; 4 sees one key; 5 one key of the first block only; others everything.
const DeviceTest masked_rows("lazy_softmax.masked", [] {
  constexpr int kSteps = 3;
  std::vector<float> logits = random_logits(kSteps, 8, 5);
  for (int step = 0; step < kSteps; ++step)
    for (int row = 0; row < kRows; ++row)
      for (int col = 0; col < kCols; ++col) {
        const bool hidden[8] = {true,      step == 0, step == 2,
                                step == 1, col != 9,  step != 0 || col != (row + 3) % kCols,
                                false,     false};
        if (hidden[row % 8]) logits[(step * kRows + row) * kCols + col] = -INFINITY;
      }
  check_all(logits, 0.9f, "masked rows");
});

const DeviceTest nothing_visible("lazy_softmax.nothing_visible", [] {
  const std::vector<float> hidden(2 * kSize, -INFINITY);
  const Result actual = check_all(hidden, 1.0f, "two hidden blocks");
  check_equal(actual.rescaled, {0, 0}, 1, "rescaled in (step, 0)");
  const Result none = run({}, 1.0f);
  check_equal(none.out, std::vector<float>(kSize, 0.0f), kCols, "O of no block");
  check_equal(none.lse, std::vector<float>(kRows * 4, -INFINITY), 4, "lse of no block");
});

// Blocks of equal logits that grow by exactly the slack, which moves nothing and makes P 2^8, and
// by a little more, which does and makes it 1.
const DeviceTest slack("lazy_softmax.slack", [] {
  const float levels[] = {1.0f, 9.0f, 9.25f, 5.0f, 17.25f, 17.5f};
  const std::vector<int> rescaled = {1, 0, 1, 0, 0, 1};
  const float log2_p[] = {0.0f, 8.0f, 0.0f, -4.25f, 8.0f, 0.0f};
  std::vector<float> logits;
  for (const float level : levels) logits.insert(logits.end(), kSize, level);
  for (const float log2_scale : {1.0f, 0.25f}) {
    std::vector<float> scaled = logits;
    for (float& x : scaled) x /= log2_scale;
    const Result actual = check_all(scaled, log2_scale, "growth to and beyond the slack");
    check_equal(actual.rescaled, rescaled, 1, "rescaled in (step, 0)");
    for (size_t step = 0; step < rescaled.size(); ++step) {
      const double expected = std::exp2(log2_p[step]), got = actual.probabilities[step * kSize];
      check(std::abs(got - expected) <= 1e-6 * expected, "P of step %zu: got %.9g, wanted %.9g",
            step, got, expected);
    }
  }
});

// Maxima that rise in every block and others that fall, slowly and fast, in one warp.
const DeviceTest growth("lazy_softmax.growth", [] {
  constexpr int kSteps = 8;
  std::vector<float> logits(kSteps * kSize);
  for (size_t i = 0; i < logits.size(); ++i) {
    const int step = static_cast<int>(i) / kSize, row = static_cast<int>(i) / kCols % kRows;
    logits[i] = (row - 7) * 1.5f * step + (i % kCols) / 32.0f;
  }
  check_all(logits, 1.0f, "rising and falling maxima");
  for (float& x : logits) x /= 16.0f;
  check_all(logits, 1.0f, "slowly rising and falling maxima");
});

// Rows of one warp are computed alone: what the second half of them holds, here a maximum that
// outgrows the slack in every block, leaves no trace in the bits of the first half. Rows behind a
// sequence's end in its last tile are another sequence's.
const DeviceTest rows_alone("lazy_softmax.rows_are_computed_alone", [] {
  constexpr int kSteps = 6;
  std::vector<float> logits = random_logits(kSteps, 2, 6);
  const auto half_of = [](const std::vector<float>& values) {
    return std::vector<float>(values.begin(), values.begin() + values.size() / 2);
  };
  const Result wanted = run(logits, 1.3f);
  for (int step = 0; step < kSteps; ++step)
    for (int i = kSize / 2; i < kSize; ++i) logits[step * kSize + i] += 10.0f * step;
  const Result actual = check_all(logits, 1.3f, "a growing half");
  check_equal(half_of(actual.out), half_of(wanted.out), kCols, "O beside a growing half");
  check_equal(half_of(actual.lse), half_of(wanted.lse), 4, "lse beside a growing half");
});

}  // namespace
}  // namespace flashattn_ext::testing
