// Support rules and tile choice of the portable kernels in csrc/sm80.
#include <algorithm>
#include <cstddef>

#include "plan/plan.h"
#include "smxx/tiles.h"

namespace flashattn_ext {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxSeqlen = (int64_t{1} << 30) - 1;  // r and kUnlimited stay inside int32
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;    // CUDA's limit of grid.x
constexpr int64_t kMaxInt32 = (int64_t{1} << 31) - 1;
constexpr int64_t kCopyBytes = 16;    // one cp.async, ldmatrix row or vector store
constexpr int64_t kElementBytes = 2;  // float16 and bfloat16

// The first row of the problem's bucket that the device has the shared memory for.
template <class Tile, size_t kRows>
constexpr const Tile* pick_tile(const Tile (&table)[kRows], int64_t head_dim, int32_t smem_bytes) {
  int32_t bucket = 0;
  for (int32_t candidate : sm80::kHeadDimBuckets) {
    bucket = candidate;
    if (head_dim <= candidate) break;
  }
  for (const Tile& tile : table) {
    if (tile.bucket == bucket && tile.min_smem_bytes <= smem_bytes) return &tile;
  }
  return nullptr;
}

// Every tile fits the shared memory it asks for, and every bucket has one for the smallest device.
template <class Tile, size_t kRows>
constexpr bool is_sound(const Tile (&table)[kRows]) {
  for (const Tile& tile : table) {
    if (tile.smem_bytes() > tile.min_smem_bytes) return false;
  }
  for (int32_t bucket : sm80::kHeadDimBuckets) {
    if (pick_tile(table, bucket, sm80::kSmem99) == nullptr) return false;
  }
  return true;
}
static_assert(is_sound(sm80::kFwdTiles));
static_assert(is_sound(sm80::kBwdDqTiles));
static_assert(is_sound(sm80::kBwdDkvTiles));

bool needs_copy(const Layout& layout) {
  constexpr int64_t kCopyElements = kCopyBytes / kElementBytes;
  const Strides& strides = layout.strides;
  return !layout.contiguous_last || !layout.aligned || strides.batch % kCopyElements != 0 ||
         strides.row % kCopyElements != 0 || strides.head % kCopyElements != 0;
}

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

Reason reject_device(const DeviceInfo& device) {
  if (device.cc_major < 8) {
    return {.text = "it needs compute capability 8.0 or newer and this device has {a}.{b}",
            .a = device.cc_major,
            .b = device.cc_minor};
  }
  if (device.smem_per_block_bytes < sm80::kSmem99) {
    return {.text = "it needs {a} bytes of shared memory per block and this device offers {b}",
            .a = sm80::kSmem99,
            .b = device.smem_per_block_bytes};
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

Reason reject_grid(int64_t blocks) {
  if (blocks > kMaxGrid) {
    return {.text = "its grid of {a} blocks is larger than {b}; split the batch",
            .a = blocks,
            .b = kMaxGrid};
  }
  return {};
}

Reason choose(const Problem& problem, const DeviceInfo& device, Plan& plan) {
  if (Reason reason = reject_device(device)) return reason;
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
  if (Reason reason = reject_sizes(problem)) return reason;

  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const int32_t smem = device.smem_per_block_bytes;
  plan.copy_q = needs_copy(problem.q);
  plan.copy_k = needs_copy(problem.k);
  plan.copy_v = needs_copy(problem.v);
  if (problem.op == Op::kForward) {
    plan.fwd_tile = pick_tile(sm80::kFwdTiles, head_dim, smem);
    return reject_grid(
        grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, plan.fwd_tile->block_m));
  }
  plan.copy_out = needs_copy(problem.out);
  plan.copy_dout = needs_copy(problem.dout);
  plan.workspace_bytes = 2 * row_stats_bytes(problem);  // delta and lse_log2
  plan.bwd_dq_tile = pick_tile(sm80::kBwdDqTiles, head_dim, smem);
  plan.bwd_dkv_tile = pick_tile(sm80::kBwdDkvTiles, head_dim, smem);
  const int64_t dq_blocks =
      grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, plan.bwd_dq_tile->block_m);
  const int64_t dkv_blocks =
      grid_blocks(problem, problem.seqlen_k, problem.num_heads_k, plan.bwd_dkv_tile->block_n);
  const int64_t delta_blocks =
      grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, smxx::kDeltaRows);
  return reject_grid(std::max({dq_blocks, dkv_blocks, delta_blocks}));
}

template <class Tile>
KernelReport report(const char* name, const Tile& tile, int64_t grid) {
  return {name, grid, tile.block_m, tile.block_n, tile.num_warps, tile.stages, tile.smem_bytes()};
}

// In launch order, as csrc/binding/cuda.cpp launches them.
std::vector<KernelReport> kernels(const Problem& problem, const Plan& plan) {
  std::vector<KernelReport> list;
  if (plan.fwd_tile != nullptr) {
    list.push_back(report(
        "flash_fwd_sm80_kernel", *plan.fwd_tile,
        grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, plan.fwd_tile->block_m)));
    if (problem.varlen) list.push_back({.name = "flash_fill_unowned_kernel"});
    return list;
  }
  list.push_back({.name = "flash_bwd_delta_kernel"});
  list.push_back(report(
      "flash_bwd_dq_sm80_kernel", *plan.bwd_dq_tile,
      grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, plan.bwd_dq_tile->block_m)));
  list.push_back(report(
      "flash_bwd_dkv_sm80_kernel", *plan.bwd_dkv_tile,
      grid_blocks(problem, problem.seqlen_k, problem.num_heads_k, plan.bwd_dkv_tile->block_n)));
  if (problem.varlen) list.push_back({.name = "flash_fill_unowned_kernel"});
  return list;
}

}  // namespace

const Family kSm80Family = {
    .name = "sm80",
    .summary = "portable kernels: cp.async, ldmatrix, mma.sync",
    .on_cuda = true,
    .choose = choose,
    .kernels = kernels,
};

}  // namespace flashattn_ext
