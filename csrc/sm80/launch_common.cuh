// What every launch of a one-dimensional tile grid does.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/launch.cuh"
#include "attention/params.h"
#include "attention/score.cuh"
#include "attention/tile_order.h"
#include "sm80/launch.h"

namespace flashattn_ext::sm80 {

template <typename Config, typename Params>
cudaError_t launch_tiles(void (*kernel)(Params, ScoreTransform, TileOrder), const Params& params,
                         const TileOrder& order, cudaStream_t stream) {
  if (order.num_tiles() == 0) return cudaSuccess;
  const cudaError_t error = allow_smem<Config>(kernel);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<uint32_t>(order.num_tiles()), Config::kNumThreads, Config::kSmemBytes,
           stream>>>(params, ScoreTransform(params), order);
  return cudaGetLastError();
}

}  // namespace flashattn_ext::sm80
