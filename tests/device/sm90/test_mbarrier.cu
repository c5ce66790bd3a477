// mbarriers: when a phase is over, and what a wait orders between warps. A wait that ends too early
// shows as a wrong value, one that does not end as a hang.
#include "harness.h"
#include "phase.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

namespace flashattn_ext::testing {
namespace {

// ---- Phases, as one thread sees them ----

// Bit p is set where wait(p) would return.
__device__ uint32_t parities_over(uint32_t bar) {
  return (is_over(bar, 0) ? 1 : 0) | (is_over(bar, 1) ? 2 : 0);
}

// One thread runs `script` on a fresh barrier, which may note down the parities as it goes on.
template <typename Script>
__global__ void script_kernel(int arrivals, uint32_t* noted) {
  __shared__ uint64_t barrier;
  const uint32_t bar = ptx::smem_address(&barrier);
  ptx::mbarrier_init(bar, arrivals);
  ptx::fence_mbarrier_init();
  Script::run(bar, noted);
}

template <typename Script>
void check_script(int arrivals, const std::vector<uint32_t>& expected) {
  DeviceBuffer<uint32_t> noted(expected.size());
  launch({1, 1}, script_kernel<Script>, arrivals, noted.data());
  check_equal(noted.to_host(), expected, 1, "parities that are over, at (note, 0)");
}

constexpr uint32_t kOdd = 2;   // wait(1) returns: a fresh barrier, or an even number of phases over
constexpr uint32_t kEven = 1;  // wait(0) returns: an odd number of phases is over

struct ArriveOneByOne {
  __device__ static void run(uint32_t bar, uint32_t* noted) {
    noted[0] = parities_over(bar);
    for (int i = 1; i <= 9; ++i) {
      ptx::mbarrier_arrive(bar);
      noted[i] = parities_over(bar);
    }
  }
};

const HopperTest one_arrival("ptx.mbarrier.parity_of_one_arrival", [] {
  check_script<ArriveOneByOne>(1,
                               {kOdd, kEven, kOdd, kEven, kOdd, kEven, kOdd, kEven, kOdd, kEven});
});

const HopperTest three_arrivals("ptx.mbarrier.parity_of_three_arrivals", [] {
  check_script<ArriveOneByOne>(3, {kOdd, kOdd, kOdd, kEven, kEven, kEven, kOdd, kOdd, kOdd, kEven});
});

// ---- Between warps ----

constexpr int kStages = 2, kSteps = 24, kConsumers = 2;

// Long enough that a thread that did not wait reads the old value.
__device__ void dawdle() { __nanosleep(20000); }

// A ring as the kernels have it. Warp 0 fills stages, every lane arriving; the other warps read
// them and arrive once each. Producer and consumers take turns at being the slow side.
__global__ void ring_kernel(int* errors) {
  __shared__ int values[kStages][32];
  __shared__ uint64_t barriers[2 * kStages];
  const auto full = [&](int stage) { return ptx::smem_address(&barriers[stage]); };
  const auto empty = [&](int stage) { return ptx::smem_address(&barriers[kStages + stage]); };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), 32);
      ptx::mbarrier_init(empty(stage), kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised

  const int warp_idx = threadIdx.x / 32, lane = threadIdx.x % 32;
  int wrong = 0;
  for (int step = 0; step < kSteps; ++step) {
    const int stage = step % kStages;
    const uint32_t phase = step / kStages % 2;
    const bool producer_is_slow = step / 8 % 2 == 0;
    if (warp_idx == 0) {
      ptx::mbarrier_wait(empty(stage), phase ^ 1);  // a fresh barrier lets pass
      if (producer_is_slow) dawdle();
      values[stage][lane] = 1000 * step + lane;
      ptx::mbarrier_arrive(full(stage));
    } else {
      ptx::mbarrier_wait(full(stage), phase);
      if (!producer_is_slow && warp_idx == 1 + step % kConsumers) dawdle();
      wrong += values[stage][31 - lane] != 1000 * step + 31 - lane;
      __syncwarp();  // every lane has read the stage
      if (lane == 0) ptx::mbarrier_arrive(empty(stage));
    }
  }
  errors[threadIdx.x] = wrong;
}

const HopperTest ring("ptx.mbarrier.ring_between_warps", [] {
  constexpr int kThreads = 32 * (1 + kConsumers);
  DeviceBuffer<int> errors(kThreads);
  launch({1, kThreads}, ring_kernel, errors.data());
  check_equal(errors.to_host(), std::vector<int>(kThreads, 0), 32, "wrong values in (warp, lane)");
});

}  // namespace
}  // namespace flashattn_ext::testing
