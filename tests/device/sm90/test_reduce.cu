// Additions in global memory by many CTAs: their sums, and the order that a counter gives them. A
// turn that begins too early shows as a wrong value, one that never begins as a hang.
#include <cmath>

#include "harness.h"
#include "ptx/reduce.cuh"

namespace flashattn_ext::testing {
namespace {

// ---- Sums ----

constexpr int kCtas = 128, kThreads = 128, kRounds = 4;
// Groups of four floats, each with four behind it that nobody adds to. All CTAs add to the first
// groups; behind them every thread has one for itself.
constexpr int kSharedGroups = 32, kGroups = kSharedGroups + kCtas * kThreads, kGroupStride = 8;

// In some rounds neighbouring lanes have the same group, in others they have not.
__host__ __device__ int shared_group(int thread, int round) {
  return (round % 2 == 0 ? thread / 4 + round : thread + 7 * round) % kSharedGroups;
}

// Integers: sums are exact in any order.
__host__ __device__ float addend(int thread, int round, int e) {
  return static_cast<float>((37 * thread + 11 * round + 5 * e) % 201 - 100);
}

__global__ void red_add_v4_kernel(float* sums) {
  const int thread = kThreads * blockIdx.x + threadIdx.x;
  for (int round = 0; round < kRounds; ++round) {
    float x[4];
    for (int e = 0; e < 4; ++e) x[e] = addend(thread, round, e);
    ptx::red_add_v4(sums + kGroupStride * shared_group(thread, round), x);
    ptx::red_add_v4(sums + kGroupStride * (kSharedGroups + thread), x);
  }
}

const HopperTest red_add_v4("ptx.red_add_v4", [] {
  const auto start = random_integers<float>(kGroupStride * kGroups, -50, 50, 1);
  std::vector<float> expected = start;
  for (int thread = 0; thread < kCtas * kThreads; ++thread)
    for (int round = 0; round < kRounds; ++round)
      for (int e = 0; e < 4; ++e) {
        const float x = addend(thread, round, e);
        expected[kGroupStride * shared_group(thread, round) + e] += x;
        expected[kGroupStride * (kSharedGroups + thread) + e] += x;
      }
  const DeviceBuffer<float> sums(start);
  launch({kCtas, kThreads}, red_add_v4_kernel, sums.data());
  check_equal(sums.to_host(), expected, kGroupStride, "sums and, from 4 on, neighbours (group, e)");
});

// A lane stores into its own group, or adds to it.
__host__ __device__ bool stores(int thread) { return thread % 7 == 3 || thread / 32 % 4 == 1; }

__global__ void store_or_add_v4_kernel(float* groups) {
  const int thread = kThreads * blockIdx.x + threadIdx.x;
  float x[4];
  for (int e = 0; e < 4; ++e) x[e] = addend(thread, 0, e);
  ptx::store_or_add_v4(groups + kGroupStride * thread, x, stores(thread));
}

const HopperTest store_or_add_v4("ptx.store_or_add_v4", [] {
  const auto start = random_integers<float>(kGroupStride * kCtas * kThreads, -50, 50, 2);
  std::vector<float> expected = start;
  for (int thread = 0; thread < kCtas * kThreads; ++thread)
    for (int e = 0; e < 4; ++e) {
      float& x = expected[kGroupStride * thread + e];
      x = addend(thread, 0, e) + (stores(thread) ? 0 : x);
    }
  const DeviceBuffer<float> groups(start);
  launch({kCtas, kThreads}, store_or_add_v4_kernel, groups.data());
  check_equal(groups.to_host(), expected, kGroupStride,
              "groups and, from 4 on, neighbours (thread, e)");
});

// ---- Turns ----

constexpr int kTurns = 64;  // as many CTAs: fewer than a Hopper GPU has SMs, so all are resident

// Long enough that a CTA that did not wait adds first.
__device__ void dawdle() { __nanosleep(20000); }

// The thread of a turn that adds to a place is of another warp and another lane in the next turn.
__host__ __device__ int turn_place(uint32_t thread, uint32_t rank) {
  return (thread + 37 * rank) % kThreads;
}

// One CTA has one turn. `turns` counts those that are over. In its turn a thread adds its
// four of `addends` (kTurns, kThreads, 4) to those of its place in `sums`, the first stores them,
// and reads and writes its place in `chains`.
__global__ void turns_kernel(int multiplier, const float* addends, float* sums, uint32_t* chains,
                             uint32_t* turns) {
  const uint32_t rank = (multiplier * blockIdx.x + 5) % kTurns;
  const int place = turn_place(threadIdx.x, rank);
  float x[4];
  for (int e = 0; e < 4; ++e) x[e] = addends[(kThreads * rank + threadIdx.x) * 4 + e];
  ptx::wait_for_count(turns, rank);  // the turns before this one are over
  if (rank % 4 == 0) dawdle();
  ptx::store_or_add_v4(sums + 4 * place, x, rank == 0);
  chains[place] = 3 * chains[place] + rank;
  __syncthreads();  // all threads have added: thread 0 releases what they did
  if (threadIdx.x == 0) ptx::st_release(turns, rank + 1);
}

const HopperTest turns("ptx.st_release.turns", [] {
  // Thirds, so that additions round and another order has other sums. A chain, modulo 2^32, never
  // forgets an exchange: its factor is odd.
  auto addends = random_integers<float>(kTurns * kThreads * 4, -1000000, 1000000, 1);
  for (float& x : addends) x /= 3;
  const std::vector<float> sums_start(4 * kThreads, NAN);  // what the first turn stores over
  const std::vector<uint32_t> chains_start(kThreads, 1);
  std::vector<float> sums(4 * kThreads, 0.0f);
  std::vector<uint32_t> chains = chains_start;
  for (uint32_t rank = 0; rank < kTurns; ++rank)
    for (uint32_t thread = 0; thread < kThreads; ++thread) {
      const int place = turn_place(thread, rank);
      for (int e = 0; e < 4; ++e)
        sums[4 * place + e] += addends[(kThreads * rank + thread) * 4 + e];
      chains[place] = 3 * chains[place] + rank;
    }
  const DeviceBuffer<float> gAddends(addends);
  // CTAs in their order, out of it, and backwards; odd, so that every turn is had.
  for (const int multiplier : {1, 27, 63}) {
    const DeviceBuffer<float> gSums(sums_start);
    const DeviceBuffer<uint32_t> gChains(chains_start), gTurns(std::vector<uint32_t>{0});
    launch({kTurns, kThreads}, turns_kernel, multiplier, gAddends.data(), gSums.data(),
           gChains.data(), gTurns.data());
    check_equal(gTurns.to_host(), {kTurns}, 1, "turns that are over");
    check_equal(gChains.to_host(), chains, 32, "chains (place / 32, place % 32)");
    check_equal(gSums.to_host(), sums, 4, "sums (place, e)");
  }
});

}  // namespace
}  // namespace flashattn_ext::testing
