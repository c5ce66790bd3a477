#include "sm80/fwd_launch.cuh"

namespace flashattn_ext::sm80 {

template cudaError_t launch_fwd_bucket<256>(const FwdParams&, const FwdTile&, cudaStream_t);

}  // namespace flashattn_ext::sm80
