// Dispatch of a chosen tile to the instantiation file of its head-dim bucket.
#include "sm90/launch.h"

#include "attention/launch.cuh"

namespace flashattn_ext::sm90 {

template <int kBucket>
cudaError_t launch_fwd_bucket(const FwdParams& params, const FwdTile& tile,
                              const FwdSchedule& schedule, cudaStream_t stream);
template <int kBucket>
cudaError_t launch_bwd_dq_bucket(const BwdParams& params, const BwdDqTile& tile,
                                 cudaStream_t stream);
template <int kBucket>
cudaError_t launch_bwd_dkv_bucket(const BwdParams& params, const BwdDkvTile& tile,
                                  cudaStream_t stream);
template <int kBucket>
cudaError_t launch_bwd_fused_bucket(const BwdParams& params, const BwdFusedTile& tile,
                                    const BwdFusedWorkspace& workspace, cudaStream_t stream);

cudaError_t run_fwd(const FwdParams& params, const FwdTile& tile, const FwdSchedule& schedule,
                    cudaStream_t stream) {
  return launch_bucket<64, 96, 128, 192, 256>(tile.bucket, [&](auto bucket) {
    return launch_fwd_bucket<bucket.value>(params, tile, schedule, stream);
  });
}

cudaError_t run_bwd_dq(const BwdParams& params, const BwdDqTile& tile, cudaStream_t stream) {
  return launch_bucket<64, 96, 128, 192, 256>(tile.bucket, [&](auto bucket) {
    return launch_bwd_dq_bucket<bucket.value>(params, tile, stream);
  });
}

cudaError_t run_bwd_dkv(const BwdParams& params, const BwdDkvTile& tile, cudaStream_t stream) {
  return launch_bucket<64, 96, 128, 192, 256>(tile.bucket, [&](auto bucket) {
    return launch_bwd_dkv_bucket<bucket.value>(params, tile, stream);
  });
}

cudaError_t run_bwd_fused(const BwdParams& params, const BwdFusedTile& tile,
                          const BwdFusedWorkspace& workspace, cudaStream_t stream) {
  return launch_bucket<64, 128>(tile.bucket, [&](auto bucket) {
    return launch_bwd_fused_bucket<bucket.value>(params, tile, workspace, stream);
  });
}

}  // namespace flashattn_ext::sm90
