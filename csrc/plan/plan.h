// problem -> plan: which kernels run a call, with which tiles, or why none does. Pure host code;
// the binding asks for a plan and launches it, and nothing else decides anything.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/device_info.h"
#include "plan/problem.h"
#include "plan/reason.h"
#include "sm80/tiles.h"
#include "sm90/tiles.h"

namespace flashattn_ext {

// Sliding-window bounds as the kernels take them: kUnlimited where nothing is masked.
struct Window {
  int32_t left = kUnlimited;
  int32_t right = kUnlimited;
};

struct Plan;

// One kernel of a plan, for people: tile, launch and shared memory.
struct KernelReport {
  std::string name;
  int64_t grid = 0;  // CTAs; 0 where the kernel sizes its own small grid
  int32_t block_m = 0;
  int32_t block_n = 0;
  int32_t num_warps = 0;
  int32_t stages = 0;
  int32_t smem_bytes = 0;
};

// A set of kernels that runs on one kind of device. To add one: a file that defines a Family, a
// declaration below, a place in the list of plan.cpp, and its launches in binding/cuda.cpp.
struct Family {
  const char* name;
  const char* summary;
  bool on_cuda;
  bool forward_by_name_only;  // it is another family's; without the name nobody need ask for it
  // Objects, or fills in the plan's tiles, copies and workspace. `by_name`: the caller named this
  // family, which then objects only to what it cannot run.
  Reason (*choose)(const Problem& problem, const DeviceInfo& device, bool by_name, Plan& plan);
  // The kernels of a plan that `choose` filled in, in launch order.
  std::vector<KernelReport> (*kernels)(const Problem& problem, const Plan& plan);
};

extern const Family kSm90FusedFamily;  // family_sm90.cpp
extern const Family kSm90Family;       // family_sm90.cpp
extern const Family kSm80Family;       // family_sm80.cpp
extern const Family kSpecFamily;       // family_spec.cpp

struct Plan {
  const Family* family = nullptr;  // nullptr: nothing runs the problem; see error_sentence
  Window window;

  // Rows of the tile tables, set by the family that uses them.
  const sm90::FwdTile* sm90_fwd_tile = nullptr;
  int32_t num_ctas = 0;  // of the persistent launch of sm90_fwd_tile or sm90_bwd_fused_tile
  const sm90::BwdDqTile* sm90_bwd_dq_tile = nullptr;
  const sm90::BwdDkvTile* sm90_bwd_dkv_tile = nullptr;
  const sm90::BwdFusedTile* sm90_bwd_fused_tile = nullptr;
  const sm80::FwdTile* fwd_tile = nullptr;
  const sm80::BwdDqTile* bwd_dq_tile = nullptr;
  const sm80::BwdDkvTile* bwd_dkv_tile = nullptr;

  // Nothing to compute (no query row, no key or no batch): outputs are filled, nothing is launched.
  bool empty = false;

  // Inputs whose layout the kernels cannot address; the binding hands them a contiguous copy.
  bool copy_q = false;
  bool copy_k = false;
  bool copy_v = false;
  bool copy_out = false;
  bool copy_dout = false;

  // The results are the same bits in every run.
  bool deterministic = true;

  // Bytes allocated for the launch besides outputs and copies: the backward's buffer for dQ and the
  // counters that go with it, where it has one, then its delta and lse_log2; or a persistent
  // launch's counter.
  int64_t workspace_bytes = 0;
  int64_t dq_buffer_bytes = 0, counter_bytes = 0;
  const char* workspace_formula = "";
};

// The plan for `problem`. `forced` names the only family to ask; empty asks all of them in order.
Plan make_plan(const Problem& problem, const DeviceInfo& device, std::string_view forced = {});

// The sentence to raise when make_plan found no family.
std::string error_sentence(const Problem& problem, const DeviceInfo& device,
                           std::string_view forced = {});

// Why `family` does not run the problem on this device; no objection when it does. `by_name` as in
// Family::choose.
Reason reject(const Family& family, const Problem& problem, const DeviceInfo& device, bool by_name);

// Every family: the preferred one first, the most general one of each kind of device last.
const std::vector<const Family*>& families();

// nullptr when no family has this name.
const Family* find_family(std::string_view name);

// "sm90_fused, sm90, sm80, spec": for sentences about an unknown name.
std::string family_names();

// Equivalent ways to ask for the same keys (causal, window (-1, 0), a bound that reaches past every
// key) give the same bounds, and so the same bits.
Window canonical_window(const Problem& problem);

// One fp32 number for every row of every head: the size of lse, delta and lse_log2.
int64_t row_stats_bytes(const Problem& problem);

// The workspace of a backward: delta and lse_log2.
void ask_for_row_stats(const Problem& problem, Plan& plan);

// CTAs of one linear grid: blocks of `block_rows` over every sequence, times heads.
int64_t grid_blocks(const Problem& problem, int64_t seqlen, int64_t num_heads, int32_t block_rows);

}  // namespace flashattn_ext
