// Host entry points of the portable kernels. Each runs the one table row the plan chose and returns
// the launch's error; none of them allocates, synchronises or changes the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "sm80/tiles.h"

namespace flashattn_ext::sm80 {

cudaError_t run_fwd(const FwdParams& params, const FwdTile& tile, cudaStream_t stream);

// Reads params.delta and lse_log2 (smxx::run_bwd_delta); writes dq.
cudaError_t run_bwd_dq(const BwdParams& params, const BwdDqTile& tile, cudaStream_t stream);

// Reads params.delta and lse_log2; writes dk and dv.
cudaError_t run_bwd_dkv(const BwdParams& params, const BwdDkvTile& tile, cudaStream_t stream);

}  // namespace flashattn_ext::sm80
