// stmatrix against the layout of the PTX manual and against ldmatrix, on the 128-byte swizzle.
#include "harness.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"
#include "swizzle128.h"

namespace flashattn_ext::testing {
namespace {

struct Place {
  int row, col;
};

// Fragments of 16 rows and 16 columns go into a chunk as O does.
struct Straight {
  static constexpr int kWarps = 1, kRows = 16, kSteps = kChunkCols / 16;
  // Lane l has row l & 15, and of the two pieces of 16 bytes that of l >> 4.
  __device__ static Place addressed(int, int kk, int lane) {
    return {lane & 15, 16 * kk + 8 * (lane >> 4)};
  }
  // Register i of lane 4g+t holds row g + 8 * (i & 1), columns 2t + 8 * (i >> 1) and the next.
  static Place held(int, int kk, int lane, int i, int half) {
    return {lane / 4 + 8 * (i & 1), 16 * kk + 2 * (lane % 4) + 8 * (i >> 1) + half};
  }
  __device__ static void store(uint32_t smem_addr, const uint32_t (&reg)[4]) {
    ptx::stmatrix_x4(smem_addr, reg);
  }
  __device__ static void load(uint32_t (&reg)[4], uint32_t smem_addr) {
    ptx::ldmatrix_x4(reg, smem_addr);
  }
};

// Fragments of dS^T, 16 keys of each warp by 16 queries, go into a chunk of dS: rows are queries,
// columns the keys of the four warps. As many rows as columns would hide an exchange of the two.
struct Transposed {
  static constexpr int kWarps = 4, kRows = 80, kSteps = kRows / 16;
  // Matrices 0 and 1 are the first eight queries, matrices 0 and 2 the first eight keys.
  __device__ static Place addressed(int warp_idx, int kk, int lane) {
    return {16 * kk + 8 * (lane >> 4) + (lane & 7), 8 * (2 * warp_idx + ((lane >> 3) & 1))};
  }
  // Register i of lane 4g+t holds key g + 8 * (i & 1), queries 2t + 8 * (i >> 1) and the next.
  static Place held(int warp_idx, int kk, int lane, int i, int half) {
    return {16 * kk + 2 * (lane % 4) + 8 * (i >> 1) + half, 16 * warp_idx + lane / 4 + 8 * (i & 1)};
  }
  __device__ static void store(uint32_t smem_addr, const uint32_t (&reg)[4]) {
    ptx::stmatrix_x4_trans(smem_addr, reg);
  }
  __device__ static void load(uint32_t (&reg)[4], uint32_t smem_addr) {
    ptx::ldmatrix_x4_trans(reg, smem_addr);
  }
};

// All warps store their fragments into one chunk and load them again with the same addresses.
// `registers` is (kWarps, kSteps, 32, 4). The chunk before it and the one behind it stay all ones.
template <typename Pattern>
__global__ void stmatrix_kernel(const uint32_t* registers, uint16_t* chunks, uint32_t* loaded) {
  constexpr int kSize = Pattern::kRows * kChunkCols;
  __shared__ __align__(1024) uint16_t smem[3 * kSize];
  const int warp_idx = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < 3 * kSize; i += blockDim.x) smem[i] = 0xffff;
  __syncthreads();  // the fill is over
  const auto address = [&](int kk) {
    const Place place = Pattern::addressed(warp_idx, kk, lane);
    return ptx::smem_address(smem + kSize + chunked_index(place.row, place.col, Pattern::kRows));
  };
  const auto index = [&](int kk) { return ((Pattern::kSteps * warp_idx + kk) * 32 + lane) * 4; };
  for (int kk = 0; kk < Pattern::kSteps; ++kk) {
    uint32_t reg[4];
    for (int i = 0; i < 4; ++i) reg[i] = registers[index(kk) + i];
    Pattern::store(address(kk), reg);
  }
  __syncthreads();  // the chunk is written
  for (int kk = 0; kk < Pattern::kSteps; ++kk) {
    uint32_t reg[4];
    Pattern::load(reg, address(kk));
    for (int i = 0; i < 4; ++i) loaded[index(kk) + i] = reg[i];
  }
  for (int i = threadIdx.x; i < 3 * kSize; i += blockDim.x) chunks[i] = smem[i];
}

template <typename Pattern>
void test_stmatrix() {
  constexpr int kSize = Pattern::kRows * kChunkCols;
  std::vector<uint32_t> registers;
  std::vector<uint16_t> expected(3 * kSize, 0xffff);
  for (int warp_idx = 0; warp_idx < Pattern::kWarps; ++warp_idx)
    for (int kk = 0; kk < Pattern::kSteps; ++kk)
      for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
          uint32_t reg = 0;
          for (int half = 0; half < 2; ++half) {
            const Place place = Pattern::held(warp_idx, kk, lane, i, half);
            const uint32_t value = 1 + place.row * kChunkCols + place.col;
            reg |= value << (16 * half);
            expected[kSize + chunked_index(place.row, place.col, Pattern::kRows)] =
                static_cast<uint16_t>(value);
          }
          registers.push_back(reg);
        }
  const DeviceBuffer<uint32_t> gRegisters(registers);
  DeviceBuffer<uint16_t> chunks(expected.size());
  DeviceBuffer<uint32_t> loaded(registers.size());
  launch({1, 32 * Pattern::kWarps}, stmatrix_kernel<Pattern>, gRegisters.data(), chunks.data(),
         loaded.data());
  check_equal(chunks.to_host(), expected, kChunkCols, "shared memory");
  check_equal(loaded.to_host(), registers, 4, "what ldmatrix makes of it, (warp, step, lane; i)");
}

const HopperTest straight("ptx.stmatrix_x4", test_stmatrix<Straight>);
const HopperTest transposed("ptx.stmatrix_x4_trans", test_stmatrix<Transposed>);

}  // namespace
}  // namespace flashattn_ext::testing
