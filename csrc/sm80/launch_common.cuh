// What every launch of a one-dimensional tile grid does.
#pragma once

#include <cuda_runtime.h>

#include "attention/params.h"
#include "attention/score.cuh"
#include "attention/tile_order.h"
#include "sm80/launch.h"

namespace flashattn_ext::sm80 {

inline int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

template <typename Config, typename Params>
cudaError_t launch_tiles(void (*kernel)(Params, ScoreTransform, TileOrder), const Params& params,
                         const TileOrder& order, cudaStream_t stream) {
  if (order.num_tiles() == 0) return cudaSuccess;
  // Above 48 KB, dynamic shared memory must be asked for, per device and kernel; it is cheap and
  // allowed while a stream is being captured.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<uint32_t>(order.num_tiles()), Config::kNumThreads, Config::kSmemBytes,
           stream>>>(params, ScoreTransform(params), order);
  return cudaGetLastError();
}

}  // namespace flashattn_ext::sm80
