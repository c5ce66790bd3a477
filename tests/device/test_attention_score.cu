// ScoreTransform against its definition in double precision.
#include <cmath>

#include "attention/score.cuh"
#include "fragment_io.cuh"
#include "harness.h"

namespace flashattn_ext::testing {
namespace {

constexpr int kNTiles = 8;
constexpr int kCols = 8 * kNTiles;
constexpr int kSize = 16 * kCols;

// Applies the transform to one fragment of raw products.
__global__ void apply_kernel(ScoreTransform transform, float* scores) {
  float acc[1][kNTiles][4];
  read_fragment(acc, scores);
  transform.apply(acc);
  write_fragment(acc, scores);
}

ScoreTransform make_transform(float softmax_scale, float softcap) {
  FwdParams params;
  params.softmax_scale = softmax_scale;
  params.softcap = softcap;
  return ScoreTransform(params);
}

std::vector<float> logits_of(const ScoreTransform& transform, const std::vector<float>& products) {
  const DeviceBuffer<float> scores(products);
  launch({}, apply_kernel, transform, scores.data());
  return scores.to_host();
}

std::vector<float> some_products() {
  std::vector<float> products = random_integers<float>(kSize, -4000, 4000, 1);
  for (float& x : products) x /= 16.0f;
  return products;
}

// ---- Constants ----

const HostTest constants("score.constants", [] {
  const auto is = [](const ScoreTransform& transform, bool in_place, float log2_scale) {
    check(transform.in_place == in_place && transform.log2_scale == log2_scale,
          "scale %g, softcap %g: in_place %d, log2_scale %.9g, wanted %d and %.9g",
          transform.softmax_scale, transform.softcap, transform.in_place, transform.log2_scale,
          in_place, log2_scale);
  };
  is(make_transform(0.125f, 0.0f), false, 0.125f * kLog2e);
  for (const float scale : {0.0f, -0.125f}) is(make_transform(scale, 0.0f), true, kLog2e);
  for (const float scale : {0.125f, 0.0f, -0.125f}) is(make_transform(scale, 30.0f), true, kLog2e);
});

// ---- apply ----

const DeviceTest folded("score.positive_scale_is_folded", [] {
  const std::vector<float> products = some_products();
  check_equal(logits_of(make_transform(0.125f, 0.0f), products), products, kCols,
              "untouched products");
});

const DeviceTest nonpositive("score.nonpositive_scale_is_applied", [] {
  const std::vector<float> products = some_products();
  for (const float scale : {0.0f, -0.125f, -1.7f}) {
    std::vector<float> expected = products;
    for (float& x : expected) x *= scale;
    check_equal(logits_of(make_transform(scale, 0.0f), products), expected, kCols,
                "scaled products");
  }
});

// tanh = 1 - 2 / (1 + e^2x): errors of 2^-22 in ex2 and 2^-23 in rcp and the roundings around them
// add up to less than 1e-6 of the cap.
const DeviceTest softcap("score.softcap", [] {
  const std::vector<float> products = some_products();
  for (const float scale : {0.125f, 1.0f, 0.001f, 0.0f, -0.125f})
    for (const float cap : {0.5f, 30.0f, 1000.0f}) {
      const std::vector<float> logits = logits_of(make_transform(scale, cap), products);
      for (int i = 0; i < kSize; ++i) {
        const double expected = cap * std::tanh(static_cast<double>(scale) * products[i] / cap);
        check(std::abs(logits[i] - expected) <= 1e-6 * cap,
              "%g * tanh(%g * %g / %g): got %.9g, wanted %.9g within a relative 1e-6", cap, scale,
              products[i], cap, logits[i], expected);
      }
    }
});

const DeviceTest softcap_limits("score.softcap_of_huge_products", [] {
  std::vector<float> products(kSize), expected(kSize);
  for (int i = 0; i < kSize; ++i) {
    products[i] = (i % 2 == 0 ? 1.0f : -1.0f) * std::ldexp(1.0f, 20 + i % 107);
    expected[i] = i % 2 == 0 ? 30.0f : -30.0f;
  }
  check_equal(logits_of(make_transform(1.0f, 30.0f), products), expected, kCols, "capped products");
});

// ---- probability, softcap_d_logit ----

struct LogitCase {
  float logit, lse_log2;
};

struct LogitResult {
  float probability;
  float d_logit;  // only of interest with softcap
};

__global__ void logit_kernel(ScoreTransform transform, const LogitCase* cases, LogitResult* results,
                             int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float p = transform.probability(cases[i].logit, cases[i].lse_log2);
  results[i] = {p, transform.softcap_d_logit(p, cases[i].logit)};
}

std::vector<LogitResult> evaluate(const ScoreTransform& transform,
                                  const std::vector<LogitCase>& cases) {
  const DeviceBuffer<LogitCase> gCases(cases);
  DeviceBuffer<LogitResult> results(cases.size());
  const int count = static_cast<int>(cases.size());
  launch({(count + 127) / 128, 128}, logit_kernel, transform, gCases.data(), results.data(), count);
  return results.to_host();
}

// P = 2^(logit * log2_scale - lse_log2): the exponent is rounded once to 24 bits, ex2 adds 2^-22.
// With softcap, dP/d(scale q.k) is P * (1 - (logit / softcap)^2), whose second factor is off by
// little more than 2^-22: its ratio is rounded twice, then squared.
void test_probability(float scale, float cap) {
  const ScoreTransform transform = make_transform(scale, cap);
  const double log2_scale = transform.log2_scale;
  std::vector<LogitCase> cases;
  for (int i = 0; i <= 400; ++i) {
    const float logit = (cap > 0.0f ? cap : 50.0f) * (i - 200) / 200.0f;
    for (const float below : {0.0f, 0.3f, 11.0f, 60.0f}) {
      cases.push_back({logit, static_cast<float>(logit * log2_scale) + below});
    }
  }
  const std::vector<LogitResult> results = evaluate(transform, cases);
  for (size_t i = 0; i < cases.size(); ++i) {
    const double logit = cases[i].logit, exponent = logit * log2_scale - cases[i].lse_log2;
    const double p = std::exp2(exponent);
    const double tolerance = p * (0x1p-22 + 0x1p-24 * (1.0 + std::abs(exponent)));
    check(std::abs(results[i].probability - p) <= tolerance,
          "scale %g, softcap %g, logit %g, lse_log2 %g: P %.9g, wanted %.9g", scale, cap, logit,
          cases[i].lse_log2, results[i].probability, p);
    if (cap == 0.0f) continue;
    const double d_logit = p * (1.0 - (logit / cap) * (logit / cap));
    check(std::abs(results[i].d_logit - d_logit) <= tolerance + p * 0x1p-21,
          "scale %g, softcap %g, logit %g: d_logit %.9g, wanted %.9g", scale, cap, logit,
          results[i].d_logit, d_logit);
  }
}

const DeviceTest probability("score.probability", [] {
  test_probability(0.125f, 0.0f);
  test_probability(-0.125f, 0.0f);
  test_probability(0.125f, 30.0f);
  test_probability(1.0f, 2.0f);
});

// A hidden key (logit -inf), and a row that sees no key (lse_log2 +inf), give exactly zero.
const DeviceTest absent("score.absent_is_zero", [] {
  const std::vector<LogitCase> cases = {
      {-INFINITY, 0.0f}, {-INFINITY, INFINITY}, {3.0f, INFINITY}, {-INFINITY, -50.0f}};
  for (const float cap : {0.0f, 30.0f})
    for (const float scale : {0.125f, -1.0f})
      for (const LogitResult& result : evaluate(make_transform(scale, cap), cases)) {
        check(result.probability == 0.0f && result.d_logit == 0.0f,
              "scale %g, softcap %g: P %g, d_logit %g", scale, cap, result.probability,
              result.d_logit);
      }
});

}  // namespace
}  // namespace flashattn_ext::testing
