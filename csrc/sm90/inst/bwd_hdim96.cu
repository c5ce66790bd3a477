#include "sm90/bwd_launch.cuh"

namespace flashattn_ext::sm90 {

template cudaError_t launch_bwd_dq_bucket<96>(const BwdParams&, const BwdDqTile&, cudaStream_t);
template cudaError_t launch_bwd_dkv_bucket<96>(const BwdParams&, const BwdDkvTile&, cudaStream_t);

}  // namespace flashattn_ext::sm90
