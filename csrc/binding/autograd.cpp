// Gradients and autocast of fwd and varlen_fwd.
//
// The backward is the bwd op, called through the dispatcher so that compilers and checkpointing see
// it. lse is differentiable: its gradient enters as dS = P * (dP - delta + dlse).
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "binding/args.h"
#include "binding/check.h"

namespace flashattn_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool needs_grad(const Tensor& tensor) { return tensor.requires_grad(); }
bool needs_grad(const OptTensor& tensor) { return tensor.has_value() && tensor->requires_grad(); }

bool any_needs_grad(const FwdArgs& args) {
  const Options& options = args.options;
  return needs_grad(args.q) || needs_grad(args.k) || needs_grad(args.v) ||
         needs_grad(options.bias) || needs_grad(options.alibi_slopes) ||
         needs_grad(options.rel_bias) || needs_grad(options.sink);
}

OptTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptTensor(tensor) : OptTensor();
}

// What the backward needs of a forward call, kept as autograd keeps things: the tensors in one
// list, in the order below, everything else by name.
enum Saved {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kBiasOrKeyBias,
  kMaskTensor,
  kSlopes,
  kRelBiasTable,
  kSinkLogit,
  kTileMask,
  kRngState,
  kCuSeqlensQ,
  kCuSeqlensK,
  kSequsedQ,
  kSequsedK,
  kNumSaved
};

void save_call(AutogradContext* ctx, const FwdArgs& args, const FwdResult& result) {
  const Options& options = args.options;
  const auto& [out, lse, rng_state] = result;
  variable_list tensors(kNumSaved);
  tensors[kQ] = args.q;
  tensors[kK] = args.k;
  tensors[kV] = args.v;
  tensors[kOut] = out;
  tensors[kLse] = lse;
  tensors[kBiasOrKeyBias] = options.bias.value_or(Tensor());
  tensors[kMaskTensor] = options.mask.value_or(Tensor());
  tensors[kSlopes] = options.alibi_slopes.value_or(Tensor());
  tensors[kRelBiasTable] = options.rel_bias.value_or(Tensor());
  tensors[kSinkLogit] = options.sink.value_or(Tensor());
  tensors[kTileMask] = options.block_mask.value_or(Tensor());
  if (options.dropout_p > 0) tensors[kRngState] = rng_state;
  if (args.varlen != nullptr) {
    const Varlen& varlen = *args.varlen;
    tensors[kCuSeqlensQ] = varlen.cu_seqlens_q;
    tensors[kCuSeqlensK] = varlen.cu_seqlens_k;
    tensors[kSequsedQ] = varlen.seqused_q.value_or(Tensor());
    tensors[kSequsedK] = varlen.seqused_k.value_or(Tensor());
    ctx->saved_data["max_seqlen_q"] = varlen.max_seqlen_q;
    ctx->saved_data["max_seqlen_k"] = varlen.max_seqlen_k;
  }
  ctx->save_for_backward(std::move(tensors));

  ctx->saved_data["scale"] = options.softmax_scale;
  ctx->saved_data["causal"] = options.causal;
  ctx->saved_data["top_left"] = options.top_left;
  ctx->saved_data["window_left"] = options.window_left;
  ctx->saved_data["window_right"] = options.window_right;
  ctx->saved_data["softcap"] = options.softcap;
  ctx->saved_data["dropout_p"] = options.dropout_p;
  ctx->saved_data["deterministic"] = options.deterministic;
  if (options.plan) ctx->saved_data["plan"] = std::string(*options.plan);
}

// The bwd or varlen_bwd op for the call that save_call kept. `saved` are its tensors: unpacking
// them is the caller's, because hooks on saved tensors (checkpointing) allow it once only.
BwdResult call_saved_bwd(AutogradContext* ctx, const variable_list& saved, const Tensor& dout,
                         const OptTensor& dlse, Wanted wanted) {
  auto& data = ctx->saved_data;
  const OptTensor bias = optional(saved[kBiasOrKeyBias]), mask = optional(saved[kMaskTensor]),
                  slopes = optional(saved[kSlopes]), rel_bias = optional(saved[kRelBiasTable]),
                  sink = optional(saved[kSinkLogit]), block_mask = optional(saved[kTileMask]),
                  rng_state = optional(saved[kRngState]), seqused_q = optional(saved[kSequsedQ]),
                  seqused_k = optional(saved[kSequsedK]);
  const auto plan = data.find("plan");
  const Options options{
      .bias = bias,
      .mask = mask,
      .alibi_slopes = slopes,
      .rel_bias = rel_bias,
      .sink = sink,
      .block_mask = block_mask,
      .softmax_scale = data["scale"].toOptional<double>(),
      .causal = data["causal"].toBool(),
      .top_left = data["top_left"].toBool(),
      .window_left = data["window_left"].toSymInt(),
      .window_right = data["window_right"].toSymInt(),
      .softcap = data["softcap"].toDouble(),
      .dropout_p = data["dropout_p"].toDouble(),
      .rng_state = rng_state,
      .deterministic = data["deterministic"].toBool(),
      .plan = plan == data.end() ? std::nullopt
                                 : std::optional<std::string_view>(plan->second.toStringView()),
  };
  std::optional<Varlen> varlen;
  if (saved[kCuSeqlensQ].defined()) {
    varlen.emplace(Varlen{saved[kCuSeqlensQ], saved[kCuSeqlensK], data["max_seqlen_q"].toSymInt(),
                          data["max_seqlen_k"].toSymInt(), seqused_q, seqused_k});
  }
  return call_bwd({{saved[kQ], saved[kK], saved[kV], varlen ? &*varlen : nullptr, options},
                   dout,
                   dlse,
                   saved[kOut],
                   saved[kLse],
                   wanted});
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static constexpr bool is_traceable = true;  // compiled autograd may trace the backward

  // The tensors that can get a gradient are arguments of their own: that is how autograd finds
  // them.
  static variable_list forward(AutogradContext* ctx, const Tensor& /*q*/, const Tensor& /*k*/,
                               const Tensor& /*v*/, const OptTensor& /*bias*/,
                               const OptTensor& /*alibi_slopes*/, const OptTensor& /*rel_bias*/,
                               const OptTensor& /*sink*/, const FwdArgs& args) {
    at::AutoDispatchBelowADInplaceOrView guard;
    FwdResult result = call_fwd(args);
    save_call(ctx, args, result);
    // A gradient that nobody sends stays undefined instead of becoming a tensor of zeros.
    ctx->set_materialize_grads(false);
    const Options& options = args.options;
    ctx->saved_data["wanted"] =
        c10::List<bool>({needs_grad(options.bias), needs_grad(options.alibi_slopes),
                         needs_grad(options.rel_bias), needs_grad(options.sink)});
    auto& [out, lse, rng_state] = result;
    return {out, lse, rng_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const c10::List<bool> list = ctx->saved_data["wanted"].toBoolList();
    const Wanted wanted = {list[0], list[1], list[2], list[3]};
    Tensor dout = grads[0];
    const Tensor& dlse = grads[1];
    if (!dout.defined() && !dlse.defined()) return variable_list(8);
    const variable_list saved = ctx->get_saved_variables();
    if (!dout.defined()) {  // only lse was used: dout is one row of zeros, seen everywhere
      const Tensor& out = saved[kOut];
      dout = at::zeros_symint({out.sym_size(-1)}, out.options()).expand_symint(out.sym_sizes());
    }
    const auto [dq, dk, dv, dbias, dslopes, drel_bias, dsink] =
        call_saved_bwd(ctx, saved, dout, optional(dlse), wanted);
    const auto if_wanted = [](bool is_wanted, const Tensor& grad) {
      return is_wanted ? grad : Tensor();
    };
    return {dq,
            dk,
            dv,
            if_wanted(wanted[0], dbias),
            if_wanted(wanted[1], dslopes),
            if_wanted(wanted[2], drel_bias),
            if_wanted(wanted[3], dsink),
            Tensor()};
  }
};

FwdResult fwd_autograd(const FwdArgs& args) {
  check_layouts(args);
  check_no_tangent({&args.q, &args.k, &args.v});
  if (!c10::GradMode::is_enabled() || !any_needs_grad(args)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_fwd(args);
  }
  const Options& options = args.options;
  const variable_list result =
      AttentionFunction::apply(args.q, args.k, args.v, options.bias, options.alibi_slopes,
                               options.rel_bias, options.sink, args);
  return {result[0], result[1], result[2]};
}

// The gradient of bwd: a node that only has something to say when somebody differentiates twice.
struct NoDoubleBackward : torch::autograd::Function<NoDoubleBackward> {
  static variable_list forward(AutogradContext*, const Tensor& /*dout*/, const OptTensor& /*dlse*/,
                               const Tensor& /*q*/, const Tensor& /*k*/, const Tensor& /*v*/,
                               const Tensor& /*out*/, const BwdArgs& args) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [dq, dk, dv, dbias, dslopes, drel_bias, dsink] = call_bwd(args);
    return {dq, dk, dv, dbias, dslopes, drel_bias, dsink};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "flashattn_ext: attention is differentiable once, and this differentiates its gradient; "
        "where a second derivative is needed (gradient penalties, Hessians), use "
        "torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for that call");
  }
};

BwdResult bwd_autograd(const BwdArgs& args) {
  // out, saved from the forward, needs a gradient where any input of the forward does.
  const bool differentiable = needs_grad(args.dout) || needs_grad(args.dlse) ||
                              needs_grad(args.q) || needs_grad(args.k) || needs_grad(args.v) ||
                              needs_grad(args.out);
  if (!c10::GradMode::is_enabled() || !differentiable) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_bwd(args);
  }
  const variable_list grads =
      NoDoubleBackward::apply(args.dout, args.dlse, args.q, args.k, args.v, args.out, args);
  return {grads[0], grads[1], grads[2], grads[3], grads[4], grads[5], grads[6]};
}

// Autocast: q, k and v to the region's dtype. fp64 and fp8 tensors are left alone (autocast's own
// cached_cast would take fp8 to bf16); slopes, sinks and tables keep their fp32.
template <c10::DeviceType kDevice>
Tensor autocast(const Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16) return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), tensor, kDevice);
}

template <c10::DeviceType kDevice>
FwdResult fwd_autocast(const FwdArgs& args) {
  c10::impl::ExcludeDispatchKeyGuard guard(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const Tensor q = autocast<kDevice>(args.q), k = autocast<kDevice>(args.k),
               v = autocast<kDevice>(args.v);
  return call_fwd({q, k, v, args.varlen, args.options});
}

}  // namespace

TORCH_LIBRARY_IMPL(flashattn_ext, Autograd, m) {
  m.impl("fwd", FwdOp<fwd_autograd>::dense);
  m.impl("bwd", BwdOp<bwd_autograd>::dense);
  m.impl("varlen_fwd", FwdOp<fwd_autograd>::varlen);
  m.impl("varlen_bwd", BwdOp<bwd_autograd>::varlen);
}

TORCH_LIBRARY_IMPL(flashattn_ext, AutocastCUDA, m) {
  m.impl("fwd", FwdOp<fwd_autocast<at::kCUDA>>::dense);
  m.impl("varlen_fwd", FwdOp<fwd_autocast<at::kCUDA>>::varlen);
}

TORCH_LIBRARY_IMPL(flashattn_ext, AutocastCPU, m) {
  m.impl("fwd", FwdOp<fwd_autocast<at::kCPU>>::dense);
  m.impl("varlen_fwd", FwdOp<fwd_autocast<at::kCPU>>::varlen);
}

}  // namespace flashattn_ext
