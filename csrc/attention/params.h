// The plain structs that carry one attention call from the binding to a kernel.
//
// Units: every stride is in ELEMENTS of its tensor; the last dimension is contiguous (stride 1).
// A pointer's shape is given dense / varlen. `cu_seqlens_q == nullptr` means dense.
// Positions: key j is at relative position r = j - (i + off) of query i, where off is
// seqlen_k - seqlen_q (bottom-right alignment) or 0 (top_left). A key is visible when
// -window_left <= r <= window_right; causal is window_right == 0.
#pragma once

#include <cstdint>

#include "attention/divisor.h"

namespace flashattn_ext {

enum class Dtype : int32_t { kFloat16 = 0, kBFloat16 = 1 };

// Window bound that never masks. Small enough that `i + off + kUnlimited` cannot overflow int32
// for any sequence the grid can address (seqlens are at most 2^30 - 1; checked by the plan).
inline constexpr int32_t kUnlimited = 1 << 30;

struct Strides {
  int64_t batch = 0;  // 0 in varlen
  int64_t row = 0;
  int64_t head = 0;
};

struct FwdParams {
  // Inputs.
  const void* q = nullptr;  // (B, Sq, Hq, D) / (total_q, Hq, D)
  const void* k = nullptr;  // (B, Sk, Hk, D) / (total_k, Hk, D)
  const void* v = nullptr;  // (B, Sk, Hk, Dv) / (total_k, Hk, Dv)
  Strides q_strides, k_strides, v_strides;

  // Outputs.
  void* out = nullptr;   // (B, Sq, Hq, Dv) / (total_q, Hq, Dv)
  float* lse = nullptr;  // (B, Hq, Sq) / (Hq, total_q), fp32, natural log, contiguous
  Strides out_strides;
  int64_t lse_batch_stride = 0;  // Hq * Sq / 0
  int64_t lse_head_stride = 0;   // Sq / total_q

  // Sizes. In varlen, seqlen_* are the caller's upper bounds max_seqlen_*.
  int32_t batch = 0;
  int32_t num_heads_q = 0;
  int32_t num_heads_k = 0;
  int32_t seqlen_q = 0;
  int32_t seqlen_k = 0;
  int32_t head_dim = 0;    // D, a multiple of 8
  int32_t head_dim_v = 0;  // Dv, a multiple of 8
  int64_t total_q = 0;     // rows of q in varlen; B * Sq in dense
  int64_t total_k = 0;

  // Varlen lengths, on the device. Values are clamped on the device to the tensors' sizes.
  const int32_t* cu_seqlens_q = nullptr;  // (B + 1)
  const int32_t* cu_seqlens_k = nullptr;  // (B + 1)
  const int32_t* seqused_q = nullptr;     // (B), at most the sequence's own length
  const int32_t* seqused_k = nullptr;     // (B)

  // Options.
  float softmax_scale = 1.0f;
  float softcap = 0.0f;  // 0 = off; logit = softcap * tanh(scale * q.k / softcap)
  int32_t window_left = kUnlimited;
  int32_t window_right = kUnlimited;
  bool top_left = false;

  Dtype dtype = Dtype::kBFloat16;
};

// Some query may see less than every key of its sequence.
FLASHATTN_EXT_HOST_DEVICE inline bool is_masked(const FwdParams& p) {
  return p.window_left < kUnlimited || p.window_right < kUnlimited;
}

// The backward reads the forward's tensors (FwdParams::out and lse are inputs here).
struct BwdParams : FwdParams {
  const void* dout = nullptr;   // shape of out
  const float* dlse = nullptr;  // shape of lse, or nullptr when no gradient flows into lse
  Strides dout_strides;
  int64_t dlse_batch_stride = 0;
  int64_t dlse_head_stride = 0;
  int64_t dlse_row_stride = 0;

  void* dq = nullptr;  // shape of q
  void* dk = nullptr;  // shape of k
  void* dv = nullptr;  // shape of v
  Strides dq_strides, dk_strides, dv_strides;

  // Workspaces of this launch, both fp32 and laid out like lse (same strides), written by
  // smxx::run_bwd_delta and read by the two main kernels.
  float* delta = nullptr;     // rowsum(dout * out) - dlse
  float* lse_log2 = nullptr;  // lse * log2(e); +inf for a row that sees no key, so that P = 0
};

}  // namespace flashattn_ext
