// In the place of csrc/ptx/cp_async.cuh.
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

inline void cp_async_16(uint32_t smem_dst, const void* gmem_src, bool valid) {
  emulator::start_copy(smem_dst, gmem_src, 16, valid);
}
inline void cp_async_4(uint32_t smem_dst, const void* gmem_src, bool valid) {
  emulator::start_copy(smem_dst, gmem_src, 4, valid);
}
inline void cp_async_commit_group() { emulator::commit_copies(); }
template <int kPending>
void cp_async_wait_group() {
  emulator::wait_for_copies(kPending);
}

}  // namespace flashattn_ext::ptx
