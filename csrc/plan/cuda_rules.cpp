#include "plan/cuda_rules.h"

namespace flashattn_ext {
namespace {

constexpr int64_t kMaxSeqlen = (int64_t{1} << 30) - 1;  // r and kUnlimited stay inside int32
constexpr int64_t kCopyBytes = 16;    // one cp.async, ldmatrix row or vector store
constexpr int64_t kElementBytes = 2;  // float16 and bfloat16

const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat16:
      return "float16";
    case ScalarType::kBFloat16:
      return "bfloat16";
    case ScalarType::kFloat32:
      return "float32";
    case ScalarType::kFloat64:
      return "float64";
    case ScalarType::kOther:
      break;
  }
  return "another dtype";
}

Reason reject_options(uint32_t options) {
  constexpr struct {
    uint32_t bit;
    const char* name;
  } kNames[] = {
      {kBias, "bias"},
      {kKeyBias, "key_bias"},
      {kMask, "mask"},
      {kRelBias, "rel_bias"},
      {kAlibiSlopes, "alibi_slopes"},
      {kSink, "sink"},
      {kBlockMask, "block_mask"},
      {kDropout, "dropout_p"},
  };
  for (const auto& option : kNames) {
    if ((options & option.bit) != 0) {
      return {.text =
                  "{name} is not in the CUDA kernels; it works on CPU tensors: move the call "
                  "there or leave {name} out",
              .name = option.name};
    }
  }
  return {};
}

Reason reject_head_dim(int64_t head_dim, const char* tensors, const char* how) {
  if (head_dim > kMaxHeadDim) {
    return {.text = "head dim {a} of {name} is larger than {b}, its largest tile",
            .a = head_dim,
            .b = kMaxHeadDim,
            .name = tensors};
  }
  if (head_dim < 8 || head_dim % 8 != 0) {
    return {.text = how, .a = head_dim, .b = (head_dim / 8 + 1) * 8, .name = tensors};
  }
  return {};
}

Reason reject_sizes(const Problem& problem) {
  constexpr const char* kTooMany = "{name} {a} is larger than {b}; split the call";
  if (problem.seqlen_q > kMaxSeqlen) {
    return {kTooMany, problem.seqlen_q, kMaxSeqlen, "query length"};
  }
  if (problem.seqlen_k > kMaxSeqlen) {
    return {kTooMany, problem.seqlen_k, kMaxSeqlen, "key length"};
  }
  if (problem.batch > kMaxInt32) return {kTooMany, problem.batch, kMaxInt32, "batch"};
  if (problem.num_heads_q > kMaxInt32) {
    return {kTooMany, problem.num_heads_q, kMaxInt32, "head count"};
  }
  // batch * heads alone must not overflow the product below.
  if (problem.batch > 0 && problem.num_heads_q > kMaxGrid / problem.batch) {
    return {kTooMany, problem.num_heads_q, kMaxGrid / problem.batch, "head count"};
  }
  return {};
}

}  // namespace

bool needs_copy(const Layout& layout) {
  constexpr int64_t kCopyElements = kCopyBytes / kElementBytes;
  const Strides& strides = layout.strides;
  return !layout.contiguous_last || !layout.aligned || strides.batch % kCopyElements != 0 ||
         strides.row % kCopyElements != 0 || strides.head % kCopyElements != 0;
}

Reason reject_problem(const Problem& problem) {
  if (problem.dtype != ScalarType::kFloat16 && problem.dtype != ScalarType::kBFloat16) {
    return {.text =
                "it takes float16 and bfloat16 and q is {name}; cast q, k and v, or call under "
                "torch.autocast('cuda')",
            .name = name_of(problem.dtype)};
  }
  if (Reason reason = reject_head_dim(
          problem.head_dim, "q and k",
          "head dim {a} of {name} is not a multiple of 8; pad {name} with zeros to {b} and pass "
          "softmax_scale=1/sqrt({a})")) {
    return reason;
  }
  if (Reason reason = reject_head_dim(
          problem.head_dim_v, "v",
          "head dim {a} of {name} is not a multiple of 8; pad {name} with zeros to {b} and take "
          "the first {a} columns of the output")) {
    return reason;
  }
  if (Reason reason = reject_options(problem.options)) return reason;
  return reject_sizes(problem);
}

Reason reject_grid(int64_t blocks) {
  if (blocks > kMaxGrid) {
    return {.text = "its grid of {a} blocks is larger than {b}; split the batch",
            .a = blocks,
            .b = kMaxGrid};
  }
  return {};
}

}  // namespace flashattn_ext
