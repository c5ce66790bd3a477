// Shared-memory accesses and cp.async.
#include "harness.h"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

namespace flashattn_ext::testing {
namespace {

// ---- Shared accesses ----

struct SharedAccess {
  float v4[4];        // of the lane's mirror image, 31 - lane
  float v2[2];        // floats 2*lane and 2*lane + 1
  uint32_t b32;       // word `lane`, after every lane has overwritten its own
  uint32_t distance;  // of the addresses of word `lane` and word 0
};

__global__ void shared_access_kernel(SharedAccess* results) {
  __shared__ __align__(16) float words[128];
  const int lane = threadIdx.x;
  SharedAccess& result = results[lane];
  const uint32_t base = ptx::smem_address(words);
  result.distance = ptx::smem_address(words + lane) - base;

  ptx::st_shared_v4(base + 16 * lane,
                    make_float4(4 * lane, 4 * lane + 1, 4 * lane + 2, 4 * lane + 3));
  __syncwarp();
  const float4 v4 = ptx::ld_shared_v4(base + 16 * (31 - lane));
  const float2 v2 = ptx::ld_shared_v2(base + 8 * lane);
  result.v4[0] = v4.x, result.v4[1] = v4.y, result.v4[2] = v4.z, result.v4[3] = v4.w;
  result.v2[0] = v2.x, result.v2[1] = v2.y;
  __syncwarp();  // every lane has read before words are overwritten
  ptx::st_shared_b32(base + 4 * lane, 0xabcd0000u + lane);
  __syncwarp();
  result.b32 = __float_as_uint(words[lane]);
}

const DeviceTest shared_access("ptx.shared.accesses", [] {
  DeviceBuffer<SharedAccess> results(32);
  launch({}, shared_access_kernel, results.data());
  const std::vector<SharedAccess> actual = results.to_host();
  for (int lane = 0; lane < 32; ++lane) {
    const SharedAccess& x = actual[lane];
    for (int i = 0; i < 4; ++i) {
      check(x.v4[i] == 4 * (31 - lane) + i, "ld_shared_v4 of lane %d, float %d: got %g", lane, i,
            x.v4[i]);
    }
    for (int i = 0; i < 2; ++i) {
      check(x.v2[i] == 2 * lane + i, "ld_shared_v2 of lane %d, float %d: got %g", lane, i, x.v2[i]);
    }
    check(x.b32 == 0xabcd0000u + lane, "st_shared_b32 of lane %d left %#x", lane, x.b32);
    check(x.distance == 4u * lane, "smem_address of word %d is %u bytes on", lane, x.distance);
  }
});

// ---- cp.async ----

constexpr int kNumThreads = 64;

// Thread t copies its kBytes of `source` if bit t of `valid` is set; shared memory starts as 0xee.
template <int kBytes>
__global__ void cp_async_kernel(const uint8_t* source, uint64_t valid, uint8_t* result) {
  __shared__ __align__(16) uint8_t tile[kBytes * kNumThreads];
  const int first = kBytes * threadIdx.x;
  for (int i = 0; i < kBytes; ++i) tile[first + i] = 0xee;
  __syncthreads();  // the fill is over before the copies start
  const uint32_t address = ptx::smem_address(tile) + first;
  const bool is_valid = (valid >> threadIdx.x) & 1;
  if constexpr (kBytes == 16) {
    ptx::cp_async_16(address, source + first, is_valid);
  } else {
    ptx::cp_async_4(address, source + first, is_valid);
  }
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // everybody's copies have landed
  // Read by another thread than the one that copied.
  const int other = kBytes * (kNumThreads - 1 - threadIdx.x);
  for (int i = 0; i < kBytes; ++i) result[other + i] = tile[other + i];
}

// Bytes a thread must not read are 0xff in the source, and must come out as 0.
template <int kBytes>
void test_cp_async(uint64_t valid) {
  std::vector<uint8_t> source(kBytes * kNumThreads), expected(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    const bool is_valid = (valid >> (i / kBytes)) & 1;
    expected[i] = is_valid ? static_cast<uint8_t>(1 + i * 7 % 250) : 0;
    source[i] = is_valid ? expected[i] : 0xff;
  }
  const DeviceBuffer<uint8_t> gSource(source);
  DeviceBuffer<uint8_t> result(source.size());
  launch({1, kNumThreads}, cp_async_kernel<kBytes>, gSource.data(), valid, result.data());
  check_equal(result.to_host(), expected, kBytes, "shared memory at (thread, byte)");
}

// Nothing is mapped at the null pointer: reading it would be an error.
template <int kBytes>
void test_cp_async_unmapped() {
  DeviceBuffer<uint8_t> result(kBytes * kNumThreads);
  launch({1, kNumThreads}, cp_async_kernel<kBytes>, static_cast<const uint8_t*>(nullptr),
         uint64_t{0}, result.data());
  check_equal(result.to_host(), std::vector<uint8_t>(kBytes * kNumThreads, 0), kBytes,
              "shared memory at (thread, byte)");
}

constexpr uint64_t kEveryThread = ~uint64_t{0};
constexpr uint64_t kSomeThreads = 0x8000'f0f3'5a96'0001;

const DeviceTest copies_16("ptx.cp_async_16.copies", [] { test_cp_async<16>(kEveryThread); });
const DeviceTest zeros_16("ptx.cp_async_16.zero_fills", [] { test_cp_async<16>(kSomeThreads); });
const DeviceTest unmapped_16("ptx.cp_async_16.invalid_is_not_read", test_cp_async_unmapped<16>);
const DeviceTest copies_4("ptx.cp_async_4.copies", [] { test_cp_async<4>(kEveryThread); });
const DeviceTest zeros_4("ptx.cp_async_4.zero_fills", [] { test_cp_async<4>(kSomeThreads); });
const DeviceTest unmapped_4("ptx.cp_async_4.invalid_is_not_read", test_cp_async_unmapped<4>);

// ---- Groups ----

constexpr int kGroups = 3;
constexpr int kCopiesPerGroup = 8;  // 16-byte copies of one thread
constexpr int kGroupWords = 4 * kCopiesPerGroup * kNumThreads;

__device__ void read_own_group(const uint32_t* tile, uint32_t* result, int group) {
  for (int i = 0; i < kCopiesPerGroup; ++i) {
    const int first = group * kGroupWords + 4 * (i * kNumThreads + threadIdx.x);
    for (int word = 0; word < 4; ++word) result[first + word] = tile[first + word];
  }
}

// Issues three groups, then reads each one as soon as it must have landed.
__global__ void cp_async_groups_kernel(const uint32_t* source, uint32_t* result) {
  extern __shared__ __align__(128) unsigned char smem[];
  uint32_t* tile = reinterpret_cast<uint32_t*>(smem);
  for (int i = threadIdx.x; i < kGroups * kGroupWords; i += kNumThreads) tile[i] = 0;
  __syncthreads();  // the fill is over before the copies start
  for (int group = 0; group < kGroups; ++group) {
    for (int i = 0; i < kCopiesPerGroup; ++i) {
      const int first = group * kGroupWords + 4 * (i * kNumThreads + threadIdx.x);
      ptx::cp_async_16(ptx::smem_address(tile + first), source + first, true);
    }
    ptx::cp_async_commit_group();
  }
  ptx::cp_async_wait_group<2>();
  read_own_group(tile, result, 0);
  ptx::cp_async_wait_group<1>();
  read_own_group(tile, result, 1);
  ptx::cp_async_wait_group<0>();
  read_own_group(tile, result, 2);
}

const DeviceTest groups("ptx.cp_async.groups_land_in_order", [] {
  std::vector<uint32_t> source(kGroups * kGroupWords);
  for (size_t i = 0; i < source.size(); ++i) source[i] = 1 + 3 * i;
  const DeviceBuffer<uint32_t> gSource(source);
  DeviceBuffer<uint32_t> result(source.size());
  launch({1, kNumThreads, 4 * kGroups * kGroupWords}, cp_async_groups_kernel, gSource.data(),
         result.data());
  check_equal(result.to_host(), source, kGroupWords, "word (group, index)");
});

}  // namespace
}  // namespace flashattn_ext::testing
