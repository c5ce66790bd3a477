// Lengths and row offsets of one sequence: the only place that reads cu_seqlens and seqused.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace flashattn_ext {

// One side (queries or keys) of one sequence. Device-side values are clamped to the tensor and to
// the caller's maximum, so that wrong ones cannot lead outside of either.
struct SeqlenSide {
  int64_t start;   // first row in the packed tensor; 0 in dense
  int32_t length;  // rows that take part

  __device__ __forceinline__ SeqlenSide(const int32_t* cu_seqlens, const int32_t* seqused,
                                        int batch_idx, int32_t max_seqlen, int64_t total)
      : start(0), length(max_seqlen) {
    if (cu_seqlens != nullptr) {
      start = clamp(cu_seqlens[batch_idx], total);
      const int64_t end = clamp(cu_seqlens[batch_idx + 1], total);
      length = static_cast<int32_t>(clamp(end - start, max_seqlen));
    }
    if (seqused != nullptr) length = static_cast<int32_t>(clamp(seqused[batch_idx], length));
  }

 private:
  __device__ __forceinline__ static int64_t clamp(int64_t x, int64_t high) {
    return x < 0 ? 0 : (x > high ? high : x);
  }
};

__device__ __forceinline__ SeqlenSide query_side(const FwdParams& p, int batch_idx) {
  return {p.cu_seqlens_q, p.seqused_q, batch_idx, p.seqlen_q, p.total_q};
}

__device__ __forceinline__ SeqlenSide key_side(const FwdParams& p, int batch_idx) {
  return {p.cu_seqlens_k, p.seqused_k, batch_idx, p.seqlen_k, p.total_k};
}

// Pointer to (batch_idx, row `start`, head_idx) of a tensor.
template <typename Element>
__device__ __forceinline__ Element* head_ptr(Element* base, const Strides& strides, int batch_idx,
                                             int64_t start, int head_idx) {
  return base + batch_idx * strides.batch + start * strides.row + head_idx * strides.head;
}

}  // namespace flashattn_ext
