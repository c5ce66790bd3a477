// stmatrix against the layout of the PTX manual and against ldmatrix, on the 128-byte swizzle.
#include "harness.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"
#include "swizzle128.h"

namespace flashattn_ext::testing {
namespace {

constexpr int kRows = 16, kSteps = kChunkCols / 16, kSize = kRows * kChunkCols;

// One warp stores fragments of 16 rows and 16 columns into a chunk, as O goes to shared memory, and
// loads them again with the same addresses. `registers` is (kSteps, 32, 4). The chunk before it and
// the one behind it stay all ones.
__global__ void stmatrix_kernel(const uint32_t* registers, uint16_t* chunks, uint32_t* loaded) {
  __shared__ __align__(1024) uint16_t smem[3 * kSize];
  const int lane = threadIdx.x;
  for (int i = lane; i < 3 * kSize; i += 32) smem[i] = 0xffff;
  __syncwarp();  // the fill is over
  // Lane l has row l & 15, and of the two pieces of 16 bytes that of l >> 4.
  const auto address = [&](int kk) {
    return ptx::smem_address(smem + kSize +
                             chunked_index(lane & 15, 16 * kk + 8 * (lane >> 4), kRows));
  };
  for (int kk = 0; kk < kSteps; ++kk) {
    uint32_t reg[4];
    for (int i = 0; i < 4; ++i) reg[i] = registers[(32 * kk + lane) * 4 + i];
    ptx::stmatrix_x4(address(kk), reg);
  }
  __syncwarp();  // the chunk is written
  for (int kk = 0; kk < kSteps; ++kk) {
    uint32_t reg[4];
    ptx::ldmatrix_x4(reg, address(kk));
    for (int i = 0; i < 4; ++i) loaded[(32 * kk + lane) * 4 + i] = reg[i];
  }
  for (int i = lane; i < 3 * kSize; i += 32) chunks[i] = smem[i];
}

const HopperTest stmatrix("ptx.stmatrix_x4", [] {
  // Register i of lane 4g+t holds row g + 8 * (i & 1), columns 2t + 8 * (i >> 1) and the next.
  std::vector<uint32_t> registers(kSteps * 32 * 4);
  std::vector<uint16_t> expected(3 * kSize, 0xffff);
  for (int kk = 0; kk < kSteps; ++kk)
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i & 1), col = 16 * kk + 2 * (lane % 4) + 8 * (i >> 1);
        const uint16_t lo = static_cast<uint16_t>(1 + row * kChunkCols + col), hi = lo + 1;
        registers[(32 * kk + lane) * 4 + i] = lo | static_cast<uint32_t>(hi) << 16;
        expected[kSize + chunked_index(row, col, kRows)] = lo;
        expected[kSize + chunked_index(row, col + 1, kRows)] = hi;
      }
  const DeviceBuffer<uint32_t> gRegisters(registers);
  DeviceBuffer<uint16_t> chunks(expected.size());
  DeviceBuffer<uint32_t> loaded(registers.size());
  launch({}, stmatrix_kernel, gRegisters.data(), chunks.data(), loaded.data());
  check_equal(chunks.to_host(), expected, kChunkCols, "shared memory");
  check_equal(loaded.to_host(), registers, 4, "what ldmatrix_x4 makes of it, (step and lane, i)");
});

}  // namespace
}  // namespace flashattn_ext::testing
