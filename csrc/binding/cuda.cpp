// The CUDA kernels of the ops: check, plan, allocate, fill the params, launch.
//
// Everything runs on q's device and that device's current stream. Nothing reads device memory and
// nothing outlives a call, so every op can be captured in a CUDA graph and called from any thread.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "binding/args.h"
#include "binding/check.h"
#include "plan/plan.h"
#include "sm80/launch.h"
#include "sm90/launch.h"
#include "smxx/kernels.h"

namespace flashattn_ext {
namespace {

// ---- problem ----

DeviceInfo read_device_info(int device) {
  const auto attribute = [device](cudaDeviceAttr name) {
    int value = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  return {
      .is_cuda = true,
      .cc_major = attribute(cudaDevAttrComputeCapabilityMajor),
      .cc_minor = attribute(cudaDevAttrComputeCapabilityMinor),
      .num_sms = attribute(cudaDevAttrMultiProcessorCount),
      .smem_per_block_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
      .smem_per_sm_bytes = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
  };
}

const DeviceInfo& device_info(c10::Device device) {
  static const std::vector<DeviceInfo> devices = [] {
    std::vector<DeviceInfo> infos;
    for (int index = 0; index < c10::cuda::device_count(); ++index) {
      infos.push_back(read_device_info(index));
    }
    return infos;
  }();
  return devices.at(device.index());
}

ScalarType scalar_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return ScalarType::kFloat16;
    case at::kBFloat16:
      return ScalarType::kBFloat16;
    case at::kFloat:
      return ScalarType::kFloat32;
    case at::kDouble:
      return ScalarType::kFloat64;
    default:
      return ScalarType::kOther;
  }
}

// Strides of (batch, rows, heads, head_dim), or (rows, heads, head_dim) with no batch stride.
Strides strides_of(const Tensor& tensor) {
  const auto stride = [&](int64_t dim) { return tensor.size(dim) > 1 ? tensor.stride(dim) : 0; };
  return {.batch = tensor.dim() == 4 ? stride(0) : 0, .row = stride(-3), .head = stride(-2)};
}

Layout layout_of(const Tensor& tensor) {
  constexpr uintptr_t kAlignment = 16;
  return {
      .strides = strides_of(tensor),
      .contiguous_last = tensor.stride(-1) == 1 || tensor.size(-1) <= 1,
      .aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0,
  };
}

uint32_t option_bits(const FwdArgs& args) {
  const Options& options = args.options;
  uint32_t bits = 0;
  if (options.bias.has_value()) bits |= args.varlen != nullptr ? kKeyBias : kBias;
  if (options.mask.has_value()) bits |= kMask;
  if (options.alibi_slopes.has_value()) bits |= kAlibiSlopes;
  if (options.rel_bias.has_value()) bits |= kRelBias;
  if (options.sink.has_value()) bits |= kSink;
  if (options.block_mask.has_value()) bits |= kBlockMask;
  if (options.dropout_p > 0) bits |= kDropout;
  return bits;
}

int64_t to_int(const SymInt& number) { return number.guard_int(__FILE__, __LINE__); }

Problem make_problem(Op op, const FwdArgs& args) {
  const Tensor &q = args.q, &k = args.k, &v = args.v;
  Problem problem{
      .op = op,
      .dtype = scalar_type(q.scalar_type()),
      .varlen = args.varlen != nullptr,
      .num_heads_q = q.size(-2),
      .num_heads_k = k.size(-2),
      .head_dim = q.size(-1),
      .head_dim_v = v.size(-1),
      .q = layout_of(q),
      .k = layout_of(k),
      .v = layout_of(v),
      .out = {},
      .dout = {},  // both set by the backward
      .causal = args.options.causal,
      .top_left = args.options.top_left,
      .window_left = to_int(args.options.window_left),
      .window_right = to_int(args.options.window_right),
      .options = option_bits(args),
      .plain_logits = args.options.softcap == 0 && args.options.softmax_scale.value_or(1.0) > 0,
      .deterministic = args.options.deterministic,
  };
  const at::Context& context = at::globalContext();
  problem.rather_deterministic = context.deterministicAlgorithms();
  problem.deterministic |=
      problem.rather_deterministic && !context.deterministicAlgorithmsWarnOnly();
  if (args.varlen != nullptr) {
    problem.batch = args.varlen->cu_seqlens_q.size(0) - 1;
    problem.total_q = q.size(0);
    problem.total_k = k.size(0);
    // No sequence is longer than all rows together: a loose bound costs no grid and is not refused.
    problem.seqlen_q = std::min(to_int(args.varlen->max_seqlen_q), problem.total_q);
    problem.seqlen_k = std::min(to_int(args.varlen->max_seqlen_k), problem.total_k);
  } else {
    problem.batch = q.size(0);
    problem.seqlen_q = q.size(1);
    problem.seqlen_k = k.size(1);
    problem.total_q = problem.batch * problem.seqlen_q;
    problem.total_k = problem.batch * problem.seqlen_k;
  }
  return problem;
}

Plan plan_or_raise(const Problem& problem, const FwdArgs& args) {
  const DeviceInfo& device = device_info(args.q.device());
  const std::string_view forced = args.options.plan.value_or("");
  const Plan plan = make_plan(problem, device, forced);
  TORCH_CHECK_NOT_IMPLEMENTED(plan.family != nullptr,
                              "flashattn_ext: ", error_sentence(problem, device, forced));
  return plan;
}

// ---- params ----

Tensor copy_if(bool copy, const Tensor& tensor) {
  return copy ? tensor.clone(at::MemoryFormat::Contiguous) : tensor;
}

const int32_t* lengths_ptr(const OptTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<int32_t>() : nullptr;
}

// A call's tensors as the kernels can read them, alive until the launch is queued.
struct Inputs {
  Tensor q, k, v;
  Tensor cu_seqlens_q, cu_seqlens_k;  // undefined in dense
  OptTensor seqused_q, seqused_k;

  Inputs(const FwdArgs& args, const Plan& plan)
      : q(copy_if(plan.copy_q, args.q)),
        k(copy_if(plan.copy_k, args.k)),
        v(copy_if(plan.copy_v, args.v)) {
    if (args.varlen == nullptr) return;
    cu_seqlens_q = args.varlen->cu_seqlens_q.contiguous();
    cu_seqlens_k = args.varlen->cu_seqlens_k.contiguous();
    if (args.varlen->seqused_q.has_value()) seqused_q = args.varlen->seqused_q->contiguous();
    if (args.varlen->seqused_k.has_value()) seqused_k = args.varlen->seqused_k->contiguous();
  }
};

void fill_fwd_params(FwdParams& params, const Problem& problem, const Plan& plan,
                     const Options& options, const Inputs& inputs, const Tensor& out,
                     const Tensor& lse) {
  params.q = inputs.q.const_data_ptr();
  params.k = inputs.k.const_data_ptr();
  params.v = inputs.v.const_data_ptr();
  params.q_strides = strides_of(inputs.q);
  params.k_strides = strides_of(inputs.k);
  params.v_strides = strides_of(inputs.v);

  params.out = out.data_ptr();
  params.lse = lse.data_ptr<float>();
  params.out_strides = strides_of(out);
  params.lse_batch_stride = problem.varlen ? 0 : problem.num_heads_q * problem.seqlen_q;
  params.lse_head_stride = problem.varlen ? problem.total_q : problem.seqlen_q;

  params.batch = static_cast<int32_t>(problem.batch);
  params.num_heads_q = static_cast<int32_t>(problem.num_heads_q);
  params.num_heads_k = static_cast<int32_t>(problem.num_heads_k);
  params.seqlen_q = static_cast<int32_t>(problem.seqlen_q);
  params.seqlen_k = static_cast<int32_t>(problem.seqlen_k);
  params.head_dim = static_cast<int32_t>(problem.head_dim);
  params.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
  params.total_q = problem.total_q;
  params.total_k = problem.total_k;

  if (problem.varlen) {
    params.cu_seqlens_q = inputs.cu_seqlens_q.const_data_ptr<int32_t>();
    params.cu_seqlens_k = inputs.cu_seqlens_k.const_data_ptr<int32_t>();
    params.seqused_q = lengths_ptr(inputs.seqused_q);
    params.seqused_k = lengths_ptr(inputs.seqused_k);
  }

  const double default_scale = 1.0 / std::sqrt(static_cast<double>(problem.head_dim));
  params.softmax_scale = static_cast<float>(options.softmax_scale.value_or(default_scale));
  params.softcap = static_cast<float>(options.softcap);
  params.window_left = plan.window.left;
  params.window_right = plan.window.right;
  params.top_left = options.top_left;
  params.dtype = problem.dtype == ScalarType::kFloat16 ? Dtype::kFloat16 : Dtype::kBFloat16;
}

// ---- fwd ----

void launch_fwd(const Plan& plan, const FwdParams& params, const Tensor& workspace) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (plan.sm90_fwd_tile != nullptr) {
    auto* counter = static_cast<int32_t*>(workspace.defined() ? workspace.data_ptr() : nullptr);
    C10_CUDA_CHECK(sm90::run_fwd(params, *plan.sm90_fwd_tile, {plan.num_ctas, counter}, stream));
  } else {
    C10_CUDA_CHECK(sm80::run_fwd(params, *plan.fwd_tile, stream));
  }
  if (params.cu_seqlens_q != nullptr) {
    C10_CUDA_CHECK(smxx::run_fwd_fill_unowned(params, stream));
  }
}

FwdResult fwd_cuda(const FwdArgs& args) {
  check_fwd<int64_t>(args);
  const c10::cuda::CUDAGuard guard(args.q.device());
  const Problem problem = make_problem(Op::kForward, args);
  const Plan plan = plan_or_raise(problem, args);

  const auto options = args.q.options();
  const auto fp32 = options.dtype(at::kFloat);
  const int64_t heads = problem.num_heads_q, head_dim_v = problem.head_dim_v;
  Tensor out, lse;
  if (problem.varlen) {
    out = at::empty({problem.total_q, heads, head_dim_v}, options);
    lse = at::empty({heads, problem.total_q}, fp32);
  } else {
    out = at::empty({problem.batch, problem.seqlen_q, heads, head_dim_v}, options);
    lse = at::empty({problem.batch, heads, problem.seqlen_q}, fp32);
  }
  Tensor rng_state = at::empty({0}, options.dtype(at::kUInt64));

  if (plan.empty) {
    out.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
    return {out, lse, rng_state};
  }
  const Inputs inputs(args, plan);
  FwdParams params;
  fill_fwd_params(params, problem, plan, args.options, inputs, out, lse);
  Tensor workspace;
  if (plan.workspace_bytes > 0) {
    workspace = at::empty({plan.workspace_bytes}, options.dtype(at::kByte));
  }
  launch_fwd(plan, params, workspace);
  return {out, lse, rng_state};
}

// ---- bwd ----

void launch_bwd(const Plan& plan, const BwdParams& params, std::byte* workspace) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(smxx::run_bwd_delta(params, stream));
  if (plan.sm90_bwd_fused_tile != nullptr) {
    C10_CUDA_CHECK(
        sm90::run_bwd_fused(params, *plan.sm90_bwd_fused_tile,
                            {plan.num_ctas, reinterpret_cast<float*>(workspace),
                             reinterpret_cast<uint32_t*>(workspace + plan.dq_buffer_bytes)},
                            stream));
  } else if (plan.sm90_bwd_dq_tile != nullptr) {
    C10_CUDA_CHECK(sm90::run_bwd_dq(params, *plan.sm90_bwd_dq_tile, stream));
    C10_CUDA_CHECK(sm90::run_bwd_dkv(params, *plan.sm90_bwd_dkv_tile, stream));
  } else {
    C10_CUDA_CHECK(sm80::run_bwd_dq(params, *plan.bwd_dq_tile, stream));
    C10_CUDA_CHECK(sm80::run_bwd_dkv(params, *plan.bwd_dkv_tile, stream));
  }
  if (params.cu_seqlens_q != nullptr) {
    C10_CUDA_CHECK(smxx::run_bwd_fill_unowned(params, stream));
  }
}

BwdResult bwd_cuda(const BwdArgs& args) {
  check_bwd<int64_t>(args);
  const c10::cuda::CUDAGuard guard(args.q.device());
  Problem problem = make_problem(Op::kBackward, args);
  problem.out = layout_of(args.out);
  problem.dout = layout_of(args.dout);
  const Plan plan = plan_or_raise(problem, args);

  const auto options = args.q.options();
  const Tensor dq = at::empty(args.q.sizes(), options);
  const Tensor dk = at::empty(args.k.sizes(), options);
  const Tensor dv = at::empty(args.v.sizes(), options);
  // The gradients of options, which no plan on CUDA has yet.
  const auto none = [&] { return at::empty({0}, options); };

  if (plan.empty) {
    dq.zero_();
    dk.zero_();
    dv.zero_();
    return {dq, dk, dv, none(), none(), none(), none()};
  }
  const Inputs inputs(args, plan);
  const Tensor out = copy_if(plan.copy_out, args.out);
  const Tensor dout = copy_if(plan.copy_dout, args.dout);
  const Tensor lse = args.lse.contiguous();
  const int64_t rows = row_stats_bytes(problem) / static_cast<int64_t>(sizeof(float));
  const Tensor workspace = at::empty({plan.workspace_bytes}, options.dtype(at::kByte));

  BwdParams params;
  fill_fwd_params(params, problem, plan, args.options, inputs, out, lse);
  params.dout = dout.const_data_ptr();
  params.dout_strides = strides_of(dout);
  if (args.dlse.has_value()) {
    const Tensor& dlse = *args.dlse;
    params.dlse = dlse.const_data_ptr<float>();
    params.dlse_batch_stride = problem.varlen ? 0 : dlse.stride(0);
    params.dlse_head_stride = dlse.stride(-2);
    params.dlse_row_stride = dlse.stride(-1);
  }
  params.dq = dq.data_ptr();
  params.dk = dk.data_ptr();
  params.dv = dv.data_ptr();
  params.dq_strides = strides_of(dq);
  params.dk_strides = strides_of(dk);
  params.dv_strides = strides_of(dv);
  auto* bytes = static_cast<std::byte*>(workspace.data_ptr());
  params.delta = reinterpret_cast<float*>(bytes + plan.dq_buffer_bytes + plan.counter_bytes);
  params.lse_log2 = params.delta + rows;
  launch_bwd(plan, params, bytes);
  return {dq, dk, dv, none(), none(), none(), none()};
}

// ---- merge ----

MergeResult merge_cuda(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                       const Tensor& lse_b) {
  check_merge<int64_t>(out_a, lse_a, out_b, lse_b);
  const at::ScalarType dtype = out_a.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      dtype == at::kHalf || dtype == at::kBFloat16,
      "flashattn_ext: merge on CUDA takes float16 and bfloat16 and out_a is ", dtype_name(dtype),
      "; cast out_a and out_b, or merge on the CPU");
  TORCH_CHECK_NOT_IMPLEMENTED(out_a.size(-1) % 8 == 0,
                              "flashattn_ext: merge on CUDA takes head dims that are a multiple of "
                              "8 and out_a has ",
                              out_a.size(-1), "; merge on the CPU, or pad out_a and out_b");
  const c10::cuda::CUDAGuard guard(out_a.device());
  const Tensor out = at::empty(out_a.sizes(), out_a.options());
  const Tensor lse = at::empty(lse_a.sizes(), lse_a.options());
  if (lse.numel() == 0) return {out, lse};

  // The kernel reads 16 bytes at a time; a contiguous view may start anywhere.
  const auto packed = [](const Tensor& tensor) {
    return copy_if(!tensor.is_contiguous() || !layout_of(tensor).aligned, tensor);
  };
  const Tensor a = packed(out_a), b = packed(out_b);
  const Tensor stats_a = lse_a.contiguous(), stats_b = lse_b.contiguous();
  const smxx::MergeParams params{
      .out_a = a.const_data_ptr(),
      .out_b = b.const_data_ptr(),
      .lse_a = stats_a.const_data_ptr<float>(),
      .lse_b = stats_b.const_data_ptr<float>(),
      .out = out.data_ptr(),
      .lse = lse.data_ptr<float>(),
      .batch = static_cast<int32_t>(out_a.dim() == 4 ? out_a.size(0) : 1),
      .num_heads = static_cast<int32_t>(out_a.size(-2)),
      .seqlen = out_a.size(-3),
      .head_dim_v = static_cast<int32_t>(out_a.size(-1)),
      .dtype = dtype == at::kHalf ? Dtype::kFloat16 : Dtype::kBFloat16,
  };
  C10_CUDA_CHECK(smxx::run_merge(params, c10::cuda::getCurrentCUDAStream()));
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_IMPL(flashattn_ext, CUDA, m) {
  m.impl("fwd", FwdOp<fwd_cuda>::dense);
  m.impl("bwd", BwdOp<bwd_cuda>::dense);
  m.impl("varlen_fwd", FwdOp<fwd_cuda>::varlen);
  m.impl("varlen_bwd", BwdOp<bwd_cuda>::varlen);
  m.impl("merge", merge_cuda);
}

}  // namespace flashattn_ext
