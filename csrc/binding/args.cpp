#include "binding/args.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace flashattn_ext {
namespace {

using DenseFwd = decltype(FwdOp<call_fwd>::dense);
using VarlenFwd = decltype(FwdOp<call_fwd>::varlen);
using DenseBwd = decltype(BwdOp<call_bwd>::dense);
using VarlenBwd = decltype(BwdOp<call_bwd>::varlen);

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

void check_no_tangent(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !tensor->_fw_grad(/*level=*/0).defined(),
        "flashattn_ext: attention has no forward-mode derivative (jvp, dual tensors); use the "
        "backward, or torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for that call");
  }
}

FwdResult call_fwd(const FwdArgs& args) {
  static const auto dense = find_op<DenseFwd>("flashattn_ext::fwd");
  static const auto varlen = find_op<VarlenFwd>("flashattn_ext::varlen_fwd");
  const Options& o = args.options;
  if (args.varlen == nullptr) {
    return dense.call(args.q, args.k, args.v, o.bias, o.mask, o.alibi_slopes, o.rel_bias, o.sink,
                      o.block_mask, o.softmax_scale, o.causal, o.top_left, o.window_left,
                      o.window_right, o.softcap, o.dropout_p, o.rng_state, o.deterministic, o.plan);
  }
  const Varlen& n = *args.varlen;
  return varlen.call(args.q, args.k, args.v, n.cu_seqlens_q, n.cu_seqlens_k, n.max_seqlen_q,
                     n.max_seqlen_k, o.bias, o.mask, o.alibi_slopes, o.rel_bias, o.sink,
                     o.block_mask, o.softmax_scale, o.causal, o.top_left, o.window_left,
                     o.window_right, o.softcap, o.dropout_p, o.rng_state, o.deterministic, o.plan,
                     n.seqused_q, n.seqused_k);
}

BwdResult call_bwd(const BwdArgs& args) {
  static const auto dense = find_op<DenseBwd>("flashattn_ext::bwd");
  static const auto varlen = find_op<VarlenBwd>("flashattn_ext::varlen_bwd");
  const Options& o = args.options;
  if (args.varlen == nullptr) {
    return dense.call(args.dout, args.dlse, args.q, args.k, args.v, args.out, args.lse, o.bias,
                      o.mask, o.alibi_slopes, o.rel_bias, o.sink, o.block_mask, o.softmax_scale,
                      o.causal, o.top_left, o.window_left, o.window_right, o.softcap, o.dropout_p,
                      o.rng_state, o.deterministic, o.plan, args.wanted);
  }
  const Varlen& n = *args.varlen;
  return varlen.call(args.dout, args.dlse, args.q, args.k, args.v, args.out, args.lse,
                     n.cu_seqlens_q, n.cu_seqlens_k, n.max_seqlen_q, n.max_seqlen_k, o.bias, o.mask,
                     o.alibi_slopes, o.rel_bias, o.sink, o.block_mask, o.softmax_scale, o.causal,
                     o.top_left, o.window_left, o.window_right, o.softcap, o.dropout_p, o.rng_state,
                     o.deterministic, o.plan, n.seqused_q, n.seqused_k, args.wanted);
}

}  // namespace flashattn_ext
