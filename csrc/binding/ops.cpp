// The ops' schemas, and their Meta kernels: what comes out, in which shape, dtype and stride. The
// CPU kernels (flashattn_ext/spec.py) start from Meta too, so checks and outputs are the same
// everywhere.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "binding/args.h"
#include "binding/check.h"

namespace flashattn_ext {
namespace {

Tensor empty_rng_state(const Tensor& q, bool with_dropout) {
  return at::empty({with_dropout ? 2 : 0}, q.options().dtype(at::kUInt64));
}

FwdResult fwd_meta(const FwdArgs& args) {
  check_fwd<SymInt>(args);
  const Tensor& q = args.q;
  const SymInt heads = q.sym_size(-2), head_dim_v = args.v.sym_size(-1);
  const auto lse_options = q.options().dtype(lse_dtype(q.scalar_type()));
  Tensor rng_state = empty_rng_state(q, args.options.dropout_p > 0);
  if (args.varlen != nullptr) {
    const SymInt total_q = q.sym_size(0);
    return {at::empty_symint({total_q, heads, head_dim_v}, q.options()),
            at::empty_symint({heads, total_q}, lse_options), rng_state};
  }
  const SymInt batch = q.sym_size(0), seqlen_q = q.sym_size(1);
  return {at::empty_symint({batch, seqlen_q, heads, head_dim_v}, q.options()),
          at::empty_symint({batch, heads, seqlen_q}, lse_options), rng_state};
}

// A gradient in its input's shape and dtype, contiguous; (0,) where it is not wanted.
Tensor empty_gradient(const OptTensor& input, bool wanted, const Tensor& q) {
  if (!wanted || !input.has_value()) return at::empty({0}, q.options());
  return at::empty_symint(input->sym_sizes(), input->options());
}

BwdResult bwd_meta(const BwdArgs& args) {
  check_bwd<SymInt>(args);
  const Options& options = args.options;
  return {empty_gradient(args.q, true, args.q),
          empty_gradient(args.k, true, args.q),
          empty_gradient(args.v, true, args.q),
          empty_gradient(options.bias, args.wanted[0], args.q),
          empty_gradient(options.alibi_slopes, args.wanted[1], args.q),
          empty_gradient(options.rel_bias, args.wanted[2], args.q),
          empty_gradient(options.sink, args.wanted[3], args.q)};
}

MergeResult merge_meta(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                       const Tensor& lse_b) {
  check_merge<SymInt>(out_a, lse_a, out_b, lse_b);
  return {at::empty_symint(out_a.sym_sizes(), out_a.options()),
          at::empty_symint(lse_a.sym_sizes(), lse_a.options())};
}

// The options that every op shares stand between two parts of its schema.
constexpr const char* kScores =
    "Tensor? mask=None, Tensor? alibi_slopes=None, Tensor? rel_bias=None, Tensor? sink=None, "
    "Tensor? block_mask=None, float? softmax_scale=None, bool causal=False, bool top_left=False, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0., float dropout_p=0., "
    "Tensor? rng_state=None, bool deterministic=False, str? plan=None";
constexpr const char* kSaved =
    "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse";
constexpr const char* kLengths =
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k";
constexpr const char* kUsed = "Tensor? seqused_q=None, Tensor? seqused_k=None";
constexpr const char* kWanted = "bool[4] wanted=[False, False, False, False]";
constexpr const char* kOutputs = "(Tensor out, Tensor lse, Tensor rng_state)";

std::string gradients(const char* bias) {
  return std::string("(Tensor dq, Tensor dk, Tensor dv, Tensor d") + bias +
         ", Tensor dalibi_slopes, Tensor drel_bias, Tensor dsink)";
}

}  // namespace

TORCH_LIBRARY(flashattn_ext, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  std::vector<at::Tag> seeded = tags;  // a forward with dropout draws from torch's generator
  seeded.push_back(at::Tag::nondeterministic_seeded);

  const std::string scores = kScores, saved = kSaved, lengths = kLengths, used = kUsed;
  const auto def = [&m](const std::string& schema, const std::vector<at::Tag>& op_tags) {
    m.def(schema.c_str(), op_tags);
  };
  def("fwd(Tensor q, Tensor k, Tensor v, *, Tensor? bias=None, " + scores + ") -> " + kOutputs,
      seeded);
  def("bwd(" + saved + ", *, Tensor? bias=None, " + scores + ", " + kWanted + ") -> " +
          gradients("bias"),
      tags);
  def("varlen_fwd(Tensor q, Tensor k, Tensor v, " + lengths + ", *, Tensor? key_bias=None, " +
          scores + ", " + used + ") -> " + kOutputs,
      seeded);
  def("varlen_bwd(" + saved + ", " + lengths + ", *, Tensor? key_bias=None, " + scores + ", " +
          used + ", " + kWanted + ") -> " + gradients("key_bias"),
      tags);
  def("merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
      tags);
}

TORCH_LIBRARY_IMPL(flashattn_ext, Meta, m) {
  m.impl("fwd", FwdOp<fwd_meta>::dense);
  m.impl("bwd", BwdOp<bwd_meta>::dense);
  m.impl("varlen_fwd", FwdOp<fwd_meta>::varlen);
  m.impl("varlen_bwd", BwdOp<bwd_meta>::varlen);
  m.impl("merge", merge_meta);
}

}  // namespace flashattn_ext
