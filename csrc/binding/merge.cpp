// The gradient of merge, in ATen ops (so it can be differentiated again).
//
// With L = log(exp(L_a) + exp(L_b)) and w_i = exp(L_i - L), merge is O = w_a O_a + w_b O_b, and
//   dO_i = w_i dO        dL_i = w_i (rowsum(dO * (O_i - O)) + dL).
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>

#include "binding/args.h"

namespace flashattn_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

MergeResult call_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                       const Tensor& lse_b) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("flashattn_ext::merge", "")
                             .typed<decltype(call_merge)>();
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(out_a, lse_a, out_b, lse_b);
}

// (..., heads, rows) as (..., rows, heads): from the layout of lse to that of out, and back.
Tensor swap_rows_and_heads(const Tensor& tensor) { return tensor.transpose(-1, -2); }

struct MergeFunction : torch::autograd::Function<MergeFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& out_a, const Tensor& lse_a,
                               const Tensor& out_b, const Tensor& lse_b) {
    const auto [out, lse] = call_merge(out_a, lse_a, out_b, lse_b);
    ctx->save_for_backward({out_a, lse_a, out_b, lse_b, out, lse});
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &out = saved[4], &lse = saved[5], &dout = grads[0], &dlse = grads[1];

    if (!dout.defined() && !dlse.defined()) return variable_list(4);
    variable_list result;
    for (int side : {0, 2}) {
      const Tensor &out_i = saved[side], &lse_i = saved[side + 1];
      const Tensor empty = lse_i == -std::numeric_limits<double>::infinity();
      const Tensor weight = (lse_i - lse).exp().masked_fill(empty, 0);
      Tensor dout_i, dlse_i;
      if (dout.defined()) {
        dout_i = (swap_rows_and_heads(weight).unsqueeze(-1) * dout).to(out_i.scalar_type());
        const Tensor apart = out_i.to(lse.scalar_type()) - out;
        dlse_i = weight * swap_rows_and_heads((dout * apart).sum(-1));
      }
      if (dlse.defined()) {
        const Tensor through_lse = weight * dlse;
        dlse_i = dlse_i.defined() ? dlse_i + through_lse : through_lse;
      }
      result.push_back(dout_i);
      // Whatever the out of an empty state holds, nothing flows into it.
      result.push_back(dlse_i.masked_fill(empty, 0));
    }
    return result;
  }
};

MergeResult merge_autograd(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                           const Tensor& lse_b) {
  check_no_tangent({&out_a, &lse_a, &out_b, &lse_b});
  const bool needs_grad = out_a.requires_grad() || lse_a.requires_grad() || out_b.requires_grad() ||
                          lse_b.requires_grad();
  if (!c10::GradMode::is_enabled() || !needs_grad) return call_merge(out_a, lse_a, out_b, lse_b);
  const variable_list result = MergeFunction::apply(out_a, lse_a, out_b, lse_b);
  return {result[0], result[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(flashattn_ext, Autograd, m) { m.impl("merge", merge_autograd); }

}  // namespace flashattn_ext
