#include "sm90/fwd_launch.cuh"

namespace flashattn_ext::sm90 {

template cudaError_t launch_fwd_bucket<192>(const FwdParams&, const FwdTile&, const FwdSchedule&,
                                            cudaStream_t);

}  // namespace flashattn_ext::sm90
