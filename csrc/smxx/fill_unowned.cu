// Varlen: rows of a packed tensor that no sequence owns (before the first sequence, between a
// sequence's used rows and the next, past the last) get a fixed value, so that nothing in an output
// is left as allocated. Reads the lengths exactly as the main kernels do.
#include <cuda_runtime.h>

#include <cmath>

#include "attention/seqlen_info.cuh"
#include "smxx/kernels.h"

namespace flashattn_ext::smxx {
namespace {

constexpr int kNumThreads = 128;
// Enough CTAs to fill a long tail at memory speed; with no unowned rows they only read the lengths.
constexpr int kMaxCtas = 512;

// One side's lengths and up to two tensors over its rows: 16-bit (rows, heads, dim), zero-filled.
struct FillParams {
  const int32_t* cu_seqlens;
  const int32_t* seqused;
  int32_t batch, max_seqlen, num_heads;
  int64_t total;
  void* tensors[2];  // nullptr = none
  int32_t dims[2];
  Strides strides[2];
  float* lse;  // (heads, total), filled with -inf; nullptr = none
  int64_t lse_head_stride;
};

__device__ void fill_row(const FillParams& p, int64_t row) {
  for (int t = 0; t < 2; ++t) {
    if (p.tensors[t] == nullptr) continue;
    const int pieces = p.dims[t] / 8;
    for (int i = threadIdx.x; i < p.num_heads * pieces; i += kNumThreads) {
      const int64_t offset = row * p.strides[t].row + (i / pieces) * p.strides[t].head;
      // 16-bit elements: zero has the same bits in fp16 and bf16.
      uint16_t* ptr = static_cast<uint16_t*>(p.tensors[t]) + offset + 8 * (i % pieces);
      *reinterpret_cast<uint4*>(ptr) = make_uint4(0, 0, 0, 0);
    }
  }
  if (p.lse != nullptr) {
    for (int h = threadIdx.x; h < p.num_heads; h += kNumThreads) {
      p.lse[h * p.lse_head_stride + row] = -INFINITY;
    }
  }
}

// Gap b lies between the used rows of sequence b and the start of sequence b + 1; each gap but the
// last belongs to one CTA. The last (the tail) and the rows before the first sequence, which can be
// long, are shared by all.
__global__ void __launch_bounds__(kNumThreads)
    flash_fill_unowned_kernel(const __grid_constant__ FillParams p) {
  const auto side = [&](int b) {
    return SeqlenSide(p.cu_seqlens, p.seqused, b, p.max_seqlen, p.total);
  };
  for (int b = blockIdx.x; b + 1 < p.batch; b += gridDim.x) {
    const SeqlenSide current = side(b);
    const int64_t end = side(b + 1).start;
    for (int64_t row = current.start + current.length; row < end; ++row) fill_row(p, row);
  }
  int64_t tail = 0;
  if (p.batch > 0) {
    const SeqlenSide last = side(p.batch - 1);
    tail = last.start + last.length;
    const int64_t head = side(0).start;
    for (int64_t row = blockIdx.x; row < head; row += gridDim.x) fill_row(p, row);
  }
  for (int64_t row = tail + blockIdx.x; row < p.total; row += gridDim.x) fill_row(p, row);
}

cudaError_t launch_fill(const FillParams& p, cudaStream_t stream) {
  if (p.total == 0 || p.num_heads == 0) return cudaSuccess;
  const int64_t grid = p.total < kMaxCtas ? p.total : kMaxCtas;
  flash_fill_unowned_kernel<<<static_cast<uint32_t>(grid), kNumThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

FillParams query_fill(const FwdParams& p) {
  FillParams fill = {};
  fill.cu_seqlens = p.cu_seqlens_q;
  fill.seqused = p.seqused_q;
  fill.batch = p.batch;
  fill.max_seqlen = p.seqlen_q;
  fill.num_heads = p.num_heads_q;
  fill.total = p.total_q;
  return fill;
}

}  // namespace

cudaError_t run_fwd_fill_unowned(const FwdParams& p, cudaStream_t stream) {
  FillParams fill = query_fill(p);
  fill.tensors[0] = p.out;
  fill.dims[0] = p.head_dim_v;
  fill.strides[0] = p.out_strides;
  fill.lse = p.lse;
  fill.lse_head_stride = p.lse_head_stride;
  return launch_fill(fill, stream);
}

cudaError_t run_bwd_fill_unowned(const BwdParams& p, cudaStream_t stream) {
  if (p.dq != nullptr) {
    FillParams fill = query_fill(p);
    fill.tensors[0] = p.dq;
    fill.dims[0] = p.head_dim;
    fill.strides[0] = p.dq_strides;
    const cudaError_t error = launch_fill(fill, stream);
    if (error != cudaSuccess) return error;
  }
  if (p.dk == nullptr) return cudaSuccess;
  FillParams fill = {};
  fill.cu_seqlens = p.cu_seqlens_k;
  fill.seqused = p.seqused_k;
  fill.batch = p.batch;
  fill.max_seqlen = p.seqlen_k;
  fill.num_heads = p.num_heads_k;
  fill.total = p.total_k;
  fill.tensors[0] = p.dk;
  fill.dims[0] = p.head_dim;
  fill.strides[0] = p.dk_strides;
  fill.tensors[1] = p.dv;
  fill.dims[1] = p.head_dim_v;
  fill.strides[1] = p.dv_strides;
  return launch_fill(fill, stream);
}

}  // namespace flashattn_ext::smxx
