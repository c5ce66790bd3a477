// Launch of the Hopper forward kernel for the tiles of one head-dim bucket. Included by the
// instantiation files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <utility>

#include "attention/launch.cuh"
#include "attention/tile_order.h"
#include "sm90/fwd_kernel.cuh"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace flashattn_ext::sm90 {

template <typename Config>
cudaError_t launch_fwd(const FwdParams& params, const FwdSchedule& schedule, cudaStream_t stream) {
  const FwdTiles tiles{make_query_tile_order(params, Config::kBlockM), Divisor(params.num_heads_q),
                       Divisor(params.num_heads_q / params.num_heads_k), schedule.tile_counter};
  if (tiles.order.num_tiles() == 0) return cudaSuccess;

  const int32_t dim = params.head_dim, dim_v = params.head_dim_v;
  FwdTensorMaps maps;
  const std::pair<CUtensorMap*, TensorMapShape> encoded[] = {
      {&maps.q, query_rows(params, params.q, params.q_strides, dim, 64)},
      {&maps.k, key_rows(params, params.k, params.k_strides, dim, Config::kBlockN)},
      {&maps.v, key_rows(params, params.v, params.v_strides, dim_v, Config::kBlockN)},
      {&maps.out, query_rows(params, params.out, params.out_strides, dim_v, 16)}};
  for (const auto& [map, shape] : encoded) {
    if (map == &maps.out && !Config::kTile.tma_store) continue;
    const cudaError_t error = encode_tensor_map(shape, map);
    if (error != cudaSuccess) return error;
  }
  auto* kernel = flash_fwd_sm90_kernel<Config>;
  const cudaError_t error = allow_smem<Config>(kernel);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute beside_counter{};
  beside_counter.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside_counter.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = schedule.num_ctas;
  config.blockDim = Config::kNumThreads;
  config.dynamicSmemBytes = Config::kSmemBytes;
  config.stream = stream;
  if (schedule.tile_counter != nullptr) {
    flash_fwd_sm90_counter_kernel<<<1, 1, 0, stream>>>(schedule.tile_counter);
    config.attrs = &beside_counter;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, params, ScoreTransform(params), tiles, maps);
}

template <int kBucket>
cudaError_t launch_fwd_bucket(const FwdParams& params, const FwdTile& tile,
                              const FwdSchedule& schedule, cudaStream_t stream) {
  return launch_row<kBucket, kFwdTiles>(tile, [&](auto row) {
    return params.dtype == Dtype::kBFloat16
               ? launch_fwd<FwdConfig<__nv_bfloat16, row.value>>(params, schedule, stream)
               : launch_fwd<FwdConfig<__half, row.value>>(params, schedule, stream);
  });
}

}  // namespace flashattn_ext::sm90
