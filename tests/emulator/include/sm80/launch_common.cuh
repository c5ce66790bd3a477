// In the place of csrc/sm80/launch_common.cuh: launches on the emulator.
#pragma once

#include "attention/launch.cuh"
#include "attention/params.h"
#include "attention/score.cuh"
#include "attention/tile_order.h"
#include "sm80/launch.h"

namespace flashattn_ext::sm80 {

template <typename Config, typename Params>
cudaError_t launch_tiles(void (*kernel)(Params, ScoreTransform, TileOrder), const Params& params,
                         const TileOrder& order, cudaStream_t) {
  emulator::run(static_cast<uint32_t>(order.num_tiles()), Config::kNumThreads, Config::kSmemBytes,
                [&] { kernel(params, ScoreTransform(params), order); });
  return cudaSuccess;
}

}  // namespace flashattn_ext::sm80
