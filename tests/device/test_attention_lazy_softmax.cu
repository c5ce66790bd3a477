// LazySoftmax::step over several blocks of keys: its probabilities step by step against the
// reference it says it has, when that reference moves, and the whole row in double precision.
#include "attention/lazy_softmax.cuh"
#include "lazy_rows.h"

namespace flashattn_ext::testing {
namespace {

// One warp. `logits` is (steps, kRows, kCols); `rescaled` (steps): whether O was.
template <typename Element>
__global__ void lazy_softmax_kernel(const float* logits, int steps, float log2_scale,
                                    float* probabilities, float* references, int* rescaled,
                                    float* out, float* lse_rows) {
  LazySoftmax<Element> softmax;
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
    if (threadIdx.x == 0) rescaled[step] = softmax.must_rescale;
  }
  write_rows(softmax, acc_o, out, lse_rows);
}

struct Result : LazyResult {
  std::vector<int> rescaled;  // (steps)
};

template <typename Element>
Result run(const std::vector<float>& logits, float log2_scale) {
  const int steps = num_steps(logits);
  const DeviceBuffer<float> gLogits(logits);
  DeviceBuffer<float> probabilities(logits.size()), references(steps * kRows * 4);
  DeviceBuffer<float> out(kSize), lse(kRows * 4);
  DeviceBuffer<int> rescaled(steps);
  launch({}, lazy_softmax_kernel<Element>, gLogits.data(), steps, log2_scale, probabilities.data(),
         references.data(), rescaled.data(), out.data(), lse.data());
  return {{probabilities.to_host(), references.to_host(), out.to_host(), lse.to_host()},
          rescaled.to_host()};
}

// ---- Each step ----

// A row's reference is -inf before the row sees a key. It moves where the block's maximum outgrows
// the limit, to the headroom above that maximum, and stays to the bit elsewhere; O is rescaled
// exactly where some row moves. P is relative to it, and never above the limit.
template <typename Element>
void check_steps(const std::vector<float>& logits, float log2_scale, const Result& actual,
                 const char* what) {
  using Range = SoftmaxRange<Element>;
  const int steps = num_steps(logits);
  std::vector<float> references(kRows, -INFINITY);
  for (int step = 0; step < steps; ++step) {
    bool some_row_moves = false;
    for (int row = 0; row < kRows; ++row) {
      const float* row_logits = &logits[(step * kRows + row) * kCols];
      float max = row_logits[0];
      for (int col = 1; col < kCols; ++col) max = std::fmax(max, row_logits[col]);
      const float top = max * log2_scale;
      const bool moves = top - references[row] > Range::kLimitLog2;
      if (moves) references[row] = top + Range::kHeadroomLog2;
      some_row_moves |= moves;

      check_lanes_agree(actual, step, row, what);
      const float now = actual.reference(step, row);
      check(now == references[row], "%s: step %d, row %d: the reference is %.9g, wanted %.9g (%s)",
            what, step, row, now, references[row], moves ? "moved" : "unchanged");
      for (int col = 0; col < kCols; ++col) {
        const double reference = now == -INFINITY ? 0.0 : now;
        const double exponent = double{log2_scale} * row_logits[col] - reference;
        const float got = actual.probabilities[(step * kRows + row) * kCols + col];
        check_probability(got, exponent, std::abs(exponent), what, step, row, col);
        check(!(got > Range::kLimit * 1.00001f), "%s: step %d: P(%d, %d) is %.9g, above the limit",
              what, step, row, col, got);
      }
    }
    check((actual.rescaled[step] != 0) == some_row_moves,
          "%s: step %d: must_rescale is %d although %s row has outgrown the limit", what, step,
          actual.rescaled[step], some_row_moves ? "some" : "no");
  }
}

template <typename Element>
Result check_all(const std::vector<float>& logits, float log2_scale, const char* what) {
  const Result actual = run<Element>(logits, log2_scale);
  check_steps<Element>(logits, log2_scale, actual, what);
  check_rows(logits, log2_scale, 0.0, actual, what);
  return actual;
}

// ---- Tests of both types ----

template <typename Element>
void test_random() {
  check_all<Element>(random_logits(1, 3, 1), 1.0f, "one block");
  check_all<Element>(random_logits(5, 3, 2), 0.7f, "five blocks");
  check_all<Element>(random_logits(5, 40, 3), 0.5f, "five peaky blocks");
  std::vector<float> logits = random_logits(4, 3, 4);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += i % 3 == 0 ? 5000.0f : 4995.0f;
  check_all<Element>(logits, 1.0f, "a large offset");
}

// Rows by their number modulo 8: 0 sees nothing at all; 1 nothing in the first block, 2 in the
// last, 3 in the middle; 4 sees one key; 5 one key of the first block only; others everything.
template <typename Element>
void test_masked() {
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
  check_all<Element>(logits, 0.9f, "masked rows");
}

template <typename Element>
void test_nothing_visible() {
  const std::vector<float> hidden(2 * kSize, -INFINITY);
  const Result actual = check_all<Element>(hidden, 1.0f, "two hidden blocks");
  check_equal(actual.rescaled, {0, 0}, 1, "rescaled in (step, 0)");
  const Result none = run<Element>({}, 1.0f);
  check_equal(none.out, std::vector<float>(kSize, 0.0f), kCols, "O of no block");
  check_equal(none.lse, std::vector<float>(kRows * 4, -INFINITY), 4, "lse of no block");
}

// Blocks of equal logits that grow to exactly the limit, which moves nothing, and by a little more,
// which does. P at the limit is kLimit, and at a new reference 2^-kHeadroomLog2.
template <typename Element>
void test_limit() {
  using Range = SoftmaxRange<Element>;
  constexpr float kFirst = -Range::kHeadroomLog2, kLast = Range::kLimitLog2;
  constexpr float kGrowth = kLast - kFirst;
  const float levels[] = {1.0f,
                          1.0f + kGrowth,
                          1.25f + kGrowth,
                          -3.0f + kGrowth,
                          1.25f + 2.0f * kGrowth,
                          1.5f + 2.0f * kGrowth};
  const float log2_p[] = {kFirst, kLast, kFirst, kFirst - 4.25f, kLast, kFirst};
  const std::vector<int> rescaled = {1, 0, 1, 0, 0, 1};
  std::vector<float> logits;
  for (const float level : levels) logits.insert(logits.end(), kSize, level);
  for (const float log2_scale : {1.0f, 0.25f}) {
    std::vector<float> scaled = logits;
    for (float& x : scaled) x /= log2_scale;
    const Result actual = check_all<Element>(scaled, log2_scale, "growth to and beyond the limit");
    check_equal(actual.rescaled, rescaled, 1, "rescaled in (step, 0)");
    for (size_t step = 0; step < rescaled.size(); ++step) {
      const double expected = std::exp2(log2_p[step]), got = actual.probabilities[step * kSize];
      check(std::abs(got - expected) <= 1e-6 * expected, "P of step %zu: got %.9g, wanted %.9g",
            step, got, expected);
    }
  }
}

// Maxima that rise in every block and others that fall, slowly and fast, in one warp.
template <typename Element>
void test_growth() {
  constexpr int kSteps = 8;
  std::vector<float> logits(kSteps * kSize);
  for (size_t i = 0; i < logits.size(); ++i) {
    const int step = static_cast<int>(i) / kSize, row = static_cast<int>(i) / kCols % kRows;
    logits[i] = (row - 7) * 4.0f * step + (i % kCols) / 32.0f;
  }
  check_all<Element>(logits, 1.0f, "rising and falling maxima");
  for (float& x : logits) x /= 16.0f;
  check_all<Element>(logits, 1.0f, "slowly rising and falling maxima");
}

// Logits near 1e4 whose every block outgrows the one before. References near 1e4 are rounded to
// 2^-10; P and the rescaling of O are relative to the same rounded ones, so that none of it shows.
// Every key is seen in one block only: an error in the rescaling of a block has a column of O to
// itself.
template <typename Element>
void test_large_offset() {
  using Range = SoftmaxRange<Element>;
  constexpr int kSteps = 12;
  constexpr float kGrowth = Range::kHeadroomLog2 + Range::kLimitLog2 + 1.5f;
  for (const float log2_scale : {1.0f, 1.37f}) {
    std::vector<float> logits = random_logits(kSteps, 1, 7);
    for (size_t i = 0; i < logits.size(); ++i) {
      const int step = static_cast<int>(i) / kSize, row = static_cast<int>(i) / kCols % kRows;
      const float offset = row % 2 == 0 ? 1e4f : -1e4f;
      const bool seen = static_cast<int>(i) % kCols % kSteps == step;
      logits[i] = seen ? offset + (kGrowth + row / 8.0f) * step + logits[i] / 2.0f : -INFINITY;
    }
    const Result actual = check_all<Element>(logits, log2_scale, "a large offset that grows");
    check_equal(actual.rescaled, std::vector<int>(kSteps, 1), 1, "rescaled in (step, 0)");
    for (int row = 0; row < kRows; ++row)
      for (int step = 1; step < kSteps; ++step) {
        check(actual.reference(step, row) > actual.reference(step - 1, row),
              "the reference of row %d did not move in step %d", row, step);
      }
  }
}

// Rows of one warp are computed alone: what the second half of them holds, here a maximum that
// outgrows the limit in every block, leaves no trace in the bits of the first half. Rows behind a
// sequence's end in its last tile are another sequence's.
template <typename Element>
void test_rows_alone() {
  constexpr int kSteps = 6;
  std::vector<float> logits = random_logits(kSteps, 2, 6);
  const auto half_of = [](const std::vector<float>& values) {
    return std::vector<float>(values.begin(), values.begin() + values.size() / 2);
  };
  const Result wanted = run<Element>(logits, 1.3f);
  for (int step = 0; step < kSteps; ++step)
    for (int i = kSize / 2; i < kSize; ++i) logits[step * kSize + i] += 30.0f * step;
  const Result actual = check_all<Element>(logits, 1.3f, "a growing half");
  check_equal(half_of(actual.out), half_of(wanted.out), kCols, "O beside a growing half");
  check_equal(half_of(actual.lse), half_of(wanted.lse), 4, "lse beside a growing half");
}

// Rows by their number modulo 8: 0 to 5 have no softmax, which must show in O and the LSE as NaN
// and never as the 0 and -inf of a row that sees no key, whether other logits are finite, hidden or
// not there; 6 sees nothing; 7 is ordinary, and its bits are those it has beside finite rows.
template <typename Element>
void test_not_a_number() {
  constexpr int kSteps = 3;
  std::vector<float> logits = random_logits(kSteps, 3, 8);
  const auto row_logits = [&](int step, int row) { return &logits[(step * kRows + row) * kCols]; };
  const auto fill = [&](int step, int row, float x) {
    std::fill_n(row_logits(step, row), kCols, x);
  };
  const Result finite = run<Element>(logits, 1.1f);
  for (int row = 0; row < kRows; ++row)
    for (int step = 0; step < kSteps; ++step) {
      const int col = (5 * row + 1) % kCols, kind = row % 8;
      if (kind == 0 && step == 0) row_logits(step, row)[col] = kNaN;
      if (kind == 1 && step == 1) row_logits(step, row)[col] = kNaN;
      if (kind == 2) fill(step, row, kNaN);
      if (kind == 3 || kind == 6) fill(step, row, -kInfinity);
      if (kind == 3 && step == 1) row_logits(step, row)[col] = kNaN;
      if (kind == 4 && step == 0) row_logits(step, row)[col] = kInfinity;
      if (kind == 5 && step == 2) row_logits(step, row)[col] = kInfinity;
    }
  const Result actual = check_all<Element>(logits, 1.1f, "logits that are not numbers");
  const auto ordinary = [](const std::vector<float>& values) {
    std::vector<float> rows;
    const size_t size = values.size() / kRows;
    for (const int row : {7, 15}) {
      rows.insert(rows.end(), values.begin() + row * size, values.begin() + (row + 1) * size);
    }
    return rows;
  };
  check_equal(ordinary(actual.out), ordinary(finite.out), kCols, "O of rows 7 and 15");
  check_equal(ordinary(actual.lse), ordinary(finite.lse), 4, "lse of rows 7 and 15");
}

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

const DeviceTest random_bf16("lazy_softmax.random.bfloat16", test_random<BFloat16>);
const DeviceTest random_fp16("lazy_softmax.random.float16", test_random<Float16>);
const DeviceTest masked_bf16("lazy_softmax.masked.bfloat16", test_masked<BFloat16>);
const DeviceTest masked_fp16("lazy_softmax.masked.float16", test_masked<Float16>);
const DeviceTest hidden_bf16("lazy_softmax.nothing_visible.bfloat16",
                             test_nothing_visible<BFloat16>);
const DeviceTest hidden_fp16("lazy_softmax.nothing_visible.float16", test_nothing_visible<Float16>);
const DeviceTest limit_bf16("lazy_softmax.limit.bfloat16", test_limit<BFloat16>);
const DeviceTest limit_fp16("lazy_softmax.limit.float16", test_limit<Float16>);
const DeviceTest growth_bf16("lazy_softmax.growth.bfloat16", test_growth<BFloat16>);
const DeviceTest growth_fp16("lazy_softmax.growth.float16", test_growth<Float16>);
const DeviceTest offset_bf16("lazy_softmax.large_offset.bfloat16", test_large_offset<BFloat16>);
const DeviceTest offset_fp16("lazy_softmax.large_offset.float16", test_large_offset<Float16>);
const DeviceTest alone_bf16("lazy_softmax.rows_are_computed_alone.bfloat16",
                            test_rows_alone<BFloat16>);
const DeviceTest alone_fp16("lazy_softmax.rows_are_computed_alone.float16",
                            test_rows_alone<Float16>);
const DeviceTest nan_bf16("lazy_softmax.not_a_number.bfloat16", test_not_a_number<BFloat16>);
const DeviceTest nan_fp16("lazy_softmax.not_a_number.float16", test_not_a_number<Float16>);

}  // namespace
}  // namespace flashattn_ext::testing
