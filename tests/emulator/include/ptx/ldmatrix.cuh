// In the place of csrc/ptx/ldmatrix.cuh. PTX ISA, "ldmatrix": lane l names row l % 8 of matrix
// l / 8 and gets, of every matrix, two neighbours of row l / 4, or transposed of column l / 4.
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

template <bool kTransposed>
void load_matrices(uint32_t (&reg)[4], uint32_t smem_addr) {
  struct Mine {
    uint32_t address;
    uint32_t* reg;
  } mine{smem_addr, reg};
  emulator::collective(kTransposed ? "ldmatrix.trans" : "ldmatrix", mine, [](const auto& lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t x[8][8];
      for (int row = 0; row < 8; ++row)
        std::memcpy(x[row], emulator::shared(lanes[8 * matrix + row]->address, 16), 16);
      for (int lane = 0; lane < emulator::kWarp; ++lane) {
        const int i = lane / 4, j = 2 * (lane % 4);
        const uint32_t low = kTransposed ? x[j][i] : x[i][j];
        const uint32_t high = kTransposed ? x[j + 1][i] : x[i][j + 1];
        lanes[lane]->reg[matrix] = low | high << 16;
      }
    }
  });
}

template <bool kTransposed>
void store_matrices(uint32_t smem_addr, const uint32_t (&reg)[4]) {
  struct Mine {
    uint32_t address;
    const uint32_t* reg;
  } mine{smem_addr, reg};
  emulator::collective(kTransposed ? "stmatrix.trans" : "stmatrix", mine, [](const auto& lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t x[8][8];
      for (int lane = 0; lane < emulator::kWarp; ++lane) {
        const int i = lane / 4, j = 2 * (lane % 4);
        const uint32_t pair = lanes[lane]->reg[matrix];
        (kTransposed ? x[j][i] : x[i][j]) = static_cast<uint16_t>(pair);
        (kTransposed ? x[j + 1][i] : x[i][j + 1]) = static_cast<uint16_t>(pair >> 16);
      }
      for (int row = 0; row < 8; ++row)
        std::memcpy(emulator::shared(lanes[8 * matrix + row]->address, 16), x[row], 16);
    }
  });
}

inline void ldmatrix_x4(uint32_t (&reg)[4], uint32_t smem_addr) {
  load_matrices<false>(reg, smem_addr);
}
inline void ldmatrix_x4_trans(uint32_t (&reg)[4], uint32_t smem_addr) {
  load_matrices<true>(reg, smem_addr);
}
inline void stmatrix_x4(uint32_t smem_addr, const uint32_t (&reg)[4]) {
  store_matrices<false>(smem_addr, reg);
}
inline void stmatrix_x4_trans(uint32_t smem_addr, const uint32_t (&reg)[4]) {
  store_matrices<true>(smem_addr, reg);
}

}  // namespace flashattn_ext::ptx
