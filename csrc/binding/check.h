// Checks of an op's arguments, in the order device, dtype, layout, shape, value. Every kernel of an
// op runs them first: CUDA and Meta here, the CPU kernels by starting from Meta. What depends on
// the device's kernels (which head dims, which options) is the plan's to refuse.
//
// Int is int64_t for real tensors and SymInt under tracing, where a size that is not known yet is
// taken to be right.
#pragma once

#include "binding/args.h"

namespace flashattn_ext {

template <class Int>
void check_fwd(const FwdArgs& args);

// The part of check_fwd about sparse and nested tensors. The autograd kernel runs it too: below it
// the dispatcher finds no kernel for such tensors and would speak for itself.
void check_layouts(const FwdArgs& args);

template <class Int>
void check_bwd(const BwdArgs& args);

template <class Int>
void check_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                 const Tensor& lse_b);

extern template void check_fwd<int64_t>(const FwdArgs&);
extern template void check_fwd<SymInt>(const FwdArgs&);
extern template void check_bwd<int64_t>(const BwdArgs&);
extern template void check_bwd<SymInt>(const BwdArgs&);
extern template void check_merge<int64_t>(const Tensor&, const Tensor&, const Tensor&,
                                          const Tensor&);
extern template void check_merge<SymInt>(const Tensor&, const Tensor&, const Tensor&,
                                         const Tensor&);

// The dtype of lse for inputs of this dtype: fp32, and fp64 for fp64.
at::ScalarType lse_dtype(at::ScalarType dtype);

// "float16" for at::kHalf and so on: the names a user writes.
const char* dtype_name(at::ScalarType dtype);

}  // namespace flashattn_ext
