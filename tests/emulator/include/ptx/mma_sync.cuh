// In the place of csrc/ptx/mma_sync.cuh. PTX ISA, "Matrix Fragments for mma.m16n8k16".
#pragma once

#include <cstdint>

#include "ptx/math.cuh"

namespace flashattn_ext::ptx {

template <typename Element>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Mine {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
  } mine{c, a, {b0, b1}};
  emulator::collective("mma", mine, [](const auto& lanes) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < emulator::kWarp; ++lane) {
      const int group = lane / 4, pair = 2 * (lane % 4);
      for (int half = 0; half < 2; ++half) {  // of a register
        for (int i = 0; i < 4; ++i)
          a[group + 8 * (i % 2)][pair + 8 * (i / 2) + half] =
              from_16_bits<Element>(lanes[lane]->a[i] >> 16 * half);
        for (int i = 0; i < 2; ++i)
          b[pair + 8 * i + half][group] = from_16_bits<Element>(lanes[lane]->b[i] >> 16 * half);
      }
    }
    for (int lane = 0; lane < emulator::kWarp; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), col = 2 * (lane % 4) + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][col];
        lanes[lane]->c[i] += sum;
      }
    }
  });
}

}  // namespace flashattn_ext::ptx
