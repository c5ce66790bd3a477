// The arguments of the ops as structs, so that Meta, CUDA and autograd are each written once for
// the dense and the varlen op. The long argument lists of the schemas appear in this pair of files
// only: FwdOp and BwdOp turn a schema's arguments into a struct, call_fwd and call_bwd turn it
// back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

namespace flashattn_ext {

using at::Tensor;
using c10::SymInt;
using OptTensor = std::optional<Tensor>;

// The keyword options every op shares, in schema order.
struct Options {
  const OptTensor& bias;  // key_bias in varlen
  const OptTensor& mask;
  const OptTensor& alibi_slopes;
  const OptTensor& rel_bias;
  const OptTensor& sink;
  const OptTensor& block_mask;
  std::optional<double> softmax_scale;
  bool causal;
  bool top_left;
  SymInt window_left;
  SymInt window_right;
  double softcap;
  double dropout_p;
  const OptTensor& rng_state;
  bool deterministic;
  std::optional<std::string_view> plan;
};

struct Varlen {
  const Tensor& cu_seqlens_q;  // (B + 1) int32
  const Tensor& cu_seqlens_k;
  SymInt max_seqlen_q;
  SymInt max_seqlen_k;
  const OptTensor& seqused_q;  // (B) int32
  const OptTensor& seqused_k;
};

struct FwdArgs {
  const Tensor& q;       // (B, Sq, Hq, D) / (total_q, Hq, D)
  const Tensor& k;       // (B, Sk, Hk, D) / (total_k, Hk, D)
  const Tensor& v;       // (B, Sk, Hk, Dv) / (total_k, Hk, Dv)
  const Varlen* varlen;  // nullptr: dense
  const Options& options;
};

// Which of bias, alibi_slopes, rel_bias and sink need a gradient.
using Wanted = std::array<bool, 4>;

struct BwdArgs : FwdArgs {
  const Tensor& dout;     // shape of out
  const OptTensor& dlse;  // shape of lse
  const Tensor& out;      // (B, Sq, Hq, Dv) / (total_q, Hq, Dv)
  const Tensor& lse;      // (B, Hq, Sq) / (Hq, total_q)
  Wanted wanted;
};

// Raises for a tensor that carries a tangent: no op has a rule for forward-mode differentiation,
// and the kernels below autograd would drop it.
void check_no_tangent(std::initializer_list<const Tensor*> tensors);

using FwdResult = std::tuple<Tensor, Tensor, Tensor>;  // out, lse, rng_state
// dq, dk, dv, dbias, dalibi_slopes, drel_bias, dsink
using BwdResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using MergeResult = std::tuple<Tensor, Tensor>;  // out, lse

// Kernels of flashattn_ext::fwd and ::varlen_fwd that run `kRun`.
template <FwdResult (*kRun)(const FwdArgs&)>
struct FwdOp {
  static FwdResult dense(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& bias,
                         const OptTensor& mask, const OptTensor& alibi_slopes,
                         const OptTensor& rel_bias, const OptTensor& sink,
                         const OptTensor& block_mask, std::optional<double> softmax_scale,
                         bool causal, bool top_left, SymInt window_left, SymInt window_right,
                         double softcap, double dropout_p, const OptTensor& rng_state,
                         bool deterministic, std::optional<std::string_view> plan) {
    const Options options(bias, mask, alibi_slopes, rel_bias, sink, block_mask, softmax_scale,
                          causal, top_left, std::move(window_left), std::move(window_right),
                          softcap, dropout_p, rng_state, deterministic, plan);
    return kRun({q, k, v, nullptr, options});
  }

  static FwdResult varlen(const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                          SymInt max_seqlen_q, SymInt max_seqlen_k, const OptTensor& key_bias,
                          const OptTensor& mask, const OptTensor& alibi_slopes,
                          const OptTensor& rel_bias, const OptTensor& sink,
                          const OptTensor& block_mask, std::optional<double> softmax_scale,
                          bool causal, bool top_left, SymInt window_left, SymInt window_right,
                          double softcap, double dropout_p, const OptTensor& rng_state,
                          bool deterministic, std::optional<std::string_view> plan,
                          const OptTensor& seqused_q, const OptTensor& seqused_k) {
    const Options options(key_bias, mask, alibi_slopes, rel_bias, sink, block_mask, softmax_scale,
                          causal, top_left, std::move(window_left), std::move(window_right),
                          softcap, dropout_p, rng_state, deterministic, plan);
    const Varlen varlen(cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
                        std::move(max_seqlen_k), seqused_q, seqused_k);
    return kRun({q, k, v, &varlen, options});
  }
};

// Kernels of flashattn_ext::bwd and ::varlen_bwd that run `kRun`.
template <BwdResult (*kRun)(const BwdArgs&)>
struct BwdOp {
  static BwdResult dense(const Tensor& dout, const OptTensor& dlse, const Tensor& q,
                         const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                         const OptTensor& bias, const OptTensor& mask,
                         const OptTensor& alibi_slopes, const OptTensor& rel_bias,
                         const OptTensor& sink, const OptTensor& block_mask,
                         std::optional<double> softmax_scale, bool causal, bool top_left,
                         SymInt window_left, SymInt window_right, double softcap, double dropout_p,
                         const OptTensor& rng_state, bool deterministic,
                         std::optional<std::string_view> plan, Wanted wanted) {
    const Options options(bias, mask, alibi_slopes, rel_bias, sink, block_mask, softmax_scale,
                          causal, top_left, std::move(window_left), std::move(window_right),
                          softcap, dropout_p, rng_state, deterministic, plan);
    return kRun({{q, k, v, nullptr, options}, dout, dlse, out, lse, wanted});
  }

  static BwdResult varlen(const Tensor& dout, const OptTensor& dlse, const Tensor& q,
                          const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                          const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                          SymInt max_seqlen_q, SymInt max_seqlen_k, const OptTensor& key_bias,
                          const OptTensor& mask, const OptTensor& alibi_slopes,
                          const OptTensor& rel_bias, const OptTensor& sink,
                          const OptTensor& block_mask, std::optional<double> softmax_scale,
                          bool causal, bool top_left, SymInt window_left, SymInt window_right,
                          double softcap, double dropout_p, const OptTensor& rng_state,
                          bool deterministic, std::optional<std::string_view> plan,
                          const OptTensor& seqused_q, const OptTensor& seqused_k, Wanted wanted) {
    const Options options(key_bias, mask, alibi_slopes, rel_bias, sink, block_mask, softmax_scale,
                          causal, top_left, std::move(window_left), std::move(window_right),
                          softcap, dropout_p, rng_state, deterministic, plan);
    const Varlen varlen(cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
                        std::move(max_seqlen_k), seqused_q, seqused_k);
    return kRun({{q, k, v, &varlen, options}, dout, dlse, out, lse, wanted});
  }
};

// Calls of the ops through the dispatcher.
FwdResult call_fwd(const FwdArgs& args);
BwdResult call_bwd(const BwdArgs& args);

}  // namespace flashattn_ext
