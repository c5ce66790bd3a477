// Launch of the portable dQ kernel for the tiles of one head-dim bucket. Included by the
// instantiation files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "sm80/bwd_dq_kernel.cuh"
#include "sm80/launch_common.cuh"

namespace flashattn_ext::sm80 {

template <typename Config>
cudaError_t launch_bwd_dq(const BwdParams& params, cudaStream_t stream) {
  const TileOrder order = make_query_tile_order(params, Config::kBlockM);
  return launch_tiles<Config>(flash_bwd_dq_sm80_kernel<Config>, params, order, stream);
}

template <typename Element, std::size_t kRow>
using BwdDqConfigRow =
    BwdDqConfig<Element, kBwdDqTiles[kRow].bucket, kBwdDqTiles[kRow].block_m,
                kBwdDqTiles[kRow].block_n, kBwdDqTiles[kRow].num_warps, kBwdDqTiles[kRow].stages>;

template <int kBucket>
cudaError_t launch_bwd_dq_bucket(const BwdParams& params, const BwdDqTile& tile,
                                 cudaStream_t stream) {
  return launch_row<kBucket, kBwdDqTiles>(tile, [&](auto row) {
    return params.dtype == Dtype::kBFloat16
               ? launch_bwd_dq<BwdDqConfigRow<__nv_bfloat16, row.value>>(params, stream)
               : launch_bwd_dq<BwdDqConfigRow<__half, row.value>>(params, stream);
  });
}

}  // namespace flashattn_ext::sm80
