#include "sm80/bwd_dq_launch.cuh"

namespace flashattn_ext::sm80 {

template cudaError_t launch_bwd_dq_bucket<96>(const BwdParams&, const BwdDqTile&, cudaStream_t);

}  // namespace flashattn_ext::sm80
