// In the place of csrc/ptx/barrier.cuh.
#pragma once

namespace flashattn_ext::ptx {

inline void named_barrier_sync(int id, int num_threads) { emulator::barrier(id, num_threads); }
inline void named_barrier_arrive(int id, int num_threads) {
  emulator::barrier(id, num_threads, false);
}

}  // namespace flashattn_ext::ptx
