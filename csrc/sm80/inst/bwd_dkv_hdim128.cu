#include "sm80/bwd_dkv_launch.cuh"

namespace flashattn_ext::sm80 {

template cudaError_t launch_bwd_dkv_bucket<128>(const BwdParams&, const BwdDkvTile&, cudaStream_t);

}  // namespace flashattn_ext::sm80
