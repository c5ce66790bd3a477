// Dispatch of a chosen tile to the instantiation file of its head-dim bucket.
#include "sm80/launch.h"

namespace flashattn_ext::sm80 {

template <int kBucket>
cudaError_t launch_fwd_bucket(const FwdParams& params, const FwdTile& tile, cudaStream_t stream);
template <int kBucket>
cudaError_t launch_bwd_dq_bucket(const BwdParams& params, const BwdDqTile& tile,
                                 cudaStream_t stream);
template <int kBucket>
cudaError_t launch_bwd_dkv_bucket(const BwdParams& params, const BwdDkvTile& tile,
                                  cudaStream_t stream);

cudaError_t run_fwd(const FwdParams& params, const FwdTile& tile, cudaStream_t stream) {
  switch (tile.bucket) {
    case 32:
      return launch_fwd_bucket<32>(params, tile, stream);
    case 64:
      return launch_fwd_bucket<64>(params, tile, stream);
    case 96:
      return launch_fwd_bucket<96>(params, tile, stream);
    case 128:
      return launch_fwd_bucket<128>(params, tile, stream);
    case 192:
      return launch_fwd_bucket<192>(params, tile, stream);
    case 256:
      return launch_fwd_bucket<256>(params, tile, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t run_bwd_dq(const BwdParams& params, const BwdDqTile& tile, cudaStream_t stream) {
  switch (tile.bucket) {
    case 32:
      return launch_bwd_dq_bucket<32>(params, tile, stream);
    case 64:
      return launch_bwd_dq_bucket<64>(params, tile, stream);
    case 96:
      return launch_bwd_dq_bucket<96>(params, tile, stream);
    case 128:
      return launch_bwd_dq_bucket<128>(params, tile, stream);
    case 192:
      return launch_bwd_dq_bucket<192>(params, tile, stream);
    case 256:
      return launch_bwd_dq_bucket<256>(params, tile, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t run_bwd_dkv(const BwdParams& params, const BwdDkvTile& tile, cudaStream_t stream) {
  switch (tile.bucket) {
    case 32:
      return launch_bwd_dkv_bucket<32>(params, tile, stream);
    case 64:
      return launch_bwd_dkv_bucket<64>(params, tile, stream);
    case 96:
      return launch_bwd_dkv_bucket<96>(params, tile, stream);
    case 128:
      return launch_bwd_dkv_bucket<128>(params, tile, stream);
    case 192:
      return launch_bwd_dkv_bucket<192>(params, tile, stream);
    case 256:
      return launch_bwd_dkv_bucket<256>(params, tile, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flashattn_ext::sm80
