// Support rules and tile choice of the portable kernels in csrc/sm80.
#include <algorithm>
#include <cstddef>

#include "plan/cuda_rules.h"
#include "plan/plan.h"
#include "smxx/tiles.h"

namespace flashattn_ext {
namespace {

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

Reason choose(const Problem& problem, const DeviceInfo& device, bool, Plan& plan) {
  if (Reason reason = reject_device(device)) return reason;
  if (Reason reason = reject_problem(problem)) return reason;

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
  ask_for_row_stats(problem, plan);
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
    .forward_by_name_only = false,
    .choose = choose,
    .kernels = kernels,
};

}  // namespace flashattn_ext
