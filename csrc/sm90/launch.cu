// Dispatch of a chosen tile to the instantiation file of its head-dim bucket.
#include "sm90/launch.h"

namespace flashattn_ext::sm90 {

template <int kBucket>
cudaError_t launch_fwd_bucket(const FwdParams& params, const FwdTile& tile,
                              const FwdSchedule& schedule, cudaStream_t stream);

cudaError_t run_fwd(const FwdParams& params, const FwdTile& tile, const FwdSchedule& schedule,
                    cudaStream_t stream) {
  switch (tile.bucket) {
    case 64:
      return launch_fwd_bucket<64>(params, tile, schedule, stream);
    case 96:
      return launch_fwd_bucket<96>(params, tile, schedule, stream);
    case 128:
      return launch_fwd_bucket<128>(params, tile, schedule, stream);
    case 192:
      return launch_fwd_bucket<192>(params, tile, schedule, stream);
    case 256:
      return launch_fwd_bucket<256>(params, tile, schedule, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flashattn_ext::sm90
