// One attention call as plain numbers: everything a plan is made from. It holds no tensor and no
// pointer, so every rule of dispatch can be tested without a GPU.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace flashattn_ext {

enum class Op : int32_t { kForward, kBackward };

enum class ScalarType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64, kOther };

// Options that change the scores or the mask. A family lists those it has.
enum Option : uint32_t {
  kBias = 1u << 0,
  kKeyBias = 1u << 1,
  kMask = 1u << 2,
  kAlibiSlopes = 1u << 3,
  kRelBias = 1u << 4,
  kSink = 1u << 5,
  kBlockMask = 1u << 6,
  kDropout = 1u << 7,
};

// How one input lies in memory. Strides are in elements; a stride whose dimension has size 1 (or 0)
// is never multiplied by anything but 0 and is given as 0.
struct Layout {
  Strides strides;
  bool contiguous_last = true;  // the head dim has stride 1
  bool aligned = true;          // the first element lies on a 16-byte boundary
};

struct Problem {
  Op op = Op::kForward;
  ScalarType dtype = ScalarType::kBFloat16;
  bool varlen = false;

  // Sizes. In varlen, seqlen_* are the caller's upper bounds max_seqlen_*.
  int64_t batch = 0;
  int64_t num_heads_q = 0;
  int64_t num_heads_k = 0;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  int64_t total_q = 0;  // rows of q in varlen; batch * seqlen_q in dense
  int64_t total_k = 0;

  Layout q, k, v;
  Layout out, dout;  // backward only

  // Options as the caller gave them; -1 is an unlimited window.
  bool causal = false;
  bool top_left = false;
  int64_t window_left = -1;
  int64_t window_right = -1;
  uint32_t options = 0;      // Option bits
  bool plain_logits = true;  // no softcap, and a softmax_scale above 0
  // Gradients equal to the bit over runs: asked for by the call or by torch's switch; or wished for
  // by that switch with warn_only, which a plan named by the caller need not heed.
  bool deterministic = false;
  bool rather_deterministic = false;
};

}  // namespace flashattn_ext
