// Host entry points of the Hopper kernels (see sm80/launch.h).
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "sm90/tiles.h"

namespace flashattn_ext::sm90 {

// How a persistent launch spreads its tiles.
struct FwdSchedule {
  int32_t num_ctas;       // at most as many as run at once
  int32_t* tile_counter;  // 4 bytes of this launch; nullptr: every CTA takes every grid-th tile
};

// What the fused backward needs beside BwdParams (bwd_dq_buffer.h); memory may hold anything.
struct BwdFusedWorkspace {
  int32_t num_ctas;    // at most as many as run at once
  float* dq;           // BwdDqBuffer::bytes
  uint32_t* counters;  // BwdDqBuffer::counter_bytes, right behind
};

cudaError_t run_fwd(const FwdParams& params, const FwdTile& tile, const FwdSchedule& schedule,
                    cudaStream_t stream);
cudaError_t run_bwd_dq(const BwdParams& params, const BwdDqTile& tile, cudaStream_t stream);
cudaError_t run_bwd_dkv(const BwdParams& params, const BwdDkvTile& tile, cudaStream_t stream);
// dQ, dK and dV.
cudaError_t run_bwd_fused(const BwdParams& params, const BwdFusedTile& tile,
                          const BwdFusedWorkspace& workspace, cudaStream_t stream);

}  // namespace flashattn_ext::sm90
