#include "sm90/bwd_launch.cuh"

namespace flashattn_ext::sm90 {

template cudaError_t launch_bwd_fused_bucket<128>(const BwdParams&, const BwdFusedTile&,
                                                  const BwdFusedWorkspace&, cudaStream_t);

}  // namespace flashattn_ext::sm90
