// Union of two partial attention results over disjoint keys: with L = logaddexp(La, Lb),
// out = e^(La - L) out_a + e^(Lb - L) out_b. A group of lanes covers one (row, head).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>

#include "smxx/kernels.h"
#include "smxx/vector.cuh"

namespace flashattn_ext::smxx {
namespace {

constexpr int kNumThreads = 256;

template <typename Element>
__global__ void __launch_bounds__(kNumThreads)
    flash_merge_kernel(const __grid_constant__ MergeParams p) {
  const int pieces = p.head_dim_v / 8;
  const int64_t count = static_cast<int64_t>(p.batch) * p.seqlen * p.num_heads * pieces;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kNumThreads;
  const Element* out_a = static_cast<const Element*>(p.out_a);
  const Element* out_b = static_cast<const Element*>(p.out_b);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kNumThreads + threadIdx.x; i < count;
       i += stride) {
    const int64_t row_head = i / pieces;  // (batch, row, head), head fastest
    const int64_t row = row_head / p.num_heads;
    const int head = static_cast<int>(row_head - row * p.num_heads);
    const int64_t batch_idx = row / p.seqlen;
    const int64_t lse_idx =
        (batch_idx * p.num_heads + head) * p.seqlen + (row - batch_idx * p.seqlen);
    const float lse_a = p.lse_a[lse_idx], lse_b = p.lse_b[lse_idx];

    const Vector8<Element> a(out_a + 8 * i), b(out_b + 8 * i);
    Vector8<Element> merged;
    float lse;
    // An empty state is neutral to the bit, whatever its out holds; two of them give 0 and -inf.
    if (lse_b == -INFINITY) {
      merged = a;
      lse = lse_a;
      if (lse_a == -INFINITY) merged = Vector8<Element>();
    } else if (lse_a == -INFINITY) {
      merged = b;
      lse = lse_b;
    } else {
      const float high = fmaxf(lse_a, lse_b);
      const float weight_a = expf(lse_a - high), weight_b = expf(lse_b - high);
      const float inv_sum = 1.0f / (weight_a + weight_b);
      lse = high + logf(weight_a + weight_b);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        merged.set(e, (weight_a * a[e] + weight_b * b[e]) * inv_sum);
      }
    }
    merged.store(static_cast<Element*>(p.out) + 8 * i);
    if (i == row_head * pieces) p.lse[lse_idx] = lse;
  }
}

}  // namespace

cudaError_t run_merge(const MergeParams& p, cudaStream_t stream) {
  const int64_t count = static_cast<int64_t>(p.batch) * p.seqlen * p.num_heads * (p.head_dim_v / 8);
  if (count == 0) return cudaSuccess;
  constexpr int64_t kMaxCtas = 1 << 16;
  const int64_t ctas = (count + kNumThreads - 1) / kNumThreads;
  auto* kernel =
      p.dtype == Dtype::kBFloat16 ? flash_merge_kernel<__nv_bfloat16> : flash_merge_kernel<__half>;
  kernel<<<static_cast<uint32_t>(ctas < kMaxCtas ? ctas : kMaxCtas), kNumThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace flashattn_ext::smxx
