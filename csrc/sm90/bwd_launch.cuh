// Launches of the Hopper backward kernels for the tiles of one head-dim bucket. Included by the
// instantiation files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "attention/launch.cuh"
#include "attention/tile_order.h"
#include "sm90/bwd_dkv_kernel.cuh"
#include "sm90/bwd_dq_convert.cuh"
#include "sm90/bwd_dq_kernel.cuh"
#include "sm90/bwd_fused_kernel.cuh"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace flashattn_ext::sm90 {

// `tiles`: a TileOrder, or what a kernel takes in its place. `rows_q`, `rows_k`: of a box of Q and
// dO, of K and V.
template <typename Config, typename Tiles, typename... More>
cudaError_t launch_bwd(void (*kernel)(BwdParams, ScoreTransform, Tiles, BwdTensorMaps, More...),
                       const BwdParams& params, const Tiles& tiles, int64_t num_ctas,
                       int32_t rows_q, int32_t rows_k, cudaStream_t stream, const More&... more) {
  if (num_ctas == 0) return cudaSuccess;
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
  kernel<<<static_cast<uint32_t>(num_ctas), Config::kNumThreads, Config::kSmemBytes, stream>>>(
      params, ScoreTransform(params), tiles, maps, more...);
  return cudaGetLastError();
}

template <typename Config>
cudaError_t launch_bwd_dq(const BwdParams& params, cudaStream_t stream) {
  const TileOrder order = make_query_tile_order(params, Config::kBlockM);
  return launch_bwd<Config>(flash_bwd_dq_sm90_kernel<Config>, params, order, order.num_tiles(), 64,
                            Config::kBlockN, stream);
}

template <typename Config>
cudaError_t launch_bwd_dq_convert(const BwdParams& params, const BwdFusedDq& dq,
                                  cudaStream_t stream) {
  const int32_t num_blocks = ceil_div(params.seqlen_q, Config::kBlockM);
  const int64_t grid = static_cast<int64_t>(num_blocks) * params.batch * params.num_heads_q;
  if (grid == 0) return cudaSuccess;
  flash_bwd_dq_convert_sm90_kernel<Config>
      <<<static_cast<uint32_t>(grid), 128 * Config::kConsumers, 0, stream>>>(params, dq,
                                                                             num_blocks);
  return cudaGetLastError();
}

template <typename Config>
cudaError_t launch_bwd_fused(const BwdParams& params, const BwdFusedWorkspace& workspace,
                             cudaStream_t stream) {
  const BwdDqBuffer buffer(params.cu_seqlens_q != nullptr, params.batch, params.seqlen_q,
                           params.total_q, Config::kBlockM, Config::kHeadDim);
  const BwdFusedDq dq{workspace.dq, buffer, workspace.counters + 1};
  // In order the first to come to a block of dQ stores.
  void* cleared = workspace.counters;
  int64_t bytes = buffer.counter_bytes(params.num_heads_q, Config::kInOrder);
  if constexpr (!Config::kInOrder) {
    cleared = workspace.dq;
    bytes += buffer.bytes(params.num_heads_q);
  }
  cudaError_t error = cudaMemsetAsync(cleared, 0, static_cast<size_t>(bytes), stream);
  if (error != cudaSuccess) return error;
  const TileOrder order =
      make_key_tile_order(params, Config::kBlockN, sizeof(float) * Config::kHeadDim);
  error = launch_bwd<Config>(flash_bwd_fused_sm90_kernel<Config>, params,
                             BwdFusedTiles{order, workspace.counters}, workspace.num_ctas,
                             Config::kBlockM, 64, stream, dq);
  if (error != cudaSuccess) return error;
  return launch_bwd_dq_convert<Config>(params, dq, stream);
}

template <typename Config>
cudaError_t launch_bwd_dkv(const BwdParams& params, cudaStream_t stream) {
  const TileOrder order = make_key_tile_order(params, Config::kBlockN);
  return launch_bwd<Config>(flash_bwd_dkv_sm90_kernel<Config>, params, order, order.num_tiles(),
                            Config::kBlockM, 64, stream);
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

template <int kBucket>
cudaError_t launch_bwd_fused_bucket(const BwdParams& params, const BwdFusedTile& tile,
                                    const BwdFusedWorkspace& workspace, cudaStream_t stream) {
  return launch_row<kBucket, kBwdFusedTiles>(tile, [&](auto row) {
    return params.dtype == Dtype::kBFloat16
               ? launch_bwd_fused<BwdFusedConfig<__nv_bfloat16, row.value>>(params, workspace,
                                                                            stream)
               : launch_bwd_fused<BwdFusedConfig<__half, row.value>>(params, workspace, stream);
  });
}

}  // namespace flashattn_ext::sm90
