// Launch of the portable dK/dV kernel for the tiles of one head-dim bucket. Included by the
// instantiation files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "sm80/bwd_dkv_kernel.cuh"
#include "sm80/launch_common.cuh"

namespace flashattn_ext::sm80 {

template <typename Config>
cudaError_t launch_bwd_dkv(const BwdParams& params, cudaStream_t stream) {
  const TileOrder order = make_key_tile_order(params, Config::kBlockN);
  return launch_tiles<Config>(flash_bwd_dkv_sm80_kernel<Config>, params, order, stream);
}

template <typename Element, std::size_t kRow>
using BwdDkvConfigRow = BwdDkvConfig<Element, kBwdDkvTiles[kRow].bucket, kBwdDkvTiles[kRow].block_m,
                                     kBwdDkvTiles[kRow].block_n, kBwdDkvTiles[kRow].num_warps,
                                     kBwdDkvTiles[kRow].stages>;

template <int kBucket>
cudaError_t launch_bwd_dkv_bucket(const BwdParams& params, const BwdDkvTile& tile,
                                  cudaStream_t stream) {
  return launch_row<kBucket, kBwdDkvTiles>(tile, [&](auto row) {
    return params.dtype == Dtype::kBFloat16
               ? launch_bwd_dkv<BwdDkvConfigRow<__nv_bfloat16, row.value>>(params, stream)
               : launch_bwd_dkv<BwdDkvConfigRow<__half, row.value>>(params, stream);
  });
}

}  // namespace flashattn_ext::sm80
