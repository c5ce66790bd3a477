// Launches of the Hopper backward kernels for the tiles of one head-dim bucket. Included by the
// instantiation files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "attention/launch.cuh"
#include "attention/tile_order.h"
#include "sm90/bwd_dkv_kernel.cuh"
#include "sm90/bwd_dq_kernel.cuh"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace flashattn_ext::sm90 {

// `rows_q`, `rows_k`: of a box of Q and dO, of K and V.
template <typename Config>
cudaError_t launch_bwd(void (*kernel)(BwdParams, ScoreTransform, TileOrder, BwdTensorMaps),
                       const BwdParams& params, const TileOrder& order, int32_t rows_q,
                       int32_t rows_k, cudaStream_t stream) {
  if (order.num_tiles() == 0) return cudaSuccess;
  const int32_t dim = params.head_dim, dim_v = params.head_dim_v;
  BwdTensorMaps maps;
  const std::pair<CUtensorMap*, TensorMapShape> encoded[] = {
      {&maps.q, query_rows(params, params.q, params.q_strides, dim, rows_q)},
      {&maps.k, key_rows(params, params.k, params.k_strides, dim, rows_k)},
      {&maps.v, key_rows(params, params.v, params.v_strides, dim_v, rows_k)},
      {&maps.dout, query_rows(params, params.dout, params.dout_strides, dim_v, rows_q)}};
  for (const auto& [map, shape] : encoded) {
    const cudaError_t error = encode_tensor_map(shape, map);
    if (error != cudaSuccess) return error;
  }
  const cudaError_t error = allow_smem<Config>(kernel);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<uint32_t>(order.num_tiles()), Config::kNumThreads, Config::kSmemBytes,
           stream>>>(params, ScoreTransform(params), order, maps);
  return cudaGetLastError();
}

template <typename Config>
cudaError_t launch_bwd_dq(const BwdParams& params, cudaStream_t stream) {
  const TileOrder order = make_query_tile_order(params, Config::kBlockM);
  return launch_bwd<Config>(flash_bwd_dq_sm90_kernel<Config>, params, order, 64, Config::kBlockN,
                            stream);
}

template <typename Config>
cudaError_t launch_bwd_dkv(const BwdParams& params, cudaStream_t stream) {
  const TileOrder order = make_key_tile_order(params, Config::kBlockN);
  return launch_bwd<Config>(flash_bwd_dkv_sm90_kernel<Config>, params, order, Config::kBlockM, 64,
                            stream);
}

template <int kBucket>
cudaError_t launch_bwd_dq_bucket(const BwdParams& params, const BwdDqTile& tile,
                                 cudaStream_t stream) {
  return launch_row<kBucket, kBwdDqTiles>(tile, [&](auto row) {
    return params.dtype == Dtype::kBFloat16
               ? launch_bwd_dq<BwdDqConfig<__nv_bfloat16, row.value>>(params, stream)
               : launch_bwd_dq<BwdDqConfig<__half, row.value>>(params, stream);
  });
}

template <int kBucket>
cudaError_t launch_bwd_dkv_bucket(const BwdParams& params, const BwdDkvTile& tile,
                                  cudaStream_t stream) {
  return launch_row<kBucket, kBwdDkvTiles>(tile, [&](auto row) {
    return params.dtype == Dtype::kBFloat16
               ? launch_bwd_dkv<BwdDkvConfig<__nv_bfloat16, row.value>>(params, stream)
               : launch_bwd_dkv<BwdDkvConfig<__half, row.value>>(params, stream);
  });
}

}  // namespace flashattn_ext::sm90
