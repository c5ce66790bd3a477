#include "binding/check.h"

#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "plan/plan.h"

// Raises "flashattn_ext: <sentence>" unless `cond` holds. The sentence is only built when raised.
#define FLASHATTN_EXT_CHECK(cond, ...) TORCH_CHECK(cond, "flashattn_ext: ", __VA_ARGS__)

namespace flashattn_ext {
namespace {

constexpr int64_t kBlockMaskTile = 128;  // rows and keys that one entry of block_mask stands for

// ---- sizes that may be symbolic ----

template <class Int>
Int size(const Tensor& tensor, int64_t dim) {
  if constexpr (std::is_same_v<Int, int64_t>) {
    return tensor.size(dim);
  } else {
    return tensor.sym_size(dim);
  }
}

template <class Int>
Int value(const SymInt& number) {
  if constexpr (std::is_same_v<Int, int64_t>) {
    return number.guard_int(__FILE__, __LINE__);
  } else {
    return number;
  }
}

bool equal(int64_t a, int64_t b) { return a == b; }
bool equal(const SymInt& a, const SymInt& b) { return TORCH_GUARD_OR_TRUE(a.sym_eq(b)); }
bool at_least(int64_t a, int64_t b) { return a >= b; }
bool at_least(const SymInt& a, const SymInt& b) { return TORCH_GUARD_OR_TRUE(a.sym_ge(b)); }

template <class Int>
bool has_shape(const Tensor& tensor, std::initializer_list<Int> shape) {
  if (tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t dim = 0;
  for (const Int& wanted : shape) {
    if (!equal(size<Int>(tensor, dim++), wanted)) return false;
  }
  return true;
}

// Right-aligned as torch broadcasts: every size is 1 or the wanted one.
template <class Int>
bool broadcasts_to(const Tensor& tensor, std::initializer_list<Int> shape) {
  const int64_t missing = static_cast<int64_t>(shape.size()) - tensor.dim();
  if (missing < 0) return false;
  int64_t dim = -missing;
  for (const Int& wanted : shape) {
    if (dim >= 0) {
      const Int got = size<Int>(tensor, dim);
      if (!equal(got, Int(1)) && !equal(got, wanted)) return false;
    }
    ++dim;
  }
  return true;
}

template <class Int>
void check_shape(const char* name, const Tensor& tensor, const char* what,
                 std::initializer_list<Int> shape) {
  FLASHATTN_EXT_CHECK(has_shape<Int>(tensor, shape), name, " must have the shape ", what, " = ",
                      c10::ArrayRef<Int>(shape), ", got ", tensor.sym_sizes());
}

// ---- the tensors of a call ----

template <class Check>
void for_each_option(const Options& options, bool varlen, const Check& check) {
  check(varlen ? "key_bias" : "bias", options.bias);
  check("mask", options.mask);
  check("alibi_slopes", options.alibi_slopes);
  check("rel_bias", options.rel_bias);
  check("sink", options.sink);
  check("block_mask", options.block_mask);
  check("rng_state", options.rng_state);
}

// ---- device, dtype, layout of one tensor ----

void check_device(const char* name, const Tensor& tensor, const Tensor& q) {
  FLASHATTN_EXT_CHECK(tensor.device() == q.device(), name, " must be on the device of q (",
                      q.device(), "), got ", tensor.device(), "; move it with ", name,
                      ".to(q.device)");
}

void check_strided(const char* name, const Tensor& tensor) {
  FLASHATTN_EXT_CHECK(!tensor.is_nested(), name,
                      " is a nested tensor; pass its values to the varlen function instead, with "
                      "its offsets as cu_seqlens");
  FLASHATTN_EXT_CHECK(tensor.layout() == at::kStrided, name,
                      " must be a strided tensor, got the layout ", tensor.layout(),
                      "; make it dense with ", name, ".to_dense()");
}

void check_dtype(const char* name, const Tensor& tensor, at::ScalarType wanted, const char* why) {
  FLASHATTN_EXT_CHECK(tensor.scalar_type() == wanted, name, " must be ", dtype_name(wanted), why,
                      ", got ", dtype_name(tensor.scalar_type()), "; cast it with ", name,
                      ".to(torch.", dtype_name(wanted), ")");
}

void check_dtype_or_float32(const char* name, const OptTensor& tensor, const Tensor& q) {
  if (!tensor.has_value() || tensor->scalar_type() == at::kFloat) return;
  check_dtype(name, *tensor, q.scalar_type(), " like q, or float32");
}

// Options that stay in fp32 whatever the inputs are; fp64 inputs take them to fp64.
void check_float32(const char* name, const OptTensor& tensor, const Tensor& q) {
  if (!tensor.has_value()) return;
  if (q.scalar_type() == at::kDouble && tensor->scalar_type() == at::kDouble) return;
  check_dtype(name, *tensor, at::kFloat, "");
}

// ---- groups ----

void check_devices(const FwdArgs& args) {
  const Tensor& q = args.q;
  check_device("k", args.k, q);
  check_device("v", args.v, q);
  for_each_option(args.options, args.varlen != nullptr,
                  [&](const char* name, const OptTensor& tensor) {
                    if (tensor.has_value()) check_device(name, *tensor, q);
                  });
  if (args.varlen == nullptr) return;
  const Varlen& varlen = *args.varlen;
  check_device("cu_seqlens_q", varlen.cu_seqlens_q, q);
  check_device("cu_seqlens_k", varlen.cu_seqlens_k, q);
  if (varlen.seqused_q.has_value()) check_device("seqused_q", *varlen.seqused_q, q);
  if (varlen.seqused_k.has_value()) check_device("seqused_k", *varlen.seqused_k, q);
}

void check_dtypes(const FwdArgs& args) {
  const Tensor& q = args.q;
  const at::ScalarType dtype = q.scalar_type();
  FLASHATTN_EXT_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "q must be float16, bfloat16, float32 or float64, got ", dtype_name(dtype));
  check_dtype("k", args.k, dtype, " like q");
  check_dtype("v", args.v, dtype, " like q");

  const Options& options = args.options;
  check_dtype_or_float32(args.varlen ? "key_bias" : "bias", options.bias, q);
  check_dtype_or_float32("rel_bias", options.rel_bias, q);
  check_float32("alibi_slopes", options.alibi_slopes, q);
  check_float32("sink", options.sink, q);
  if (options.mask.has_value()) check_dtype("mask", *options.mask, at::kBool, "");
  if (options.block_mask.has_value()) check_dtype("block_mask", *options.block_mask, at::kBool, "");
  if (options.rng_state.has_value()) check_dtype("rng_state", *options.rng_state, at::kUInt64, "");
  if (args.varlen == nullptr) return;
  const Varlen& varlen = *args.varlen;
  check_dtype("cu_seqlens_q", varlen.cu_seqlens_q, at::kInt, "");
  check_dtype("cu_seqlens_k", varlen.cu_seqlens_k, at::kInt, "");
  if (varlen.seqused_q.has_value()) check_dtype("seqused_q", *varlen.seqused_q, at::kInt, "");
  if (varlen.seqused_k.has_value()) check_dtype("seqused_k", *varlen.seqused_k, at::kInt, "");
}

void check_ranks(const FwdArgs& args) {
  const bool varlen = args.varlen != nullptr;
  const int64_t dims = varlen ? 3 : 4;
  const char* what =
      varlen ? " must be (tokens, heads, head_dim)" : " must be (batch, seqlen, heads, head_dim)";
  const auto check = [&](const char* name, const Tensor& tensor) {
    FLASHATTN_EXT_CHECK(tensor.dim() == dims, name, what, ", got ", tensor.dim(),
                        " dimensions: ", tensor.sym_sizes());
  };
  check("q", args.q);
  check("k", args.k);
  check("v", args.v);
}

// The sizes of a call, taken from q, k and v once their ranks are known.
template <class Int>
struct Sizes {
  Int batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v;

  explicit Sizes(const FwdArgs& args)
      : heads_q(size<Int>(args.q, -2)),
        heads_k(size<Int>(args.k, -2)),
        head_dim(size<Int>(args.q, -1)),
        head_dim_v(size<Int>(args.v, -1)) {
    if (args.varlen == nullptr) {
      batch = size<Int>(args.q, 0);
      seqlen_q = size<Int>(args.q, 1);
      seqlen_k = size<Int>(args.k, 1);
    } else {
      batch = size<Int>(args.varlen->cu_seqlens_q, 0) - 1;
      seqlen_q = value<Int>(args.varlen->max_seqlen_q);
      seqlen_k = value<Int>(args.varlen->max_seqlen_k);
    }
  }
};

void check_lengths_rank(const Varlen& varlen) {
  const auto check = [](const char* name, const Tensor& tensor) {
    FLASHATTN_EXT_CHECK(tensor.dim() == 1, name, " must have one dimension of batch + 1 entries, ",
                        "got the shape ", tensor.sym_sizes());
    FLASHATTN_EXT_CHECK(
        at_least(tensor.sym_size(0), SymInt(1)), name,
        " must hold batch + 1 entries and is empty; for no sequence it holds one 0");
  };
  check("cu_seqlens_q", varlen.cu_seqlens_q);
  check("cu_seqlens_k", varlen.cu_seqlens_k);
}

template <class Int>
void check_qkv_shapes(const FwdArgs& args, const Sizes<Int>& sizes) {
  const Tensor &q = args.q, &k = args.k, &v = args.v;
  if (args.varlen == nullptr) {
    FLASHATTN_EXT_CHECK(equal(size<Int>(k, 0), sizes.batch), "k must have the batch size of q (",
                        sizes.batch, "), got ", size<Int>(k, 0));
    FLASHATTN_EXT_CHECK(equal(size<Int>(v, 0), sizes.batch), "v must have the batch size of q (",
                        sizes.batch, "), got ", size<Int>(v, 0));
    FLASHATTN_EXT_CHECK(equal(size<Int>(v, 1), sizes.seqlen_k), "v must have the length of k (",
                        sizes.seqlen_k, "), got ", size<Int>(v, 1));
  } else {
    FLASHATTN_EXT_CHECK(equal(size<Int>(v, 0), size<Int>(k, 0)), "v must have the tokens of k (",
                        size<Int>(k, 0), "), got ", size<Int>(v, 0));
  }
  FLASHATTN_EXT_CHECK(equal(size<Int>(v, -2), sizes.heads_k), "v must have the heads of k (",
                      sizes.heads_k, "), got ", size<Int>(v, -2));
  FLASHATTN_EXT_CHECK(equal(size<Int>(k, -1), sizes.head_dim), "k must have the head dim of q (",
                      sizes.head_dim, "), got ", size<Int>(k, -1));
  FLASHATTN_EXT_CHECK(at_least(sizes.heads_k, Int(1)),
                      "k and v have no heads; they need at least 1");
  FLASHATTN_EXT_CHECK(equal(sizes.heads_q % sizes.heads_k, Int(0)),
                      "the heads of q must be a multiple of the heads of k and v, got ",
                      sizes.heads_q, " and ", sizes.heads_k,
                      "; the layout is (batch, seqlen, heads, head_dim), not (batch, heads, ...)");
  FLASHATTN_EXT_CHECK(at_least(sizes.head_dim, Int(1)) && at_least(sizes.head_dim_v, Int(1)),
                      "head dims must be at least 1, got ", q.sym_size(-1), " for q and k and ",
                      v.sym_size(-1), " for v");
}

template <class Int>
void check_varlen_shapes(const FwdArgs& args, const Sizes<Int>& sizes) {
  const Varlen& varlen = *args.varlen;
  FLASHATTN_EXT_CHECK(equal(size<Int>(varlen.cu_seqlens_k, 0), size<Int>(varlen.cu_seqlens_q, 0)),
                      "cu_seqlens_k must have as many entries as cu_seqlens_q (batch + 1 = ",
                      sizes.batch + 1, "), got ", size<Int>(varlen.cu_seqlens_k, 0));
  const auto check_seqused = [&](const char* name, const OptTensor& seqused) {
    if (seqused.has_value()) check_shape<Int>(name, *seqused, "(batch)", {sizes.batch});
  };
  check_seqused("seqused_q", varlen.seqused_q);
  check_seqused("seqused_k", varlen.seqused_k);
  FLASHATTN_EXT_CHECK(at_least(sizes.seqlen_q, Int(0)), "max_seqlen_q must not be negative, got ",
                      sizes.seqlen_q);
  FLASHATTN_EXT_CHECK(at_least(sizes.seqlen_k, Int(0)), "max_seqlen_k must not be negative, got ",
                      sizes.seqlen_k);
}

template <class Int>
void check_key_bias_shape(const Tensor& key_bias, const FwdArgs& args, const Sizes<Int>& sizes) {
  const Int total_k = size<Int>(args.k, 0);
  FLASHATTN_EXT_CHECK(
      has_shape<Int>(key_bias, {total_k}) || has_shape<Int>(key_bias, {sizes.heads_q, total_k}),
      "key_bias must have the shape (total_k) or (heads_q, total_k) = ",
      c10::ArrayRef<Int>({sizes.heads_q, total_k}), ", got ", key_bias.sym_sizes());
}

template <class Int>
void check_block_mask_shape(const Tensor& block_mask, const Sizes<Int>& sizes) {
  const Int rows = (sizes.seqlen_q + (kBlockMaskTile - 1)) / kBlockMaskTile;
  const Int cols = (sizes.seqlen_k + (kBlockMaskTile - 1)) / kBlockMaskTile;
  FLASHATTN_EXT_CHECK(block_mask.dim() == 4 && equal(size<Int>(block_mask, 2), rows) &&
                          equal(size<Int>(block_mask, 3), cols) &&
                          broadcasts_to<Int>(block_mask, {sizes.batch, sizes.heads_q, rows, cols}),
                      "block_mask must have the shape (batch or 1, heads_q or 1, tiles of 128 "
                      "queries, tiles of 128 keys) = ",
                      c10::ArrayRef<Int>({sizes.batch, sizes.heads_q, rows, cols}), ", got ",
                      block_mask.sym_sizes());
}

template <class Int>
void check_option_shapes(const FwdArgs& args, const Sizes<Int>& sizes) {
  const Options& options = args.options;
  const auto check_score_shape = [&](const char* name, const Tensor& tensor) {
    FLASHATTN_EXT_CHECK(
        broadcasts_to<Int>(tensor, {sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k}),
        name, " must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = ",
        c10::ArrayRef<Int>({sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k}), ", got ",
        tensor.sym_sizes());
  };
  if (options.bias.has_value()) {
    if (args.varlen != nullptr) {
      check_key_bias_shape(*options.bias, args, sizes);
    } else {
      check_score_shape("bias", *options.bias);
    }
  }
  if (options.mask.has_value()) check_score_shape("mask", *options.mask);
  if (options.block_mask.has_value()) check_block_mask_shape(*options.block_mask, sizes);
  if (options.alibi_slopes.has_value()) {
    const Tensor& slopes = *options.alibi_slopes;
    FLASHATTN_EXT_CHECK(has_shape<Int>(slopes, {sizes.heads_q}) ||
                            has_shape<Int>(slopes, {sizes.batch, sizes.heads_q}),
                        "alibi_slopes must have the shape (heads_q) or (batch, heads_q) = ",
                        c10::ArrayRef<Int>({sizes.batch, sizes.heads_q}), ", got ",
                        slopes.sym_sizes());
  }
  if (options.rel_bias.has_value()) {
    const Tensor& table = *options.rel_bias;
    FLASHATTN_EXT_CHECK(table.dim() == 2 && equal(size<Int>(table, 0), sizes.heads_q) &&
                            equal(size<Int>(table, 1) % 2, Int(1)),
                        "rel_bias must have the shape (heads_q, 2 R + 1) with heads_q = ",
                        sizes.heads_q, ", got ", table.sym_sizes());
  }
  if (options.sink.has_value()) {
    check_shape<Int>("sink", *options.sink, "(heads_q)", {sizes.heads_q});
  }
  if (options.rng_state.has_value()) {
    check_shape<Int>("rng_state", *options.rng_state, "(seed, offset)", {Int(2)});
  }
}

void check_values(const FwdArgs& args) {
  const Options& options = args.options;
  const auto check_window = [](const char* name, const SymInt& bound) {
    FLASHATTN_EXT_CHECK(at_least(bound, SymInt(-1)), name,
                        " must be -1 (unlimited) or a number of keys from 0, got ", bound);
  };
  check_window("window_left", options.window_left);
  check_window("window_right", options.window_right);
  FLASHATTN_EXT_CHECK(options.softcap >= 0 && std::isfinite(options.softcap),
                      "softcap must be 0 (off) or a positive number, got ", options.softcap);
  FLASHATTN_EXT_CHECK(options.dropout_p >= 0 && options.dropout_p < 1,
                      "dropout_p must be at least 0 and below 1, got ", options.dropout_p);
  FLASHATTN_EXT_CHECK(!options.softmax_scale || std::isfinite(*options.softmax_scale),
                      "softmax_scale must be finite, got ", options.softmax_scale.value_or(0));
  if (!options.plan) return;
  const Family* family = find_family(*options.plan);
  FLASHATTN_EXT_CHECK(family != nullptr, "plan='", *options.plan,
                      "' names no kernel family; there are ", family_names());
  FLASHATTN_EXT_CHECK(!args.q.is_cpu() || !family->on_cuda, "plan='", *options.plan,
                      "' runs on CUDA tensors and q is on the CPU; leave plan out or move q, k and "
                      "v to a CUDA device");
}

}  // namespace

void check_layouts(const FwdArgs& args) {
  check_strided("q", args.q);
  check_strided("k", args.k);
  check_strided("v", args.v);
  for_each_option(args.options, args.varlen != nullptr,
                  [](const char* name, const OptTensor& tensor) {
                    if (tensor.has_value()) check_strided(name, *tensor);
                  });
}

template <class Int>
void check_fwd(const FwdArgs& args) {
  check_devices(args);
  check_dtypes(args);
  check_layouts(args);
  check_ranks(args);
  if (args.varlen != nullptr) check_lengths_rank(*args.varlen);
  const Sizes<Int> sizes(args);
  check_qkv_shapes<Int>(args, sizes);
  if (args.varlen != nullptr) check_varlen_shapes<Int>(args, sizes);
  check_option_shapes<Int>(args, sizes);
  check_values(args);
}

template <class Int>
void check_bwd(const BwdArgs& args) {
  check_fwd<Int>(args);
  const Tensor& q = args.q;
  check_device("dout", args.dout, q);
  check_device("out", args.out, q);
  check_device("lse", args.lse, q);
  if (args.dlse.has_value()) check_device("dlse", *args.dlse, q);

  check_dtype("dout", args.dout, q.scalar_type(), " like q");
  check_dtype("out", args.out, q.scalar_type(), " like q");
  check_dtype("lse", args.lse, lse_dtype(q.scalar_type()), "");
  if (args.dlse.has_value()) check_dtype("dlse", *args.dlse, lse_dtype(q.scalar_type()), "");

  const Sizes<Int> sizes(args);
  const auto check_out = [&](const char* name, const Tensor& tensor) {
    if (args.varlen == nullptr) {
      check_shape<Int>(name, tensor, "(batch, seqlen_q, heads_q, head_dim_v)",
                       {sizes.batch, sizes.seqlen_q, sizes.heads_q, sizes.head_dim_v});
    } else {
      check_shape<Int>(name, tensor, "(total_q, heads_q, head_dim_v)",
                       {size<Int>(q, 0), sizes.heads_q, sizes.head_dim_v});
    }
  };
  const auto check_lse = [&](const char* name, const Tensor& tensor) {
    if (args.varlen == nullptr) {
      check_shape<Int>(name, tensor, "(batch, heads_q, seqlen_q)",
                       {sizes.batch, sizes.heads_q, sizes.seqlen_q});
    } else {
      check_shape<Int>(name, tensor, "(heads_q, total_q)", {sizes.heads_q, size<Int>(q, 0)});
    }
  };
  FLASHATTN_EXT_CHECK(args.options.dropout_p == 0 || args.options.rng_state.has_value(),
                      "dropout_p > 0 needs rng_state, the one that the forward returned");
  check_out("dout", args.dout);
  check_out("out", args.out);
  check_lse("lse", args.lse);
  if (args.dlse.has_value()) check_lse("dlse", *args.dlse);
}

template <class Int>
void check_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                 const Tensor& lse_b) {
  const auto check_on_device = [&](const char* name, const Tensor& tensor) {
    FLASHATTN_EXT_CHECK(tensor.device() == out_a.device(), name,
                        " must be on the device of out_a (", out_a.device(), "), got ",
                        tensor.device());
  };
  check_on_device("lse_a", lse_a);
  check_on_device("out_b", out_b);
  check_on_device("lse_b", lse_b);

  const at::ScalarType dtype = out_a.scalar_type();
  FLASHATTN_EXT_CHECK(at::isFloatingType(dtype), "out_a must be a floating-point tensor, got ",
                      dtype_name(dtype));
  check_dtype("out_b", out_b, dtype, " like out_a");
  check_dtype("lse_a", lse_a, lse_dtype(dtype), "");
  check_dtype("lse_b", lse_b, lse_dtype(dtype), "");

  FLASHATTN_EXT_CHECK(out_a.dim() == 4 || out_a.dim() == 3,
                      "out_a must be (batch, seqlen, heads, head_dim) or (tokens, heads, "
                      "head_dim), got ",
                      out_a.dim(), " dimensions: ", out_a.sym_sizes());
  const Int rows = size<Int>(out_a, -3), heads = size<Int>(out_a, -2), dim = size<Int>(out_a, -1);
  FLASHATTN_EXT_CHECK(at_least(dim, Int(1)), "head dims must be at least 1, got ", dim,
                      " for out_a");
  const auto check_lse = [&](const char* name, const Tensor& tensor) {
    if (out_a.dim() == 4) {
      check_shape<Int>(name, tensor, "(batch, heads, seqlen)", {size<Int>(out_a, 0), heads, rows});
    } else {
      check_shape<Int>(name, tensor, "(heads, tokens)", {heads, rows});
    }
  };
  if (out_a.dim() == 4) {
    check_shape<Int>("out_b", out_b, "of out_a", {size<Int>(out_a, 0), rows, heads, dim});
  } else {
    check_shape<Int>("out_b", out_b, "of out_a", {rows, heads, dim});
  }
  check_lse("lse_a", lse_a);
  check_lse("lse_b", lse_b);
}

template void check_fwd<int64_t>(const FwdArgs&);
template void check_fwd<SymInt>(const FwdArgs&);
template void check_bwd<int64_t>(const BwdArgs&);
template void check_bwd<SymInt>(const BwdArgs&);
template void check_merge<int64_t>(const Tensor&, const Tensor&, const Tensor&, const Tensor&);
template void check_merge<SymInt>(const Tensor&, const Tensor&, const Tensor&, const Tensor&);

at::ScalarType lse_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

const char* dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kBool:
      return "bool";
    case at::kUInt64:
      return "uint64";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace flashattn_ext
