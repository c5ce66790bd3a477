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
  const TileOrder order = make_query_tile_order(params, Config::kBlockM);
  if (order.num_tiles() == 0) return cudaSuccess;

  const bool varlen = params.cu_seqlens_q != nullptr;
  const auto shape = [&](const void* data, const Strides& strides, int64_t total, int64_t rows,
                         int64_t heads, int64_t head_dim, int32_t box_rows) -> TensorMapShape {
    return {data,
            varlen ? 1 : params.batch,
            varlen ? total : rows,
            heads,
            head_dim,
            strides,
            box_rows,
            params.dtype};
  };
  FwdTensorMaps maps;
  const TensorMapShape shapes[3] = {
      shape(params.q, params.q_strides, params.total_q, params.seqlen_q, params.num_heads_q,
            params.head_dim, 64),
      shape(params.k, params.k_strides, params.total_k, params.seqlen_k, params.num_heads_k,
            params.head_dim, Config::kBlockN),
      shape(params.v, params.v_strides, params.total_k, params.seqlen_k, params.num_heads_k,
            params.head_dim_v, Config::kBlockN)};
  CUtensorMap* const encoded[3] = {&maps.q, &maps.k, &maps.v};
  for (int i = 0; i < 3; ++i) {
    const cudaError_t error = encode_tensor_map(shapes[i], encoded[i]);
    if (error != cudaSuccess) return error;
  }
  auto* kernel = flash_fwd_sm90_kernel<Config>;
  const cudaError_t error = allow_smem<Config>(kernel);
  if (error != cudaSuccess) return error;
  if (schedule.tile_counter != nullptr) {
    const cudaError_t not_zeroed =
        cudaMemsetAsync(schedule.tile_counter, 0, sizeof(int32_t), stream);
    if (not_zeroed != cudaSuccess) return not_zeroed;
  }
  kernel<<<schedule.num_ctas, Config::kNumThreads, Config::kSmemBytes, stream>>>(
      params, ScoreTransform(params), order, maps, schedule.tile_counter);
  return cudaGetLastError();
}

template <typename Element, std::size_t kRow>
using FwdConfigRow = FwdConfig<Element, kFwdTiles[kRow].bucket, kFwdTiles[kRow].block_n,
                               kFwdTiles[kRow].consumers, kFwdTiles[kRow].q_in_regs>;

template <int kBucket>
cudaError_t launch_fwd_bucket(const FwdParams& params, const FwdTile& tile,
                              const FwdSchedule& schedule, cudaStream_t stream) {
  return launch_row<kBucket, kFwdTiles>(tile, [&](auto row) {
    static_assert(FwdConfigRow<__half, row.value>::kSmemBytes == kFwdTiles[row.value].smem_bytes());
    return params.dtype == Dtype::kBFloat16
               ? launch_fwd<FwdConfigRow<__nv_bfloat16, row.value>>(params, schedule, stream)
               : launch_fwd<FwdConfigRow<__half, row.value>>(params, schedule, stream);
  });
}

}  // namespace flashattn_ext::sm90
