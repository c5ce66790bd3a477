// apply_mask and apply_mask_transposed: hidden scores become -inf, visible ones keep their bits.
#include <cmath>

#include "attention/score.cuh"
#include "band_cases.h"
#include "fragment_io.cuh"
#include "harness.h"

namespace flashattn_ext::testing {
namespace {

// A fragment whose rows start at `row0` and columns at `col0`; transposed, rows are keys.
struct MaskCase {
  BandProblem problem;
  int32_t row0, col0;
};

// Every score starts as 1 + its index in the fragment. One warp per case.
template <int kMTiles, int kNTiles, bool kTransposed>
__global__ void mask_kernel(const MaskCase* cases, float* results) {
  constexpr int kSize = 16 * kMTiles * 8 * kNTiles;
  const MaskCase& c = cases[blockIdx.x];
  float* result = results + static_cast<int64_t>(blockIdx.x) * kSize;
  for (int i = threadIdx.x; i < kSize; i += 32) result[i] = 1.0f + i;
  __syncwarp();  // other lanes read these scores
  float acc[kMTiles][kNTiles][4];
  read_fragment(acc, result);
  FwdParams params;
  params.window_left = c.problem.window_left;
  params.window_right = c.problem.window_right;
  params.top_left = c.problem.top_left;
  const Band band(params, c.problem.seqlen_q, c.problem.seqlen_k);
  const int lane = threadIdx.x;
  if constexpr (kTransposed) {
    apply_mask_transposed(acc, band, c.row0, c.col0, lane);
  } else {
    apply_mask(acc, band, c.row0, c.col0, lane);
  }
  write_fragment(acc, result);
}

// Fragments at the starts and ends of both sequences and at both edges of the band.
std::vector<MaskCase> make_cases(const std::vector<BandProblem>& problems, bool transposed) {
  std::vector<MaskCase> cases;
  for (const BandProblem& p : problems) {
    const int32_t rows = transposed ? p.seqlen_k : p.seqlen_q;
    const int32_t cols = transposed ? p.seqlen_q : p.seqlen_k;
    const int64_t first = transposed ? -p.off() - p.window_right : p.off() - p.window_left;
    const int64_t last = transposed ? -p.off() + p.window_left : p.off() + p.window_right;
    for (const int64_t row : {0, rows / 2, rows - 1}) {
      const int32_t row0 = block_start(row, rows, 16);
      for (const int64_t col : {int64_t{0}, row0 + first, row0 + last, int64_t{cols} - 1}) {
        cases.push_back({p, row0, block_start(col, cols, 8)});
      }
    }
  }
  return cases;
}

template <int kMTiles, int kNTiles, bool kTransposed>
void check_cases(const std::vector<MaskCase>& cases) {
  constexpr int kRows = 16 * kMTiles, kCols = 8 * kNTiles;
  const DeviceBuffer<MaskCase> gCases(cases);
  DeviceBuffer<float> gResults(cases.size() * kRows * kCols);
  launch({static_cast<int>(cases.size()), 32}, mask_kernel<kMTiles, kNTiles, kTransposed>,
         gCases.data(), gResults.data());
  const std::vector<float> results = gResults.to_host();
  for (size_t n = 0; n < cases.size(); ++n)
    for (int index = 0; index < kRows * kCols; ++index) {
      const MaskCase& c = cases[n];
      const int64_t row = int64_t{c.row0} + index / kCols, col = int64_t{c.col0} + index % kCols;
      const int64_t i = kTransposed ? col : row, j = kTransposed ? row : col;
      if (i >= c.problem.seqlen_q) continue;  // a row nobody reads: either value will do
      const float expected = c.problem.visible(i, j) ? 1.0f + index : -INFINITY;
      const float actual = results[n * kRows * kCols + index];
      check(actual == expected, "%s, query %lld, key %lld: got %g, wanted %g",
            c.problem.text().c_str(), static_cast<long long>(i), static_cast<long long>(j), actual,
            expected);
    }
}

template <bool kTransposed>
void test_mask(const std::vector<BandProblem>& problems) {
  const std::vector<MaskCase> cases = make_cases(problems, kTransposed);
  check_cases<1, 4, kTransposed>(cases);
  check_cases<2, 8, kTransposed>(cases);
}

const DeviceTest small("mask.small_problems", [] { test_mask<false>(small_problems()); });
const DeviceTest extreme("mask.extreme_problems", [] { test_mask<false>(extreme_problems()); });
const DeviceTest small_transposed("mask.transposed.small_problems",
                                  [] { test_mask<true>(small_problems()); });
const DeviceTest extreme_transposed("mask.transposed.extreme_problems",
                                    [] { test_mask<true>(extreme_problems()); });

}  // namespace
}  // namespace flashattn_ext::testing
