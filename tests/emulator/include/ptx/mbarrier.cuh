// In the place of csrc/ptx/mbarrier.cuh.
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

inline void mbarrier_init(uint32_t bar, int arrivals) { emulator::init_mbarrier(bar, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t bar) { emulator::arrive(bar, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  emulator::arrive(bar, bytes);
}
inline void mbarrier_wait(uint32_t bar, uint32_t parity) { emulator::wait_for_phase(bar, parity); }

}  // namespace flashattn_ext::ptx
