// ex2, rcp, packed conversions, and the hint that leaves a value as it is.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "harness.h"
#include "ptx/math.cuh"
#include "ptx/registers.cuh"

namespace flashattn_ext::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- ex2, lg2, rcp ----

struct Ex2 {
  static __device__ float apply(float x) { return ptx::ex2_approx(x); }
};
struct Rcp {
  static __device__ float apply(float x) { return ptx::rcp_approx(x); }
};
struct Lg2 {
  static __device__ float apply(float x) { return ptx::lg2_approx(x); }
};

template <typename Function>
__global__ void map_kernel(const float* x, float* y, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = Function::apply(x[i]);
}

template <typename Function>
std::vector<float> map(const std::vector<float>& x) {
  const DeviceBuffer<float> gX(x);
  DeviceBuffer<float> gY(x.size());
  const int count = static_cast<int>(x.size());
  launch({(count + 255) / 256, 256}, map_kernel<Function>, gX.data(), gY.data(), count);
  return gY.to_host();
}

// The manual's bound for ex2.approx is a relative 2^-22 and for rcp.approx an absolute 2^-23 over
// [1, 2], where the result is at least 1/2: a relative 2^-22 as well.
constexpr double kRelativeError = 0x1p-22;

void check_relative(const char* function, float x, float actual, double expected) {
  check(std::abs(actual - expected) <= kRelativeError * std::abs(expected),
        "%s(%.9g): got %.9g, wanted %.9g within a relative 2^-22", function, x, actual, expected);
}

const DeviceTest ex2("ptx.ex2_approx", [] {
  std::vector<float> x;
  for (int i = -120 * 64; i <= 120 * 64; ++i) x.push_back(i / 64.0f);
  const std::vector<float> y = map<Ex2>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    check_relative("ex2", x[i], y[i], std::exp2(static_cast<double>(x[i])));
  }
});

const DeviceTest ex2_special("ptx.ex2_approx.special_values", [] {
  // Results below the normal numbers are flushed to zero.
  const std::vector<float> y =
      map<Ex2>({-kInf, -1e30f, -140.0f, -0.0f, 0.0f, 128.0f, 1e30f, kInf, kNan});
  const float expected[] = {0.0f, 0.0f, 0.0f, 1.0f, 1.0f, kInf, kInf, kInf};
  for (int i = 0; i < 8; ++i) {
    check(y[i] == expected[i], "special value %d: got %g, wanted %g", i, y[i], expected[i]);
  }
  check(std::isnan(y[8]), "ex2(NaN): got %g", y[8]);
});

const DeviceTest lg2("ptx.lg2_approx", [] {
  std::vector<float> x = {0.5f, 2.0f};
  for (int exponent = -60; exponent <= 60; ++exponent)
    for (int i = 0; i < 64; ++i) x.push_back(std::ldexp(1.0f + i / 64.0f, exponent));
  const std::vector<float> y = map<Lg2>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::log2(static_cast<double>(x[i]));
    const double tolerance = kRelativeError * std::max(1.0, std::abs(expected));
    check(std::abs(y[i] - expected) <= tolerance, "lg2(%.9g): got %.9g, wanted %.9g within %.3g",
          x[i], y[i], expected, tolerance);
  }
});

const DeviceTest lg2_special("ptx.lg2_approx.special_values", [] {
  const std::vector<float> y = map<Lg2>({kInf, 0.0f, 1.0f, kNan});
  check(y[0] == kInf && y[1] == -kInf && y[2] == 0.0f && std::isnan(y[3]),
        "lg2 of inf, 0, 1, NaN: got %g, %g, %g, %g", y[0], y[1], y[2], y[3]);
});

const DeviceTest rcp("ptx.rcp_approx", [] {
  std::vector<float> x;
  for (int exponent = -60; exponent <= 60; exponent += 5)
    for (int i = 0; i < 256; ++i) {
      x.push_back(std::ldexp(1.0f + i / 256.0f, exponent));
      x.push_back(-x.back());
    }
  const std::vector<float> y = map<Rcp>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    check_relative("rcp", x[i], y[i], 1.0 / static_cast<double>(x[i]));
  }
});

const DeviceTest rcp_special("ptx.rcp_approx.special_values", [] {
  const std::vector<float> y = map<Rcp>({kInf, -kInf, 0.0f, -0.0f, kNan});
  const float expected[] = {0.0f, -0.0f, kInf, -kInf};
  for (int i = 0; i < 4; ++i) {
    check(y[i] == expected[i] && std::signbit(y[i]) == std::signbit(expected[i]),
          "special value %d: got %g, wanted %g", i, y[i], expected[i]);
  }
  check(std::isnan(y[4]), "rcp(NaN): got %g", y[4]);
});

// ---- pack_x2 ----

template <typename Element>
__global__ void pack_kernel(const float* x, uint32_t* packed, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) packed[i] = ptx::pack_x2<Element>(x[2 * i], x[2 * i + 1]);
}

// The conversion to the nearest Element, ties to even, as bits.
uint16_t round_to_bits(__half, float x) {
  const __half rounded = __float2half_rn(x);
  uint16_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  return bits;
}
uint16_t round_to_bits(__nv_bfloat16, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename Element>
void test_pack() {
  std::vector<float> x = {0.0f, -0.0f, kInf, -kInf, 65504.0f, 65520.0f, 3.3e38f, 1e-7f, 1e-40f};
  // Halves of a last place, to both sides and exactly, for 8 and for 11 bits of mantissa.
  for (const float last_place : {0x1p-7f, 0x1p-10f})
    for (int i = 0; i < 32; ++i)
      for (const float nudge : {0.0f, -0x1p-20f, 0x1p-20f})
        for (const float sign : {1.0f, -1.0f})
          x.push_back(sign * (1.0f + (i + 0.5f) * last_place + nudge));
  for (const float integer : random_integers<float>(1001, -70000, 70000, 4)) x.push_back(integer);
  if (x.size() % 2 == 1) x.push_back(1.0f);

  const int count = static_cast<int>(x.size() / 2);
  const DeviceBuffer<float> gX(x);
  DeviceBuffer<uint32_t> packed(count);
  launch({(count + 255) / 256, 256}, pack_kernel<Element>, gX.data(), packed.data(), count);
  const std::vector<uint32_t> actual = packed.to_host();
  for (int i = 0; i < 2 * count; ++i) {
    const uint16_t bits = static_cast<uint16_t>(actual[i / 2] >> (i % 2 == 0 ? 0 : 16));
    const uint16_t expected = round_to_bits(Element(), x[i]);
    check(bits == expected, "%.9g as the %s half: got %#x, wanted %#x", x[i],
          i % 2 == 0 ? "low" : "high", bits, expected);
  }
}

const DeviceTest pack_bfloat16("ptx.pack_x2.bfloat16", test_pack<__nv_bfloat16>);
const DeviceTest pack_float16("ptx.pack_x2.float16", test_pack<__half>);

// ---- opaque ----

__global__ void opaque_kernel(int* values) {
  values[threadIdx.x] = ptx::opaque(3 * threadIdx.x - 5);
}

const DeviceTest opaque("ptx.opaque", [] {
  std::vector<int> expected(32);
  for (int lane = 0; lane < 32; ++lane) expected[lane] = 3 * lane - 5;
  DeviceBuffer<int> values(32);
  launch({}, opaque_kernel, values.data());
  check_equal(values.to_host(), expected, 32, "values");
});

// ---- uniform ----

__global__ void uniform_kernel(int* values) {
  const int warp_idx = static_cast<int>(threadIdx.x) / 32;
  values[threadIdx.x] = ptx::uniform(warp_idx * 0x01010101 - 7);
}

const DeviceTest uniform("ptx.uniform", [] {
  std::vector<int> expected(128);
  for (int i = 0; i < 128; ++i) expected[i] = i / 32 * 0x01010101 - 7;
  DeviceBuffer<int> values(128);
  launch({1, 128}, uniform_kernel, values.data());
  check_equal(values.to_host(), expected, 32, "values");
});

}  // namespace
}  // namespace flashattn_ext::testing
