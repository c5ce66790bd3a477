// OnlineSoftmax over several blocks of keys against a whole row in double precision.
#include <cmath>

#include "attention/online_softmax.cuh"
#include "fragment_io.cuh"
#include "harness.h"

namespace flashattn_ext::testing {
namespace {

constexpr int kNTiles = 4;
constexpr int kCols = 8 * kNTiles;  // keys of a block, and columns of O

// One warp. `logits` is (steps, 16*kMTiles, kCols). O gains P itself in every step, as if V were
// the identity: column c of O is the sum over the blocks of the probabilities of key c of the
// block.
template <int kMTiles>
__global__ void softmax_kernel(const float* logits, int steps, float log2_scale, float* out,
                               float* lse_rows) {
  OnlineSoftmax<kMTiles> softmax;
  float acc_o[kMTiles][kNTiles][4];
  for (int m = 0; m < kMTiles; ++m)
    for (int j = 0; j < kNTiles; ++j)
      for (int e = 0; e < 4; ++e) acc_o[m][j][e] = 0.0f;
  for (int step = 0; step < steps; ++step) {
    float acc_s[kMTiles][kNTiles][4];
    read_fragment(acc_s, logits + step * 16 * kMTiles * kCols);
    softmax.step(acc_s, acc_o, log2_scale);
    for (int m = 0; m < kMTiles; ++m)
      for (int j = 0; j < kNTiles; ++j)
        for (int e = 0; e < 4; ++e) acc_o[m][j][e] += acc_s[m][j][e];
  }
  float inv_sum[kMTiles][2], lse[kMTiles][2];
  softmax.finish(inv_sum, lse, log2_scale);
  const int lane = threadIdx.x;
  for (int m = 0; m < kMTiles; ++m)
    for (int half = 0; half < 2; ++half) {
      for (int j = 0; j < kNTiles; ++j)
        for (int e = 0; e < 2; ++e) acc_o[m][j][2 * half + e] *= inv_sum[m][half];
      // Every lane of a row must know the same LSE; each writes its own.
      lse_rows[(16 * m + 8 * half + lane / 4) * 4 + lane % 4] = lse[m][half];
    }
  write_fragment(acc_o, out);
}

struct Result {
  std::vector<float> out;  // (rows, kCols)
  std::vector<float> lse;  // (rows, 4): one of each lane
};

template <int kMTiles>
Result run(const std::vector<float>& logits, float log2_scale) {
  constexpr int kRows = 16 * kMTiles;
  const int steps = static_cast<int>(logits.size()) / (kRows * kCols);
  const DeviceBuffer<float> gLogits(logits);
  DeviceBuffer<float> out(kRows * kCols), lse(kRows * 4);
  launch({}, softmax_kernel<kMTiles>, gLogits.data(), steps, log2_scale, out.data(), lse.data());
  return {out.to_host(), lse.to_host()};
}

// The rounded maximum times log2_scale is off by 2^-24 of itself, and every factor 2^x by 2^-22:
// relative to the row's scale that stays below 5e-6 + 1e-6 * max |logit|.
template <int kMTiles>
void check_rows(const std::vector<float>& logits, float log2_scale, const char* what) {
  constexpr int kRows = 16 * kMTiles;
  const int steps = static_cast<int>(logits.size()) / (kRows * kCols);
  const Result actual = run<kMTiles>(logits, log2_scale);
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
    const double relative = 5e-6 + (empty ? 0.0 : 1e-6 * std::abs(max));
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

template <int kMTiles>
std::vector<float> random_logits(int steps, int magnitude, uint32_t seed) {
  std::vector<float> logits =
      random_integers<float>(steps * 16 * kMTiles * kCols, -64 * magnitude, 64 * magnitude, seed);
  for (float& x : logits) x /= 64.0f;
  return logits;
}

template <int kMTiles>
void test_random() {
  check_rows<kMTiles>(random_logits<kMTiles>(1, 3, 1), 1.0f, "one block");
  check_rows<kMTiles>(random_logits<kMTiles>(5, 3, 2), 0.7f, "five blocks");
  check_rows<kMTiles>(random_logits<kMTiles>(5, 40, 3), 0.5f, "five peaky blocks");
  std::vector<float> logits = random_logits<kMTiles>(4, 3, 4);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += i % 3 == 0 ? 5000.0f : 4995.0f;
  check_rows<kMTiles>(logits, 1.0f, "a large offset");
}

const DeviceTest random_1("softmax.random.one_row_tile", test_random<1>);
const DeviceTest random_2("softmax.random.two_row_tiles", test_random<2>);

// Rows by their number modulo 8: 0 sees nothing at all; 1 nothing in the first block, 2 in the
// last, 3 in the middle; 4 sees one key; 5 one key of the first block only; others everything.
template <int kMTiles>
void test_masked() {
  constexpr int kSteps = 3, kRows = 16 * kMTiles;
  std::vector<float> logits = random_logits<kMTiles>(kSteps, 8, 5);
  for (int step = 0; step < kSteps; ++step)
    for (int row = 0; row < kRows; ++row)
      for (int col = 0; col < kCols; ++col) {
        const bool hidden[8] = {true,      step == 0, step == 2,
                                step == 1, col != 9,  step != 0 || col != (row + 3) % kCols,
                                false,     false};
        if (hidden[row % 8]) logits[(step * kRows + row) * kCols + col] = -INFINITY;
      }
  check_rows<kMTiles>(logits, 0.9f, "masked rows");
}

const DeviceTest masked_1("softmax.masked.one_row_tile", test_masked<1>);
const DeviceTest masked_2("softmax.masked.two_row_tiles", test_masked<2>);

// No block at all: a query block that no key block is visible from.
const DeviceTest no_blocks("softmax.no_blocks", [] {
  const Result actual = run<1>({}, 1.0f);
  check_equal(actual.out, std::vector<float>(16 * kCols, 0.0f), kCols, "O");
  check_equal(actual.lse, std::vector<float>(16 * 4, -INFINITY), 4, "lse");
});

// A row whose maximum rises in every block: O is rescaled every time, the last block dominates.
const DeviceTest rising("softmax.rising_maximum", [] {
  constexpr int kSteps = 6;
  std::vector<float> logits(kSteps * 16 * kCols);
  for (size_t i = 0; i < logits.size(); ++i) {
    const int step = static_cast<int>(i) / (16 * kCols), row = static_cast<int>(i) / kCols % 16;
    logits[i] = (row % 2 == 0 ? 1 : -1) * 4.0f * step + (i % kCols) / 32.0f;
  }
  check_rows<1>(logits, 1.0f, "rising and falling maxima");
});

// Many blocks whose maximum never moves: the rescaling must be by exactly 1, or its rounding error,
// of the same sign every time, adds up.
const DeviceTest unchanged("softmax.unchanged_maximum", [] {
  std::vector<float> logits = random_logits<1>(512, 3, 6);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += i < 16 * kCols ? 57.0f : 50.0f;
  check_rows<1>(logits, 1.3f, "an early maximum");
});

// Rows by their number modulo 8: 0 to 5 have no softmax, which must show in O and the LSE as NaN
// and never as the 0 and -inf of a row that sees no key, as 6 is; 7 is what it is beside finite
// rows.
const DeviceTest not_a_number("softmax.not_a_number", [] {
  constexpr int kSteps = 3, kRows = 16;
  std::vector<float> logits = random_logits<1>(kSteps, 3, 7);
  const Result finite = run<1>(logits, 1.1f);
  for (int step = 0; step < kSteps; ++step)
    for (int row = 0; row < kRows; ++row) {
      float* row_logits = &logits[(step * kRows + row) * kCols];
      const int kind = row % 8, col = (5 * row + 1) % kCols;
      if (kind == 2) std::fill_n(row_logits, kCols, NAN);
      if (kind == 3 || kind == 6) std::fill_n(row_logits, kCols, -INFINITY);
      if ((kind == 0 && step == 0) || ((kind == 1 || kind == 3) && step == 1))
        row_logits[col] = NAN;
      if ((kind == 4 && step == 0) || (kind == 5 && step == 2)) row_logits[col] = INFINITY;
    }
  const Result actual = run<1>(logits, 1.1f);
  const auto check_row = [](const std::vector<float>& got, const std::vector<float>& ordinary,
                            int width, int row, float of_no_key, const char* what) {
    for (int i = row * width; i < (row + 1) * width; ++i) {
      const float wanted = row % 8 < 6 ? NAN : row % 8 == 6 ? of_no_key : ordinary[i];
      check(std::isnan(wanted) ? std::isnan(got[i]) : got[i] == wanted,
            "%s of row %d, %d: got %.9g, wanted %.9g", what, row, i % width, got[i], wanted);
    }
  };
  for (int row = 0; row < kRows; ++row) {
    check_row(actual.out, finite.out, kCols, row, 0.0f, "O");
    check_row(actual.lse, finite.lse, 4, row, -INFINITY, "lse");
  }
});

}  // namespace
}  // namespace flashattn_ext::testing
