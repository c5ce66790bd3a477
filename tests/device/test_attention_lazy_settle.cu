// LazySoftmax::step_fixed, take_sums and settle as the Hopper forward uses them: the first block by
// `step`, then blocks whose probabilities are taken before anybody knows how large they are, and
// settled afterwards; at a window's left edge again blocks by `step`.
#include "attention/lazy_softmax.cuh"
#include "lazy_rows.h"

namespace flashattn_ext::testing {
namespace {

using BFloat16 = __nv_bfloat16;
using Range = SoftmaxRange<BFloat16>;

constexpr double kBFloat16Rounding = 0x1p-8;
// A new reference lies above the largest logit by the headroom and by what the sum of a lane's
// eight probabilities, rounded up to a power of two, may be above the largest of them.
constexpr double kMostSlackLog2 = 4.0;

// One warp; blocks [1, end_fixed) by step_fixed, the others by step. O gains P as it goes to the
// tensor cores. `packed` is (steps, kRows, kCols) and holds that P; `recomputed` (steps, kNTiles):
// how often the logits of eight keys were asked for again.
__global__ void settle_kernel(const float* logits, int steps, int end_fixed, float log2_scale,
                              float* probabilities, float* packed, float* references,
                              int* recomputed, float* out, float* lse_rows) {
  LazySoftmax<BFloat16> softmax;
  float acc_o[1][kNTiles][4] = {};
  for (int step = 0; step < steps; ++step) {
    const float* block = logits + step * kSize;
    float acc_s[1][kNTiles][4];
    read_fragment(acc_s, block);
    uint32_t p[kNTiles / 2][4];
    const auto pack = [&] {
#pragma unroll
      for (int kk = 0; kk < kNTiles / 2; ++kk) {
        tile::pack_a_fragment<BFloat16>(p[kk], acc_s[0], kk);
      }
    };
    int asked[kNTiles] = {};
    if (step == 0 || step >= end_fixed) {
      softmax.step(acc_s[0], log2_scale);
      pack();
      softmax.apply_rescale(acc_o[0]);
    } else {
      float part[2];
      softmax.step_fixed(part, acc_s[0], log2_scale);
      pack();
      if (!softmax.take_sums(part)) {
        softmax.settle(acc_s[0], p, acc_o[0], log2_scale, [&](int j, float(&again)[4]) {
          ++asked[j];
          for (int e = 0; e < 4; ++e) {
            again[e] = block[fragment_index<kNTiles>(threadIdx.x, 0, j, e)];
          }
        });
      }
    }
    // Register 2 * (j & 1) + (e >> 1) of fragment j / 2 holds element e of tile j, and its
    // neighbour.
    float unpacked[1][kNTiles][4];
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t pair = p[j / 2][2 * (j & 1) + (e >> 1)];
        unpacked[0][j][e] = __uint_as_float(e & 1 ? pair & 0xffff0000u : pair << 16);
        acc_o[0][j][e] += unpacked[0][j][e];
      }
    write_fragment(acc_s, probabilities + step * kSize);
    write_fragment(unpacked, packed + step * kSize);
    for (int half = 0; half < 2; ++half) {
      references[step * kRows * 4 + row_slot(half)] = softmax.reference[half];
    }
    if (threadIdx.x == 0) {
      for (int j = 0; j < kNTiles; ++j) recomputed[step * kNTiles + j] = asked[j];
    }
  }
  write_rows(softmax, acc_o, out, lse_rows);
}

struct Result : LazyResult {
  std::vector<float> packed;    // (steps, kRows, kCols)
  std::vector<int> recomputed;  // (steps, kNTiles)
};

Result run(const std::vector<float>& logits, int end_fixed, float log2_scale) {
  const int steps = num_steps(logits);
  const DeviceBuffer<float> gLogits(logits);
  DeviceBuffer<float> probabilities(logits.size()), packed(logits.size());
  DeviceBuffer<float> references(steps * kRows * 4), out(kSize), lse(kRows * 4);
  DeviceBuffer<int> recomputed(steps * kNTiles);
  launch({}, settle_kernel, gLogits.data(), steps, end_fixed, log2_scale, probabilities.data(),
         packed.data(), references.data(), recomputed.data(), out.data(), lse.data());
  return {{probabilities.to_host(), references.to_host(), out.to_host(), lse.to_host()},
          packed.to_host(),
          recomputed.to_host()};
}

// ---- Each step ----

// What a row's block makes of a reference that stays: the probabilities' exponents in fp32, and the
// largest sum that one of the row's lanes finds.
struct FixedRow {
  float exponents[kCols];
  double largest_sum;

  FixedRow(const float* logits, float log2_scale, float reference) {
    double sums[4] = {};
    for (int col = 0; col < kCols; ++col) {
      exponents[col] = std::fma(logits[col], log2_scale, -reference);
      sums[col % 8 / 2] += std::exp2(double{exponents[col]});
    }
    largest_sum = *std::max_element(sums, sums + 4);
  }
};

// In a block of either kind a row's reference moves where the row outgrew the limit, and stays to
// the bit elsewhere. Logits are computed again for those eight keys alone for which some row's
// probability passed fp32's range. P is relative to the reference that comes out, and what goes to
// the tensor cores is that P in bf16. Rows of finite logits only.
void check_steps(const std::vector<float>& logits, int end_fixed, float log2_scale,
                 const Result& actual, const char* what) {
  const int steps = num_steps(logits);
  std::vector<float> references(kRows, -INFINITY);
  for (int step = 0; step < steps; ++step) {
    const bool fixed = step > 0 && step < end_fixed;
    int recomputed[kNTiles] = {};
    for (int row = 0; row < kRows; ++row) {
      const float* row_logits = &logits[(step * kRows + row) * kCols];
      const float old = references[row], now = actual.reference(step, row);
      const float top = *std::max_element(row_logits, row_logits + kCols) * log2_scale;
      check_lanes_agree(actual, step, row, what);
      references[row] = now;
      if (fixed) {
        const FixedRow before(row_logits, log2_scale, old);
        for (int col = 0; col < kCols; ++col) {
          if (before.exponents[col] >= 128.0f) recomputed[col / 8] = 1;
        }
        const double above = double{now} - top, rounding = 1e-5 + 0x1p-22 * std::abs(now);
        const bool moved = above >= Range::kHeadroomLog2 - rounding &&
                           above <= Range::kHeadroomLog2 + kMostSlackLog2 + rounding;
        // Sums within a rounding of the limit may do either.
        check((now == old && before.largest_sum <= Range::kLimit + 1e-5) ||
                  (moved && before.largest_sum >= Range::kLimit - 1e-5),
              "%s: step %d, row %d: the reference went from %.9g to %.9g; the largest logit is "
              "%.9g and the largest sum %.9g",
              what, step, row, old, now, top, before.largest_sum);
      } else {
        const float wanted = top - old > Range::kLimitLog2 ? top + Range::kHeadroomLog2 : old;
        check(now == wanted, "%s: step %d, row %d: the reference is %.9g, wanted %.9g", what, step,
              row, now, wanted);
      }
      for (int col = 0; col < kCols; ++col) {
        const int i = (step * kRows + row) * kCols + col;
        const double x = double{log2_scale} * logits[i];
        const double old_exponent = old == -INFINITY ? 0.0 : std::abs(x - old);
        const double moved = old == -INFINITY ? 0.0 : double{now} - old;
        const double reach =
            logits[i] == -INFINITY ? 0.0 : old_exponent + std::abs(x - now) + moved;
        check_probability(actual.probabilities[i], x - now, reach, what, step, row, col);
        const float rounded = __bfloat162float(__float2bfloat16_rn(actual.probabilities[i]));
        check(actual.packed[i] == rounded,
              "%s: step %d: P(%d, %d) of the tensor cores: got %.9g, wanted %.9g", what, step, row,
              col, actual.packed[i], rounded);
      }
    }
    for (int j = 0; j < kNTiles; ++j) {
      const int got = actual.recomputed[step * kNTiles + j];
      check(got == recomputed[j], "%s: step %d: logits of tile %d were computed again %d times",
            what, step, j, got);
    }
  }
}

Result check_all(const std::vector<float>& logits, int end_fixed, float log2_scale,
                 const char* what) {
  const Result actual = run(logits, end_fixed, log2_scale);
  check_steps(logits, end_fixed, log2_scale, actual, what);
  check_rows(logits, log2_scale, kBFloat16Rounding, actual, what);
  return actual;
}

// ---- Data ----

// Logits in units of log2 that no row outgrows its first reference with.
constexpr float kQuietTop = 3.0f, kFirstReference = kQuietTop + Range::kHeadroomLog2;

// Blocks of which every row's largest logit in the first is kQuietTop.
std::vector<float> quiet_logits(int steps, uint32_t seed) {
  std::vector<float> logits = random_logits(steps, 3, seed);
  for (int row = 0; row < kRows; ++row) logits[row * kCols + (7 * row + 5) % kCols] = kQuietTop;
  return logits;
}

// A block of a row that passes the reference of kFirstReference by `growth`. Lanes that hold the
// largest logit have neighbours whose probability stays finite however large the growth is; so have
// other lanes neighbours that are less far behind; the last eight keys stay quiet. Rows have their
// largest logits at different keys.
void grow(std::vector<float>& logits, int step, int row, float growth) {
  float* row_logits = &logits[(step * kRows + row) * kCols];
  for (int col = 0; col < kCols - 8; ++col) {
    const int kind = (col + row) % 4;
    if (kind == 0) row_logits[col] = kFirstReference + growth - col / 8 / 2.0f;
    if (kind == 1) row_logits[col] = kFirstReference + std::min(growth - 1.5f, 125.0f - col / 8);
    if (kind == 2) row_logits[col] = kFirstReference + growth - 7.0f;
  }
}

// What the blocks after it must be raised by to weigh as much.
void raise(std::vector<float>& logits, int first_step, int row, float by) {
  for (int step = first_step; step < num_steps(logits); ++step)
    for (int col = 0; col < kCols; ++col) logits[(step * kRows + row) * kCols + col] += by;
}

std::vector<float> divided(std::vector<float> logits, float by) {
  for (float& x : logits) x /= by;
  return logits;
}

// By how much rows outgrow their reference. Probabilities pass fp32's range at 128. A factor of
// 2^-149 can be held as one number, of 2^-250 only as two; both leave of a finite probability what
// still weighs. Then growth that leaves nothing.
constexpr float kGrowths[kRows] = {-2.0f,  130.0f,  0.5f,  150.0f, 1.0f,   200.0f, 5.0f,   260.0f,
                                   20.25f, 1000.0f, 60.0f, 1e4f,   100.0f, 128.5f, -19.0f, 135.0f};

// ---- Tests ----

// Where no row outgrows its reference, step_fixed is step, to the bit.
const DeviceTest no_growth("lazy_softmax.settle.no_growth", [] {
  constexpr int kSteps = 6;
  const std::vector<float> logits = quiet_logits(kSteps, 11);
  for (const float log2_scale : {1.0f, 0.7f}) {
    const Result fixed = check_all(logits, kSteps, log2_scale, "no growth");
    const Result stepped = check_all(logits, 1, log2_scale, "no growth, by step");
    check_equal(fixed.references, stepped.references, 4, "references in (step and row, lane)");
    check_equal(fixed.probabilities, stepped.probabilities, kCols, "P in (step and row, key)");
    check_equal(fixed.out, stepped.out, kCols, "O");
    check_equal(fixed.lse, stepped.lse, 4, "lse");
    check_equal(fixed.recomputed, std::vector<int>(kSteps * kNTiles, 0), kNTiles, "recomputed");
  }
});

// Each row grows by its own amount in the second block; the blocks after it are quiet in half of
// the rows, and weigh as much as that block in the others.
const DeviceTest growth("lazy_softmax.settle.growth", [] {
  constexpr int kSteps = 4;
  std::vector<float> logits = quiet_logits(kSteps, 12);
  for (int row = 0; row < kRows; ++row) {
    grow(logits, 1, row, kGrowths[row]);
    if (row / 2 % 2 == 0) raise(logits, 2, row, Range::kHeadroomLog2 + kGrowths[row]);
  }
  for (const float log2_scale : {1.0f, 0.7f}) {
    const Result actual =
        check_all(divided(logits, log2_scale), kSteps, log2_scale, "growth of each row's own");
    for (int row = 0; row < kRows; ++row) {
      const bool moves = kGrowths[row] > 0.0f;
      check((actual.reference(1, row) > actual.reference(0, row)) == moves,
            "a growth of %g: the reference went from %.9g to %.9g", kGrowths[row],
            actual.reference(0, row), actual.reference(1, row));
    }
  }
});

// The same growth in all rows, so that no row's branch is taken for another's sake, and then in one
// row alone, for which the whole warp takes it.
const DeviceTest growth_of_all("lazy_softmax.settle.growth_of_all_rows_and_of_one", [] {
  constexpr int kSteps = 3;
  for (const float growth : kGrowths) {
    std::vector<float> logits = quiet_logits(kSteps, 13);
    for (int row = 0; row < kRows; ++row) {
      grow(logits, 1, row, growth);
      raise(logits, 2, row, Range::kHeadroomLog2 + growth - 0.5f * row);
    }
    check_all(logits, kSteps, 1.0f, "growth of all rows alike");
  }
  for (int row = 0; row < kRows; ++row) {
    for (const float growth : {1.0f, 140.0f}) {
      std::vector<float> logits = quiet_logits(kSteps, 13);
      grow(logits, 1, row, growth);
      raise(logits, 2, row, Range::kHeadroomLog2 + growth);
      check_all(logits, kSteps, 1.0f, "growth of one row");
    }
  }
});

// Rows that grow in every block: slowly, fast, and past fp32's range each time; one that falls.
const DeviceTest every_block("lazy_softmax.settle.growth_in_every_block", [] {
  constexpr int kSteps = 8;
  std::vector<float> logits = quiet_logits(kSteps, 14);
  const float rates[kRows] = {-15.0f, 0.0f,  5.0f,   19.0f,  21.0f,  25.0f,  40.0f,   60.0f,
                              80.0f,  95.0f, 110.0f, 180.0f, 200.0f, 300.0f, 1000.0f, 1e4f};
  for (int step = 0; step < kSteps; ++step)
    for (int row = 0; row < kRows; ++row) {
      for (int col = 0; col < kCols; ++col) {
        logits[(step * kRows + row) * kCols + col] += rates[row] * step;
      }
    }
  check_all(logits, kSteps, 1.0f, "growth in every block");
});

// Logits near 1e4 whose every block outgrows the one before; every key is seen in one block only,
// as in lazy_softmax.large_offset.
const DeviceTest large_offset("lazy_softmax.settle.large_offset", [] {
  constexpr int kSteps = 12;
  for (const float log2_scale : {1.0f, 1.37f}) {
    std::vector<float> logits = random_logits(kSteps, 1, 15);
    for (size_t i = 0; i < logits.size(); ++i) {
      const int step = static_cast<int>(i) / kSize, row = static_cast<int>(i) / kCols % kRows;
      const float offset = row % 2 == 0 ? 1e4f : -1e4f;
      const bool seen = static_cast<int>(i) % kCols % kSteps == step;
      const float rise = Range::kHeadroomLog2 + kMostSlackLog2 + 1.5f + row / 8.0f;
      logits[i] = seen ? offset + rise * step + logits[i] / 2.0f : -INFINITY;
    }
    const Result actual = check_all(logits, kSteps, log2_scale, "a large offset that grows");
    for (int row = 0; row < kRows; ++row)
      for (int step = 1; step < kSteps; ++step) {
        check(actual.reference(step, row) > actual.reference(step - 1, row),
              "the reference of row %d did not move in step %d", row, step);
      }
  }
});

// A sum of exactly the limit moves nothing, one that is a little more does.
const DeviceTest limit("lazy_softmax.settle.limit", [] {
  constexpr int kSteps = 2;
  std::vector<float> logits = quiet_logits(kSteps, 16);
  for (int row = 0; row < kRows; ++row) {
    float* block = &logits[(kRows + row) * kCols];
    std::fill_n(block, kCols, -kInfinity);
    block[(3 * row) % kCols] = kFirstReference + (row % 2 == 0 ? 0.0f : 1.0f / 64.0f);
  }
  const Result actual = check_all(logits, kSteps, 1.0f, "growth to and beyond the limit");
  for (int row = 0; row < kRows; ++row) {
    check(actual.reference(0, row) == kFirstReference, "row %d: the first reference is %.9g", row,
          actual.reference(0, row));
    check((actual.reference(1, row) == kFirstReference) == (row % 2 == 0),
          "row %d: the second reference is %.9g", row, actual.reference(1, row));
  }
});

// Eight probabilities of a lane that fp32 holds, and whose sum it does not.
const DeviceTest sum_overflows("lazy_softmax.settle.finite_terms_of_an_infinite_sum", [] {
  constexpr int kSteps = 3;
  std::vector<float> logits = quiet_logits(kSteps, 17);
  for (int row = 0; row < kRows; row += 3) {
    for (int col = 0; col < kCols; ++col) {
      if (col % 8 / 2 == row % 4) {
        logits[(kRows + row) * kCols + col] = kFirstReference + 127.0f - col / 32.0f;
      }
    }
    raise(logits, 2, row, Range::kHeadroomLog2 + 126.0f);
  }
  check_all(logits, kSteps, 1.0f, "a sum that overflows");
});

// Blocks by `step` follow: the window's left edge, where keys are hidden and rows still grow, and a
// block that a row does not see.
const DeviceTest step_after("lazy_softmax.settle.step_after_it", [] {
  constexpr int kSteps = 5, kEndFixed = 3;
  std::vector<float> logits = quiet_logits(kSteps, 18);
  for (int row = 0; row < kRows; ++row) {
    grow(logits, 1, row, kGrowths[row]);
    raise(logits, 2, row, Range::kHeadroomLog2 + kGrowths[row]);
    raise(logits, 4, row, kGrowths[(row + 5) % kRows]);
    for (int step = kEndFixed; step < kSteps; ++step)
      for (int col = 0; col < kCols; ++col) {
        if (col < 2 * row + step) logits[(step * kRows + row) * kCols + col] = -kInfinity;
      }
  }
  check_all(logits, kEndFixed, 1.0f, "by step, by settle, by step");
});

// Keys whose logits are -inf weigh nothing, also in a whole block, and beside growth.
const DeviceTest hidden("lazy_softmax.settle.logits_of_minus_infinity", [] {
  constexpr int kSteps = 4;
  std::vector<float> logits = quiet_logits(kSteps, 19);
  for (int row = 0; row < kRows; ++row) {
    grow(logits, 2, row, kGrowths[row]);
    for (int step = 1; step < kSteps; ++step)
      for (int col = 0; col < kCols; ++col) {
        const bool whole_block = row % 4 == step;
        if (whole_block || (col + row) % 3 == step - 1) {
          logits[(step * kRows + row) * kCols + col] = -kInfinity;
        }
      }
  }
  check_all(logits, kSteps, 1.0f, "logits of -inf");
});

// The values of the rows for which `chosen` holds.
template <typename Chosen>
std::vector<float> rows_of(const std::vector<float>& values, int width, const Chosen& chosen) {
  std::vector<float> rows;
  for (size_t i = 0; i < values.size(); ++i) {
    if (chosen(static_cast<int>(i) / width % kRows)) rows.push_back(values[i]);
  }
  return rows;
}

template <typename Chosen>
void check_same_rows(const Result& actual, const Result& wanted, const Chosen& chosen,
                     const char* what) {
  const auto same = [&](const std::vector<float>& a, const std::vector<float>& b, int width,
                        const char* name) {
    const std::string text = std::string(what) + ": bits of " + name;
    check_equal(bits_of(rows_of(a, width, chosen)), bits_of(rows_of(b, width, chosen)), width,
                text.c_str());
  };
  same(actual.references, wanted.references, 4, "references");
  same(actual.probabilities, wanted.probabilities, kCols, "P");
  same(actual.packed, wanted.packed, kCols, "P of the tensor cores");
  same(actual.out, wanted.out, kCols, "O");
  same(actual.lse, wanted.lse, 4, "lse");
}

// Rows of a warp are computed alone: rows that stay, move by a finite sum and overflow have the
// same bits whether their neighbours stay, move, overflow or are not numbers. Neighbours are every
// second row, which other lanes hold, or the last eight, which the same lanes hold.
const DeviceTest rows_alone("lazy_softmax.settle.rows_are_computed_alone", [] {
  constexpr int kSteps = 5;
  std::vector<float> own = quiet_logits(kSteps, 20);
  const float growths[] = {-5.0f, 40.0f, 140.0f, -1.0f};
  for (int row = 0; row < kRows; ++row) {
    const float growth = growths[row / 2 % 4];
    if (row / 2 % 4 == 0) continue;  // quiet throughout
    grow(own, 2, row, growth);
    raise(own, 3, row, Range::kHeadroomLog2 + growth);
  }
  for (const bool every_second : {true, false}) {
    const auto stays = [&](int row) { return every_second ? row % 2 == 0 : row < 8; };
    const Result wanted = check_all(own, kSteps, 1.0f, "each row's own growth");
    for (const float growth : {-3.0f, 0.25f, 90.0f, 170.0f, 2000.0f, kInfinity, kNaN}) {
      std::vector<float> logits = own;
      for (int row = 0; row < kRows; ++row) {
        if (stays(row)) continue;
        for (const int step : {1, 2, 4}) {
          for (int col = 0; col < kCols; ++col) {
            float& x = logits[(step * kRows + row) * kCols + col];
            if ((col + step) % 3 != 0) x = kFirstReference + step * growth - col / 8.0f;
          }
        }
      }
      const Result actual = run(logits, kSteps, 1.0f);
      check_rows(logits, 1.0f, kBFloat16Rounding, actual, "beside other growth");
      check_same_rows(actual, wanted, stays, "beside other growth");
    }
  }
});

// Rows by their number modulo 8: 0 to 5 have no softmax, which must show in O and the LSE as NaN, 3
// to 5 beside growth of the row; 6 grows past fp32's range and 7 is ordinary, with the bits that
// they have beside finite rows.
const DeviceTest not_a_number("lazy_softmax.settle.not_a_number", [] {
  constexpr int kSteps = 4;
  std::vector<float> logits = quiet_logits(kSteps, 21);
  for (int row = 6; row < kRows; row += 8) grow(logits, 2, row, 180.0f);
  const Result finite = run(logits, kSteps, 1.0f);
  for (int row = 0; row < kRows; ++row) {
    const int kind = row % 8;
    if (kind == 3) grow(logits, 2, row, 50.0f);
    if (kind == 4 || kind == 5) grow(logits, 2, row, 180.0f);
    const float x[] = {kNaN, kInfinity, kNaN, kNaN, kNaN, kInfinity};
    if (kind < 6) logits[(2 * kRows + row) * kCols + (row == kind ? 4 : 27)] = x[kind];
    if (kind == 2) std::fill_n(&logits[(2 * kRows + row) * kCols], kCols, kNaN);
  }
  const Result actual = run(logits, kSteps, 1.0f);
  check_rows(logits, 1.0f, kBFloat16Rounding, actual, "logits that are not numbers");
  check_same_rows(actual, finite, [](int row) { return row % 8 >= 6; }, "beside NaN");
});

}  // namespace
}  // namespace flashattn_ext::testing
