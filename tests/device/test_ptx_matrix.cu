// ldmatrix and mma.sync against the fragment layouts of the PTX manual.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "harness.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"

namespace flashattn_ext::testing {
namespace {

// ---- ldmatrix ----

// Four matrices of eight rows, in a shuffled order in shared memory: row r of matrix i is the 16
// bytes at slot (5 * (8i + r) + 3) % 32.
__host__ __device__ int slot(int matrix, int row) { return (5 * (8 * matrix + row) + 3) % 32; }

uint16_t matrix_element(int matrix, int row, int col) {
  return static_cast<uint16_t>(1 + 64 * matrix + 8 * row + col);
}

template <bool kTrans>
__global__ void ldmatrix_kernel(const uint16_t* slots, uint32_t* result) {
  __shared__ __align__(16) uint16_t tile[32 * 8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 32 * 8; i += 32) tile[i] = slots[i];
  __syncwarp();  // the tile is complete
  const uint32_t address = ptx::smem_address(tile + 8 * slot(lane >> 3, lane & 7));
  uint32_t reg[4];
  if constexpr (kTrans) {
    ptx::ldmatrix_x4_trans(reg, address);
  } else {
    ptx::ldmatrix_x4(reg, address);
  }
  for (int i = 0; i < 4; ++i) result[4 * lane + i] = reg[i];
}

template <bool kTrans>
void test_ldmatrix() {
  std::vector<uint16_t> slots(32 * 8);
  for (int i = 0; i < 4; ++i)
    for (int row = 0; row < 8; ++row)
      for (int col = 0; col < 8; ++col) slots[8 * slot(i, row) + col] = matrix_element(i, row, col);
  std::vector<uint32_t> expected(32 * 4);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const uint32_t lo = kTrans ? matrix_element(i, 2 * t, g) : matrix_element(i, g, 2 * t);
      const uint32_t hi =
          kTrans ? matrix_element(i, 2 * t + 1, g) : matrix_element(i, g, 2 * t + 1);
      expected[4 * lane + i] = lo | hi << 16;
    }
  }
  const DeviceBuffer<uint16_t> gSlots(slots);
  DeviceBuffer<uint32_t> result(expected.size());
  launch({}, ldmatrix_kernel<kTrans>, gSlots.data(), result.data());
  check_equal(result.to_host(), expected, 4, "register (lane, index)");
}

const DeviceTest ldmatrix_plain("ptx.ldmatrix_x4", test_ldmatrix<false>);
const DeviceTest ldmatrix_trans("ptx.ldmatrix_x4_trans", test_ldmatrix<true>);

// ---- mma ----

struct MmaOperands {
  uint32_t a[4];
  uint32_t b[2];
  float c[4];
};

template <typename Element>
__global__ void mma_kernel(MmaOperands* operands) {
  MmaOperands& x = operands[threadIdx.x];
  float c[4] = {x.c[0], x.c[1], x.c[2], x.c[3]};
  const uint32_t a[4] = {x.a[0], x.a[1], x.a[2], x.a[3]};
  ptx::mma_m16n8k16<Element>(c, a, x.b[0], x.b[1]);
  for (int e = 0; e < 4; ++e) x.c[e] = c[e];
}

template <typename Element>
uint32_t pack(Element lo, Element hi) {
  const Element pair[2] = {lo, hi};
  uint32_t packed;
  std::memcpy(&packed, pair, sizeof(packed));
  return packed;
}

// C (16, 8) += A (16, 16) B (16, 8) on small integers: every sum is exact.
template <typename Element>
void test_mma() {
  const auto a = random_integers<Element>(16 * 16, -8, 8, 1);
  const auto b = random_integers<Element>(16 * 8, -8, 8, 2);
  const auto c = random_integers<float>(16 * 8, -100, 100, 3);
  std::vector<MmaOperands> operands(32);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const auto a_pair = [&](int row, int k) { return pack(a[16 * row + k], a[16 * row + k + 1]); };
    const auto b_pair = [&](int k) { return pack(b[8 * k + g], b[8 * (k + 1) + g]); };
    MmaOperands& x = operands[lane];
    x.a[0] = a_pair(g, 2 * t);
    x.a[1] = a_pair(g + 8, 2 * t);
    x.a[2] = a_pair(g, 2 * t + 8);
    x.a[3] = a_pair(g + 8, 2 * t + 8);
    x.b[0] = b_pair(2 * t);
    x.b[1] = b_pair(2 * t + 8);
    for (int e = 0; e < 4; ++e) x.c[e] = c[8 * (g + 8 * (e / 2)) + 2 * t + e % 2];
  }
  const DeviceBuffer<MmaOperands> gOperands(operands);
  launch({}, mma_kernel<Element>, gOperands.data());

  std::vector<float> actual(16 * 8), expected = c;
  const std::vector<MmaOperands> results = gOperands.to_host();
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 4; ++e)
      actual[8 * (lane / 4 + 8 * (e / 2)) + 2 * (lane % 4) + e % 2] = results[lane].c[e];
  for (int row = 0; row < 16; ++row)
    for (int col = 0; col < 8; ++col)
      for (int k = 0; k < 16; ++k)
        expected[8 * row + col] +=
            static_cast<float>(a[16 * row + k]) * static_cast<float>(b[8 * k + col]);
  check_equal(actual, expected, 8, "C");
}

const DeviceTest mma_bfloat16("ptx.mma_m16n8k16.bfloat16", test_mma<__nv_bfloat16>);
const DeviceTest mma_float16("ptx.mma_m16n8k16.float16", test_mma<__half>);

}  // namespace
}  // namespace flashattn_ext::testing
