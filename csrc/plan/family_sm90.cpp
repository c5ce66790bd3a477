// Support rules and tile choice of the Hopper kernels in csrc/sm90.
#include <algorithm>
#include <cstddef>
#include <iterator>

#include "plan/cuda_rules.h"
#include "plan/plan.h"

namespace flashattn_ext {
namespace {

constexpr int64_t kMaxMapStride = int64_t{1} << 39;  // elements; tensor maps hold 2^40 bytes
// Of an SM, of which each CTA takes 1 KB beside its own.
constexpr int32_t kSmemHopper = 228 * 1024, kSmemReserved = 1024;

bool is_masked(const Window& window) {
  return window.left < kUnlimited || window.right < kUnlimited;
}

// The first row whose bucket holds the head dims and which is for as many keys as a query sees.
const sm90::FwdTile& pick_tile(const Problem& problem, const Window& window) {
  const bool masked = is_masked(window);
  const int64_t keys = std::min<int64_t>(problem.seqlen_k, int64_t{window.left} + window.right + 1);
  for (const sm90::FwdTile& tile : sm90::kFwdTiles) {
    if (problem.head_dim <= tile.bucket && problem.head_dim_v <= tile.bucket_v &&
        keys <= (masked ? tile.most_keys_masked : tile.most_keys)) {
      return tile;
    }
  }
  return std::end(sm90::kFwdTiles)[-1];  // the widest; is_sound
}

constexpr bool is_sound() {
  for (const sm90::FwdTile& tile : sm90::kFwdTiles) {
    if (tile.ctas_per_sm * (tile.smem_bytes() + kSmemReserved) > kSmemHopper) return false;
  }
  const sm90::FwdTile& last = std::end(sm90::kFwdTiles)[-1];
  return last.bucket == kMaxHeadDim && last.bucket_v == kMaxHeadDim &&
         last.most_keys == sm90::kAnyLength && last.most_keys_masked == sm90::kAnyLength;
}
static_assert(is_sound(), "every tile fits the shared memory of a Hopper SM; the last takes all");

// A tensor map steps through memory: a dimension may not repeat in place, and its strides are
// bounded. Copies are contiguous and always fine.
Reason reject_layout(const char* name, const Layout& layout, int64_t batch, int64_t rows,
                     int64_t heads) {
  const Strides& strides = layout.strides;
  const struct {
    int64_t size, stride;
  } dims[] = {{batch, strides.batch}, {rows, strides.row}, {heads, strides.head}};
  for (const auto& dim : dims) {
    if (dim.size > 1 && dim.stride == 0) {
      return {.text =
                  "{name} repeats a dimension in place (stride 0), which tensor maps cannot; "
                  "pass a contiguous copy to use it",
              .name = name};
    }
    if (dim.stride >= kMaxMapStride) {
      return {.text = "a stride of {name}, {a} elements, is larger than {b}",
              .a = dim.stride,
              .b = kMaxMapStride - 1,
              .name = name};
    }
  }
  return {};
}

int64_t num_tiles(const Problem& problem, const sm90::FwdTile& tile) {
  return grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, tile.block_m());
}

Reason choose(const Problem& problem, const DeviceInfo& device, Plan& plan) {
  if (device.cc_major != 9 || device.cc_minor != 0) {
    return {.text = "it needs compute capability 9.0 and this device has {a}.{b}",
            .a = device.cc_major,
            .b = device.cc_minor};
  }
  if (Reason reason = reject_problem(problem)) return reason;

  plan.copy_q = needs_copy(problem.q);
  plan.copy_k = needs_copy(problem.k);
  plan.copy_v = needs_copy(problem.v);
  const int64_t batch = problem.varlen ? 1 : problem.batch;
  const int64_t rows_q = problem.varlen ? problem.total_q : problem.seqlen_q;
  const int64_t rows_k = problem.varlen ? problem.total_k : problem.seqlen_k;
  if (std::max(rows_q, rows_k) > kMaxInt32) {
    return {.text = "{a} packed rows are more than {b}, the largest coordinate of a tensor map",
            .a = std::max(rows_q, rows_k),
            .b = kMaxInt32};
  }
  const struct {
    const char* name;
    const Layout& layout;
    bool copied;
    int64_t rows, heads;
  } inputs[] = {{"q", problem.q, plan.copy_q, rows_q, problem.num_heads_q},
                {"k", problem.k, plan.copy_k, rows_k, problem.num_heads_k},
                {"v", problem.v, plan.copy_v, rows_k, problem.num_heads_k}};
  for (const auto& input : inputs) {
    if (input.copied) continue;
    if (Reason reason = reject_layout(input.name, input.layout, batch, input.rows, input.heads)) {
      return reason;
    }
  }
  plan.sm90_fwd_tile = &pick_tile(problem, plan.window);
  const int64_t tiles = num_tiles(problem, *plan.sm90_fwd_tile);
  const int64_t most_ctas = int64_t{device.num_sms} * plan.sm90_fwd_tile->ctas_per_sm;
  // Tiles are numbered in 32 bits, and a CTA may draw one number too many.
  if (Reason reason = reject_grid(tiles + most_ctas)) return reason;
  plan.num_ctas = static_cast<int32_t>(std::min(tiles, most_ctas));
  // Work is equal where every query sees all keys of sequences of one length.
  const bool equal_tiles = !problem.varlen && !is_masked(plan.window);
  if (tiles > plan.num_ctas && (!equal_tiles || plan.sm90_fwd_tile->draw_equal_tiles)) {
    plan.workspace_bytes = sizeof(int32_t);
    plan.workspace_formula = "one counter of tiles";
  }
  return {};
}

// In launch order, as csrc/binding/cuda.cpp launches them.
std::vector<KernelReport> kernels(const Problem& problem, const Plan& plan) {
  const sm90::FwdTile& tile = *plan.sm90_fwd_tile;
  std::vector<KernelReport> list;
  if (plan.workspace_bytes > 0)
    list.push_back({.name = "flash_fwd_sm90_counter_kernel", .grid = 1});
  list.push_back({"flash_fwd_sm90_kernel", plan.num_ctas, tile.block_m(), tile.block_n,
                  tile.num_warps(), tile.k_stages, tile.smem_bytes()});
  if (problem.varlen) list.push_back({.name = "flash_fill_unowned_kernel"});
  return list;
}

}  // namespace

const Family kSm90Family = {
    .name = "sm90",
    .summary = "Hopper kernels: TMA, wgmma, warp specialisation (forward)",
    .on_cuda = true,
    .has_backward = false,
    .choose = choose,
    .kernels = kernels,
};

}  // namespace flashattn_ext
