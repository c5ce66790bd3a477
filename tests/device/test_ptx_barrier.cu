// Named barriers. A barrier that lets a thread pass too early shows as a wrong value; one that
// holds a thread it should not shows as a hang.
#include "harness.h"
#include "ptx/barrier.cuh"

namespace flashattn_ext::testing {
namespace {

constexpr int kSteps = 8;

// Long enough that a reader that did not wait reads the old value.
__device__ void dawdle() { __nanosleep(20000); }

// Two pairs of warps meet at barriers 1 and 2, the second pair twice as often, while the CTA as a
// whole never meets: the ids are independent and 64 threads are enough. The writer of each step is
// late; its partner reads what it wrote.
__global__ void pairs_kernel(int* results) {
  __shared__ int values[2][64];
  const int warp_idx = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pair_idx = warp_idx / 2;
  const int steps = (1 + pair_idx) * kSteps;
  int errors = 0;
  for (int step = 0; step < steps; ++step) {
    if (warp_idx % 2 == step % 2) {
      dawdle();
      values[pair_idx][lane] = 1000 * step + lane;
    }
    ptx::named_barrier_sync(1 + pair_idx, 64);
    errors += values[pair_idx][lane] != 1000 * step + lane;
    ptx::named_barrier_sync(1 + pair_idx, 64);  // both have read before the next step writes
  }
  results[threadIdx.x] = errors;
}

const DeviceTest pairs("ptx.named_barrier_sync.pairs_of_warps", [] {
  DeviceBuffer<int> results(128);
  launch({1, 128}, pairs_kernel, results.data());
  check_equal(results.to_host(), std::vector<int>(128, 0), 32, "wrong values in (warp, lane)");
});

// Warp 0 hands values to warp 1 and does not wait for it: it arrives at barrier 1 and then, without
// warp 1 having been there, at barrier 2. Warp 1 comes to barrier 2 first. An arrival that waited
// would never end; one that did not order what was written before it would show an old value.
__global__ void hand_over_kernel(int* results) {
  __shared__ int first[32], second[32], taken[32];
  const int lane = threadIdx.x % 32;
  first[lane] = second[lane] = taken[lane] = -1;
  __syncthreads();  // both warps have written all of it
  int errors = 0;
  for (int step = 0; step < kSteps; ++step) {
    if (threadIdx.x < 32) {
      dawdle();
      first[lane] = 1000 * step + lane;
      ptx::named_barrier_arrive(1, 64);
      dawdle();
      second[lane] = 2000 * step + lane;
      ptx::named_barrier_arrive(2, 64);
      ptx::named_barrier_sync(3, 64);  // warp 1 has taken both
      errors += taken[31 - lane] != step;
    } else {
      ptx::named_barrier_sync(2, 64);
      errors += second[31 - lane] != 2000 * step + 31 - lane;
      ptx::named_barrier_sync(1, 64);
      errors += first[31 - lane] != 1000 * step + 31 - lane;
      if (step % 2 == 0) dawdle();
      taken[lane] = step;
      ptx::named_barrier_arrive(3, 64);
    }
  }
  results[threadIdx.x] = errors;
}

const DeviceTest hand_over("ptx.named_barrier_arrive.hand_over", [] {
  DeviceBuffer<int> results(64);
  launch({1, 64}, hand_over_kernel, results.data());
  check_equal(results.to_host(), std::vector<int>(64, 0), 32, "wrong values in (warp, lane)");
});

// Warps that take turns, as consumers queue their products: each waits at a barrier of its own for
// the arrival of the warp before it; the first turn is given to warp 0 by itself. One log of all
// turns, written in turns only, shows their order.
template <int kWarps>
__global__ void turns_kernel(int* log) {
  __shared__ int position;
  const int warp_idx = threadIdx.x / 32, next = (warp_idx + 1) % kWarps;
  if (threadIdx.x == 0) position = 0;
  __syncthreads();  // the log is empty
  if (warp_idx == 0) ptx::named_barrier_arrive(1, 64);
  for (int step = 0; step < kSteps; ++step) {
    ptx::named_barrier_sync(1 + warp_idx, 64);
    if ((step + warp_idx) % 2 == 0) dawdle();
    if (threadIdx.x % 32 == 0) {
      log[position] = warp_idx;
      ++position;
    }
    __syncwarp();  // the turn is in the log
    const bool last = step == kSteps - 1 && warp_idx == kWarps - 1;
    if (!last) ptx::named_barrier_arrive(1 + next, 64);
  }
}

template <int kWarps>
void test_turns() {
  DeviceBuffer<int> log(kWarps * kSteps);
  launch({1, 32 * kWarps}, turns_kernel<kWarps>, log.data());
  std::vector<int> expected(kWarps * kSteps);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<int>(i) % kWarps;
  check_equal(log.to_host(), expected, kWarps, "turns");
}

const DeviceTest two_turns("ptx.named_barrier_arrive.two_warps_take_turns", test_turns<2>);
const DeviceTest three_turns("ptx.named_barrier_arrive.three_warps_take_turns", test_turns<3>);

}  // namespace
}  // namespace flashattn_ext::testing
