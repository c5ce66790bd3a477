// Varlen: rows of a packed tensor that no sequence owns (before the first sequence, between a
// sequence's used rows and the next, past the last) get a fixed value, so that nothing in an output
// is left as allocated. Reads the lengths exactly as the main kernels do.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "attention/seqlen_info.cuh"
#include "smxx/kernels.h"

namespace flashattn_ext::smxx {
namespace {

constexpr int kNumThreads = 128;
// Enough CTAs to fill a long tail at memory speed; with no unowned rows they only read the lengths.
constexpr int kMaxCtas = 512;

// One side's lengths and up to two tensors over its rows: 16-bit (rows, heads, dim), zero-filled.
struct FillSide {
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

struct FillParams {
  FillSide sides[2];  // gridDim.y of them
};

__device__ void fill_row(const FillSide& p, int64_t row) {
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

// Gap b lies between the used rows of sequence b and the start of sequence b + 1. The CTAs are
// dealt out to the gaps, several to one where there are more CTAs; the last gap (the tail) and the
// rows before the first sequence, which can be long, are shared by all.
__global__ void __launch_bounds__(kNumThreads)
    flash_fill_unowned_kernel(const __grid_constant__ FillParams params) {
  const FillSide& p = params.sides[blockIdx.y];
  const auto side = [&](int b) {
    return SeqlenSide(p.cu_seqlens, p.seqused, b, p.max_seqlen, p.total);
  };
  const int num_ctas = gridDim.x, num_gaps = p.batch - 1;
  const int ctas_per_gap = num_gaps > 0 ? max(1, num_ctas / num_gaps) : 1;
  for (int b = blockIdx.x / ctas_per_gap; b < num_gaps; b += num_ctas / ctas_per_gap) {
    const SeqlenSide current = side(b);
    const int64_t end = side(b + 1).start;
    const int64_t first = current.start + current.length + blockIdx.x % ctas_per_gap;
    for (int64_t row = first; row < end; row += ctas_per_gap) fill_row(p, row);
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

cudaError_t launch_fill(const FillParams& p, int num_sides, cudaStream_t stream) {
  int64_t rows = 0;
  for (int i = 0; i < num_sides; ++i) rows = std::max(rows, p.sides[i].total);
  if (rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<uint32_t>(std::min<int64_t>(rows, kMaxCtas)), num_sides);
  flash_fill_unowned_kernel<<<grid, kNumThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

FillSide query_fill(const FwdParams& p) {
  FillSide fill = {};
  fill.cu_seqlens = p.cu_seqlens_q;
  fill.seqused = p.seqused_q;
  fill.batch = p.batch;
  fill.max_seqlen = p.seqlen_q;
  fill.num_heads = p.num_heads_q;
  fill.total = p.total_q;
  return fill;
}

FillSide key_fill(const FwdParams& p) {
  FillSide fill = {};
  fill.cu_seqlens = p.cu_seqlens_k;
  fill.seqused = p.seqused_k;
  fill.batch = p.batch;
  fill.max_seqlen = p.seqlen_k;
  fill.num_heads = p.num_heads_k;
  fill.total = p.total_k;
  return fill;
}

void add_tensor(FillSide& fill, int slot, void* tensor, int32_t dim, const Strides& strides) {
  fill.tensors[slot] = tensor;
  fill.dims[slot] = dim;
  fill.strides[slot] = strides;
}

}  // namespace

cudaError_t run_fwd_fill_unowned(const FwdParams& p, cudaStream_t stream) {
  FillParams fill = {{query_fill(p), {}}};
  add_tensor(fill.sides[0], 0, p.out, p.head_dim_v, p.out_strides);
  fill.sides[0].lse = p.lse;
  fill.sides[0].lse_head_stride = p.lse_head_stride;
  return launch_fill(fill, 1, stream);
}

cudaError_t run_bwd_fill_unowned(const BwdParams& p, cudaStream_t stream) {
  FillParams fill = {{query_fill(p), key_fill(p)}};
  add_tensor(fill.sides[0], 0, p.dq, p.head_dim, p.dq_strides);
  add_tensor(fill.sides[1], 0, p.dk, p.head_dim, p.dk_strides);
  add_tensor(fill.sides[1], 1, p.dv, p.head_dim_v, p.dv_strides);
  return launch_fill(fill, 2, stream);
}

}  // namespace flashattn_ext::smxx
