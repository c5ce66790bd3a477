// In the place of csrc/ptx/wgmma.cuh. A product is computed when its group is waited for, from what
// shared memory holds then; A in registers is read when the product starts.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"

namespace flashattn_ext::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit_products(); }
template <int kPending>
void wgmma_wait() {
  emulator::wait_for_products(kPending);
}
template <typename T, int kTiles>
void wgmma_pin(T (&)[kTiles][4]) {}

// Address, and the bytes between chunks of 64 columns.
inline uint64_t wgmma_descriptor(uint32_t smem_addr, uint32_t leading_bytes) {
  return smem_addr | static_cast<uint64_t>(leading_bytes) << 32;
}
inline uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) { return descriptor + bytes; }

// Column `col` of row `row` of a tile with the 128-byte swizzle, by a descriptor.
template <typename Element>
float tile_element(uint64_t descriptor, int row, int col) {
  const auto leading = static_cast<uint32_t>(descriptor >> 32);
  uint32_t address = static_cast<uint32_t>(descriptor) + 128 * row + 2 * (col % 64);
  address += col / 64 * leading;
  uint16_t bits;
  std::memcpy(&bits, emulator::shared(emulator::swizzled(address), 2), 2);
  return from_16_bits<Element>(bits);
}

// acc += A B with row(half, k) of A this lane's rows; B is `kTransB`: (depth, N), else (N, depth).
template <typename Element, int kTransB, int kTiles, typename RowOfA>
void add_product(float (&acc)[kTiles][4], const RowOfA& row, uint64_t desc_b, int accumulate) {
  for (int j = 0; j < kTiles; ++j)
    for (int e = 0; e < 4; ++e) {
      const int n = 8 * j + 2 * (emulator::lane() % 4) + (e & 1);
      float sum = 0;
      for (int k = 0; k < 16; ++k)
        sum += row(e >> 1, k) * (kTransB ? tile_element<Element>(desc_b, k, n)
                                         : tile_element<Element>(desc_b, n, k));
      acc[j][e] = (accumulate ? acc[j][e] : 0.0f) + sum;
    }
}

template <typename Element, int kTransB, int kTiles>
void wgmma_ss(float (&acc)[kTiles][4], uint64_t desc_a, uint64_t desc_b, int accumulate) {
  emulator::start_product([&acc, desc_a, desc_b, accumulate] {
    const int row0 = 16 * (emulator::thread_idx() / 32 % 4) + emulator::lane() / 4;
    const auto row = [&](int half, int k) {
      return tile_element<Element>(desc_a, row0 + 8 * half, k);
    };
    add_product<Element, kTransB>(acc, row, desc_b, accumulate);
  });
}

template <typename Element, int kTransB, int kTiles>
void wgmma_rs(float (&acc)[kTiles][4], const uint32_t (&a)[4], uint64_t desc_b, int accumulate) {
  struct Mine {
    const uint32_t* a;
    std::array<std::array<float, 16>, 2> rows;
  } mine{a, {}};
  emulator::collective("wgmma_rs", mine, [](const auto& lanes) {
    for (int lane = 0; lane < emulator::kWarp; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half) {
          const float x = from_16_bits<Element>(lanes[lane]->a[i] >> 16 * half);
          const int k = 2 * (lane % 4) + 8 * (i / 2) + half;
          for (int other = 0; other < 4; ++other) lanes[lane / 4 * 4 + other]->rows[i % 2][k] = x;
        }
  });
  emulator::start_product([&acc, rows = mine.rows, desc_b, accumulate] {
    const auto row = [&](int half, int k) { return rows[half][k]; };
    add_product<Element, kTransB>(acc, row, desc_b, accumulate);
  });
}

}  // namespace flashattn_ext::ptx
