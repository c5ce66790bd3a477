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

}  // namespace
}  // namespace flashattn_ext::testing
