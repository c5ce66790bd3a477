// Host helpers that every launcher uses.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

namespace flashattn_ext {

inline int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

// Above 48 KB, dynamic shared memory must be asked for, per kernel and device. Once is enough, so
// the devices that have it are remembered; asking twice from two threads does no harm.
template <typename Config, typename Kernel>
cudaError_t allow_smem(Kernel* kernel) {
  static std::atomic<uint64_t> allowed_devices{0};
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((allowed_devices.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
  const cudaError_t refused =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes);
  if (refused == cudaSuccess) allowed_devices.fetch_or(bit, std::memory_order_relaxed);
  return refused;
}

// Calls launch(bucket as a constant) for that of kBuckets which `bucket` is.
template <int... kBuckets, typename Launch>
cudaError_t launch_bucket(int32_t bucket, const Launch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  (void)((bucket == kBuckets &&
          ((error = launch(std::integral_constant<int, kBuckets>{})), true)) ||
         ...);
  return error;
}

// Calls launch(row number as a constant) for the row of kTable that `tile` is, among those of
// kBucket: only these are instantiated. The table is one object in the whole program.
template <int kBucket, const auto& kTable, std::size_t kRow = 0, typename Tile, typename Launch>
cudaError_t launch_row(const Tile& tile, const Launch& launch) {
  if constexpr (kRow == std::size(kTable)) {
    return cudaErrorInvalidValue;
  } else {
    if constexpr (kTable[kRow].bucket == kBucket) {
      if (&kTable[kRow] == &tile) return launch(std::integral_constant<std::size_t, kRow>{});
    }
    return launch_row<kBucket, kTable, kRow + 1>(tile, launch);
  }
}

}  // namespace flashattn_ext
