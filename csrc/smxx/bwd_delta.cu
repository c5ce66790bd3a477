// Row statistics of the backward: delta = rowsum(dout * out) - dlse and lse_log2 = lse * log2(e).
// One CTA per (kDeltaRows query rows, head, sequence); a group of lanes covers a row with 16-byte
// loads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>

#include "attention/score.cuh"
#include "attention/seqlen_info.cuh"
#include "smxx/kernels.h"
#include "smxx/tiles.h"
#include "smxx/vector.cuh"

namespace flashattn_ext::smxx {
namespace {

constexpr int kNumThreads = 256;

// `lanes_per_row` is a power of two, at most 32, and covers head_dim_v in one 16-byte load a lane.
template <typename Element>
__global__ void __launch_bounds__(kNumThreads)
    flash_bwd_delta_kernel(const __grid_constant__ BwdParams params, int num_blocks,
                           int lanes_per_row) {
  const int block = blockIdx.x % num_blocks;
  const int head = blockIdx.x / num_blocks;
  const int batch_idx = head / params.num_heads_q, head_idx = head % params.num_heads_q;
  const SeqlenSide side = query_side(params, batch_idx);
  const int m0 = block * kDeltaRows;
  const int last_row = min(m0 + kDeltaRows, side.length);

  const Element* out = head_ptr(static_cast<const Element*>(params.out), params.out_strides,
                                batch_idx, side.start, head_idx);
  const Element* dout = head_ptr(static_cast<const Element*>(params.dout), params.dout_strides,
                                 batch_idx, side.start, head_idx);
  const int64_t stats_offset =
      batch_idx * params.lse_batch_stride + head_idx * params.lse_head_stride + side.start;
  const int64_t dlse_offset = batch_idx * params.dlse_batch_stride +
                              head_idx * params.dlse_head_stride +
                              side.start * params.dlse_row_stride;
  const int lane_in_row = threadIdx.x % lanes_per_row;
  const int rows_per_pass = kNumThreads / lanes_per_row;
  const bool in_row = 8 * lane_in_row < params.head_dim_v;

  for (int row0 = m0; row0 < last_row; row0 += rows_per_pass) {
    const int row = row0 + threadIdx.x / lanes_per_row;
    const bool valid = row < last_row;
    const float lse = valid ? params.lse[stats_offset + row] : 0.0f;
    float sum = 0.0f;
    if (valid && in_row) {
      const Vector8<Element> o(out + row * params.out_strides.row + 8 * lane_in_row);
      const Vector8<Element> d(dout + row * params.dout_strides.row + 8 * lane_in_row);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(o[i], d[i], sum);
    }
    for (int offset = lanes_per_row / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (!valid) continue;
    const bool empty = lse == -INFINITY;
    if (empty) {  // no CTA of the fused Hopper kernel may come to this row
      Element* dq = head_ptr(static_cast<Element*>(params.dq), params.dq_strides, batch_idx,
                             side.start + row, head_idx);
      for (int col = 8 * lane_in_row; col < params.head_dim; col += 8 * lanes_per_row) {
        Vector8<Element>().store(dq + col);
      }
    }
    if (lane_in_row == 0) {
      if (params.dlse != nullptr && !empty) {
        sum -= params.dlse[dlse_offset + row * params.dlse_row_stride];
      }
      params.delta[stats_offset + row] = empty ? 0.0f : sum;
      params.lse_log2[stats_offset + row] = empty ? INFINITY : lse * kLog2e;
    }
  }
}

}  // namespace

cudaError_t run_bwd_delta(const BwdParams& params, cudaStream_t stream) {
  const int num_blocks = (params.seqlen_q + kDeltaRows - 1) / kDeltaRows;
  const int64_t grid = static_cast<int64_t>(num_blocks) * params.batch * params.num_heads_q;
  if (grid == 0) return cudaSuccess;
  int lanes_per_row = 1;
  while (8 * lanes_per_row < params.head_dim_v) lanes_per_row *= 2;
  auto* kernel = params.dtype == Dtype::kBFloat16 ? flash_bwd_delta_kernel<__nv_bfloat16>
                                                  : flash_bwd_delta_kernel<__half>;
  kernel<<<static_cast<uint32_t>(grid), kNumThreads, 0, stream>>>(params, num_blocks,
                                                                  lanes_per_row);
  return cudaGetLastError();
}

}  // namespace flashattn_ext::smxx
