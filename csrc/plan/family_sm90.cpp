// Support rules and tile choice of the Hopper kernels in csrc/sm90.
#include <algorithm>
#include <cstddef>
#include <iterator>

#include "plan/cuda_rules.h"
#include "plan/plan.h"
#include "sm90/bwd_dq_buffer.h"
#include "smxx/tiles.h"

namespace flashattn_ext {
namespace {

constexpr int64_t kMaxMapStride = int64_t{1} << 39;  // elements; tensor maps hold 2^40 bytes
// Of an SM, of which each CTA takes 1 KB beside its own.
constexpr int32_t kSmemHopper = 228 * 1024, kSmemReserved = 1024;

bool is_masked(const Window& window) {
  return window.left < kUnlimited || window.right < kUnlimited;
}

// The most keys that a query sees.
int64_t keys_of_a_query(const Problem& problem, const Window& window) {
  return std::min<int64_t>(problem.seqlen_k, int64_t{window.left} + window.right + 1);
}

// The first row whose bucket holds the head dims and which is for as many keys as a query sees.
const sm90::FwdTile& pick_tile(const Problem& problem, const Window& window) {
  const bool masked = is_masked(window);
  const int64_t keys = keys_of_a_query(problem, window);
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

template <class Tile, size_t kRows>
constexpr bool is_sound(const Tile (&table)[kRows]) {
  for (const Tile& tile : table) {
    if (tile.smem_bytes() + kSmemReserved > kSmemHopper) return false;
  }
  return std::end(table)[-1].bucket == kMaxHeadDim;
}
static_assert(is_sound(sm90::kBwdDqTiles));
static_assert(is_sound(sm90::kBwdDkvTiles));

// Every row that does not add in order has one behind it that does.
constexpr bool is_sound(const sm90::BwdFusedTile* tile, const sm90::BwdFusedTile* end) {
  for (; tile != end; tile += 2) {
    if (tile[0].in_order || !tile[1].in_order || tile[0].bucket != tile[1].bucket) return false;
    for (const sm90::BwdFusedTile& each : {tile[0], tile[1]}) {
      if (each.smem_bytes() + kSmemReserved > kSmemHopper) return false;
    }
  }
  return true;
}
static_assert(is_sound(std::begin(sm90::kBwdFusedTiles), std::end(sm90::kBwdFusedTiles)));

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

// The first row whose bucket holds both head dims.
template <class Tile, size_t kRows>
const Tile* pick_bwd_tile(const Tile (&table)[kRows], const Problem& problem) {
  for (const Tile& tile : table) {
    if (problem.head_dim <= tile.bucket && problem.head_dim_v <= tile.bucket_v) return &tile;
  }
  return &std::end(table)[-1];  // the widest; is_sound
}

Reason choose_fwd(const Problem& problem, const DeviceInfo& device, Plan& plan) {
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

int64_t dq_blocks(const Problem& problem, const sm90::BwdDqTile& tile) {
  return grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, tile.block_m());
}

int64_t dkv_blocks(const Problem& problem, const sm90::BwdDkvTile& tile) {
  return grid_blocks(problem, problem.seqlen_k, problem.num_heads_k, tile.block_n());
}

Reason choose_split_bwd(const Problem& problem, Plan& plan) {
  ask_for_row_stats(problem, plan);
  plan.sm90_bwd_dq_tile = pick_bwd_tile(sm90::kBwdDqTiles, problem);
  plan.sm90_bwd_dkv_tile = pick_bwd_tile(sm90::kBwdDkvTiles, problem);
  return reject_grid(std::max(
      {dq_blocks(problem, *plan.sm90_bwd_dq_tile), dkv_blocks(problem, *plan.sm90_bwd_dkv_tile),
       grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, smxx::kDeltaRows)}));
}

// Sums of dQ in a fixed order: where gradients are to be equal over runs, and where that is faster.
// Asked by name, the family uses the latter freedom only with determinism.
bool in_order(const Problem& problem, const Window& window, bool by_name,
              const sm90::BwdFusedTile& unordered) {
  if (problem.deterministic || by_name) return problem.deterministic;
  return problem.rather_deterministic || keys_of_a_query(problem, window) < unordered.least_keys;
}

// The row of kBwdFusedTiles; nullptr: none has these head dims.
const sm90::BwdFusedTile* pick_fused_tile(const Problem& problem, const Window& window,
                                          bool by_name) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  for (const sm90::BwdFusedTile& tile : sm90::kBwdFusedTiles) {
    const bool holds = tile.least_head_dim <= head_dim && head_dim <= tile.bucket;
    if (holds && (tile.in_order || !in_order(problem, window, by_name, tile))) return &tile;
  }
  return nullptr;
}

int64_t fused_blocks(const Problem& problem, const sm90::BwdFusedTile& tile) {
  return grid_blocks(problem, problem.seqlen_k, problem.num_heads_k, tile.block_n());
}

// Blocks of dQ that leave the buffer.
int64_t convert_blocks(const Problem& problem, const sm90::BwdFusedTile& tile) {
  return grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, tile.block_m);
}

// Rows of the buffer of dQ for each row of q, at most: workspace in proportion to the tokens.
constexpr int64_t kMostPadding = 4;

Reason choose_fused_bwd(const Problem& problem, const DeviceInfo& device, bool by_name,
                        Plan& plan) {
  if (!problem.plain_logits) return {"it has no softcap and takes a softmax_scale above 0 alone"};
  const sm90::BwdFusedTile* tile = pick_fused_tile(problem, plan.window, by_name);
  if (tile == nullptr) {
    return {.text = "it is for head dims up to 64 and from 97 to 128, and these are {a} and {b}",
            .a = problem.head_dim,
            .b = problem.head_dim_v};
  }
  const sm90::BwdDqBuffer buffer(problem.varlen, problem.batch, problem.seqlen_q, problem.total_q,
                                 tile->block_m, tile->bucket);
  if (!by_name && buffer.blocks * tile->block_m > kMostPadding * problem.total_q) {
    return {.text =
                "sequences are short: its buffer of dQ, in blocks of {a} rows, would have more "
                "than {b} rows for each of q",
            .a = tile->block_m,
            .b = kMostPadding};
  }
  plan.sm90_bwd_fused_tile = tile;
  plan.deterministic = tile->in_order;
  plan.dq_buffer_bytes = buffer.bytes(problem.num_heads_q);
  plan.counter_bytes = buffer.counter_bytes(problem.num_heads_q, tile->in_order);
  plan.workspace_bytes = plan.dq_buffer_bytes + plan.counter_bytes + 2 * row_stats_bytes(problem);
  const int64_t tiles = fused_blocks(problem, *tile);
  plan.num_ctas = static_cast<int32_t>(std::min<int64_t>(tiles, device.num_sms));
  plan.workspace_formula =
      problem.varlen
          ? "num_heads_q * (8 * total_q + 4 * bucket * Br * (total_q / Br + batch)), and counters"
          : "num_heads_q * batch * (8 * seqlen_q + 4 * bucket * Br * ceil(seqlen_q / Br)), and "
            "counters";
  // A CTA may draw one number too many.
  return reject_grid(
      std::max({tiles + device.num_sms, convert_blocks(problem, *tile),
                grid_blocks(problem, problem.seqlen_q, problem.num_heads_q, smxx::kDeltaRows)}));
}

// What both families ask, and the copies they make.
Reason choose_inputs(const Problem& problem, const DeviceInfo& device, Plan& plan) {
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
  if (problem.op == Op::kForward) return {};
  plan.copy_out = needs_copy(problem.out);
  // A gradient that repeats one value in place is usual: that of a sum.
  plan.copy_dout = needs_copy(problem.dout) ||
                   reject_layout("dout", problem.dout, batch, rows_q, problem.num_heads_q);
  return {};
}

Reason choose(const Problem& problem, const DeviceInfo& device, bool, Plan& plan) {
  if (Reason reason = choose_inputs(problem, device, plan)) return reason;
  return problem.op == Op::kForward ? choose_fwd(problem, device, plan)
                                    : choose_split_bwd(problem, plan);
}

Reason choose_fused(const Problem& problem, const DeviceInfo& device, bool by_name, Plan& plan) {
  if (Reason reason = choose_inputs(problem, device, plan)) return reason;
  if (problem.op == Op::kBackward) return choose_fused_bwd(problem, device, by_name, plan);
  return by_name ? choose_fwd(problem, device, plan) : Reason{"its forward is that of sm90"};
}

template <class Tile>
KernelReport report(const char* name, const Tile& tile, int64_t grid, int32_t block_m,
                    int32_t block_n, int32_t stages) {
  return {name, grid, block_m, block_n, tile.num_warps(), stages, tile.smem_bytes()};
}

// In launch order, as csrc/binding/cuda.cpp launches them.
std::vector<KernelReport> kernels(const Problem& problem, const Plan& plan) {
  std::vector<KernelReport> list;
  if (plan.sm90_fwd_tile != nullptr) {
    const sm90::FwdTile& tile = *plan.sm90_fwd_tile;
    if (plan.workspace_bytes > 0)
      list.push_back({.name = "flash_fwd_sm90_counter_kernel", .grid = 1});
    list.push_back(report("flash_fwd_sm90_kernel", tile, plan.num_ctas, tile.block_m(),
                          tile.block_n, tile.k_stages));
  } else if (plan.sm90_bwd_fused_tile != nullptr) {
    const sm90::BwdFusedTile& tile = *plan.sm90_bwd_fused_tile;
    list.push_back({.name = "flash_bwd_delta_kernel"});
    list.push_back(report("flash_bwd_fused_sm90_kernel", tile, plan.num_ctas, tile.block_m,
                          tile.block_n(), tile.stages));
    list.push_back({.name = "flash_bwd_dq_convert_sm90_kernel"});
  } else {
    const sm90::BwdDqTile& dq = *plan.sm90_bwd_dq_tile;
    const sm90::BwdDkvTile& dkv = *plan.sm90_bwd_dkv_tile;
    list.push_back({.name = "flash_bwd_delta_kernel"});
    list.push_back(report("flash_bwd_dq_sm90_kernel", dq, dq_blocks(problem, dq), dq.block_m(),
                          dq.block_n, dq.k_stages));
    list.push_back(report("flash_bwd_dkv_sm90_kernel", dkv, dkv_blocks(problem, dkv), dkv.block_m,
                          dkv.block_n(), dkv.stages));
  }
  if (problem.varlen) list.push_back({.name = "flash_fill_unowned_kernel"});
  return list;
}

}  // namespace

const Family kSm90FusedFamily = {
    .name = "sm90_fused",
    .summary = "Hopper backward in one kernel: five products, dQ summed in an fp32 buffer",
    .on_cuda = true,
    .forward_by_name_only = true,
    .choose = choose_fused,
    .kernels = kernels,
};

const Family kSm90Family = {
    .name = "sm90",
    .summary = "Hopper kernels: TMA, wgmma, warp specialisation",
    .on_cuda = true,
    .forward_by_name_only = false,
    .choose = choose,
    .kernels = kernels,
};

}  // namespace flashattn_ext
