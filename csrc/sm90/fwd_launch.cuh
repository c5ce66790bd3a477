// Launch of the Hopper forward kernel for the tiles of one head-dim bucket. Included by the
// instantiation files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

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

  const bool varlen = params.cu_seqlens_q != nullptr;
  const int32_t batch = varlen ? 1 : params.batch;
  const int64_t rows_q = varlen ? params.total_q : params.seqlen_q;
  const int64_t rows_k = varlen ? params.total_k : params.seqlen_k;
  FwdTensorMaps maps;
  const auto encode = [&](CUtensorMap* map, const void* data, const Strides& strides, int64_t rows,
                          int32_t heads, int32_t head_dim, int32_t box_rows) {
    return encode_tensor_map({data, batch, rows, heads, head_dim, strides, box_rows, params.dtype},
                             map);
  };
  cudaError_t error =
      encode(&maps.q, params.q, params.q_strides, rows_q, params.num_heads_q, params.head_dim, 64);
  if (error != cudaSuccess) return error;
  error = encode(&maps.k, params.k, params.k_strides, rows_k, params.num_heads_k, params.head_dim,
                 Config::kBlockN);
  if (error != cudaSuccess) return error;
  error = encode(&maps.v, params.v, params.v_strides, rows_k, params.num_heads_k, params.head_dim_v,
                 Config::kBlockN);
  if (error != cudaSuccess) return error;
  if constexpr (Config::kTile.tma_store) {
    error = encode(&maps.out, params.out, params.out_strides, rows_q, params.num_heads_q,
                   params.head_dim_v, 16);
    if (error != cudaSuccess) return error;
  }
  auto* kernel = flash_fwd_sm90_kernel<Config>;
  error = allow_smem<Config>(kernel);
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
