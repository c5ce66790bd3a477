// Host entry points of the small kernels that need no feature of one architecture.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flashattn_ext::smxx {

// Per row: delta = sum over Dv of dout * out, minus dlse where given, and lse_log2 (params.h).
cudaError_t run_bwd_delta(const BwdParams& params, cudaStream_t stream);

// Varlen only: rows that no sequence owns (past cu_seqlens[-1], before cu_seqlens[0], past seqused)
// become out = 0 and lse = -inf. A few microseconds when there are none.
cudaError_t run_fwd_fill_unowned(const FwdParams& params, cudaStream_t stream);

// Varlen only: the same for dq, dk and dv: 0.
cudaError_t run_bwd_fill_unowned(const BwdParams& params, cudaStream_t stream);

// out, lse = the softmax-weighted union of two partial results over disjoint keys. out_* is (batch,
// seqlen, num_heads, head_dim_v) of `dtype`, lse_* is (batch, num_heads, seqlen) fp32; all
// contiguous and 16-byte aligned. A state with lse = -inf is neutral, bitwise.
struct MergeParams {
  const void* out_a = nullptr;
  const void* out_b = nullptr;
  const float* lse_a = nullptr;
  const float* lse_b = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
  int32_t batch = 0;  // 1 in varlen
  int32_t num_heads = 0;
  int64_t seqlen = 0;  // rows per batch entry; total_q in varlen
  int32_t head_dim_v = 0;
  Dtype dtype = Dtype::kBFloat16;
};
cudaError_t run_merge(const MergeParams& params, cudaStream_t stream);

}  // namespace flashattn_ext::smxx
