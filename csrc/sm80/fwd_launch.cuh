// Launch of the portable forward kernel for the tiles of one head-dim bucket. Included by the
// instantiation files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "sm80/fwd_kernel.cuh"
#include "sm80/launch_common.cuh"

namespace flashattn_ext::sm80 {

template <typename Config>
cudaError_t launch_fwd(const FwdParams& params, cudaStream_t stream) {
  const TileOrder order = make_query_tile_order(params, Config::kBlockM);
  return launch_tiles<Config>(flash_fwd_sm80_kernel<Config>, params, order, stream);
}

template <typename Element, std::size_t kRow>
using FwdConfigRow =
    FwdConfig<Element, kFwdTiles[kRow].bucket, kFwdTiles[kRow].block_m, kFwdTiles[kRow].block_n,
              kFwdTiles[kRow].num_warps, kFwdTiles[kRow].stages>;

template <int kBucket>
cudaError_t launch_fwd_bucket(const FwdParams& params, const FwdTile& tile, cudaStream_t stream) {
  return launch_row<kBucket, kFwdTiles>(tile, [&](auto row) {
    return params.dtype == Dtype::kBFloat16
               ? launch_fwd<FwdConfigRow<__nv_bfloat16, row.value>>(params, stream)
               : launch_fwd<FwdConfigRow<__half, row.value>>(params, stream);
  });
}

}  // namespace flashattn_ext::sm80
