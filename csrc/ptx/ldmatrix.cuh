// ldmatrix and stmatrix: a warp loads or stores four 8x8 matrices of 16-bit elements in shared
// memory (sm_75+, sm_90+). Lane l supplies the address of row (l & 7) of matrix (l >> 3); each row
// is 16 bytes. PTX ISA, "Warp-level matrix load instruction: ldmatrix", "... store ...: stmatrix".
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

// Lane 4g+t receives elements (g, 2t) and (g, 2t+1) of matrix i in reg[i].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&reg)[4], uint32_t smem_addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
               : "r"(smem_addr)
               : "memory");
}

// Lane 4g+t receives elements (2t, g) and (2t+1, g) of matrix i in reg[i].
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&reg)[4], uint32_t smem_addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
               : "r"(smem_addr)
               : "memory");
}

// The reverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem_addr, const uint32_t (&reg)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(smem_addr),
      "r"(reg[0]), "r"(reg[1]), "r"(reg[2]), "r"(reg[3])
      : "memory");
}

// The reverse of ldmatrix_x4_trans.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t smem_addr, const uint32_t (&reg)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(smem_addr),
      "r"(reg[0]), "r"(reg[1]), "r"(reg[2]), "r"(reg[3])
      : "memory");
}

}  // namespace flashattn_ext::ptx
