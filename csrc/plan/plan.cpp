#include "plan/plan.h"

#include <algorithm>
#include <utility>

namespace flashattn_ext {
namespace {

Reason choose(const Family& family, const Problem& problem, const DeviceInfo& device, bool by_name,
              Plan& plan) {
  if (family.on_cuda && !device.is_cuda) {
    return {"it runs on CUDA tensors and these are on the CPU"};
  }
  if (!family.on_cuda && device.is_cuda) {
    return {"it runs on CPU tensors and these are on a CUDA device"};
  }
  plan.window = canonical_window(problem);  // families choose by it
  return family.choose(problem, device, by_name, plan);
}

}  // namespace

const std::vector<const Family*>& families() {
  static const std::vector<const Family*> list = {&kSm90FusedFamily, &kSm90Family, &kSm80Family,
                                                  &kSpecFamily};
  return list;
}

const Family* find_family(std::string_view name) {
  for (const Family* family : families()) {
    if (name == family->name) return family;
  }
  return nullptr;
}

std::string family_names() {
  std::string names;
  for (const Family* family : families()) {
    names += (names.empty() ? "" : ", ") + std::string(family->name);
  }
  return names;
}

Reason reject(const Family& family, const Problem& problem, const DeviceInfo& device,
              bool by_name) {
  Plan unused;
  return choose(family, problem, device, by_name, unused);
}

Plan make_plan(const Problem& problem, const DeviceInfo& device, std::string_view forced) {
  for (const Family* family : families()) {
    if (!forced.empty() && forced != family->name) continue;
    if (forced.empty() && problem.op == Op::kForward && family->forward_by_name_only) continue;
    Plan plan;
    if (choose(*family, problem, device, !forced.empty(), plan)) continue;
    plan.family = family;
    plan.empty = problem.batch == 0 || problem.seqlen_q == 0 || problem.seqlen_k == 0 ||
                 problem.total_q == 0 || problem.total_k == 0 || problem.num_heads_q == 0;
    return plan;
  }
  return {};
}

std::string error_sentence(const Problem& problem, const DeviceInfo& device,
                           std::string_view forced) {
  if (!forced.empty()) {
    const Family* family = find_family(forced);
    const std::string name = "plan='" + std::string(forced) + "'";
    if (family == nullptr) {
      return name + " names no kernel family; there are " + family_names();
    }
    return name + " does not run this call: " + reject(*family, problem, device, true).str();
  }
  // Families that object alike share a sentence.
  std::vector<std::pair<std::string, std::string>> objections;  // names, reason
  for (const Family* family : families()) {
    if (family->on_cuda != device.is_cuda) continue;
    std::string reason = reject(*family, problem, device, false).str();
    if (!objections.empty() && objections.back().second == reason) {
      objections.back().first.append(", ").append(family->name);
    } else {
      objections.emplace_back(family->name, std::move(reason));
    }
  }
  std::string sentence = "no kernel runs this call";
  for (const auto& [names, reason] : objections) {
    sentence.append(". ").append(names).append(": ").append(reason);
  }
  return sentence;
}

Window canonical_window(const Problem& problem) {
  // r = j - (i + off) lies in [-last_left, last_right] over all (i, j), whatever the lengths below
  // seqlen_q and seqlen_k are: off is seqlen_k - seqlen_q, or 0 when aligned top-left.
  const int64_t last_left = (problem.top_left ? problem.seqlen_q : problem.seqlen_k) - 1;
  const int64_t last_right = (problem.top_left ? problem.seqlen_k : problem.seqlen_q) - 1;

  int64_t left = problem.window_left < 0 ? kUnlimited : problem.window_left;
  int64_t right = problem.window_right < 0 ? kUnlimited : problem.window_right;
  if (problem.causal) right = std::min<int64_t>(right, 0);

  Window window;
  window.left = left >= last_left ? kUnlimited : static_cast<int32_t>(left);
  window.right = right >= last_right ? kUnlimited : static_cast<int32_t>(right);
  return window;
}

int64_t row_stats_bytes(const Problem& problem) {
  return static_cast<int64_t>(sizeof(float)) * problem.num_heads_q * problem.total_q;
}

void ask_for_row_stats(const Problem& problem, Plan& plan) {
  plan.workspace_bytes = 2 * row_stats_bytes(problem);
  plan.workspace_formula =
      problem.varlen ? "8 * num_heads_q * total_q" : "8 * num_heads_q * batch * seqlen_q";
}

int64_t grid_blocks(const Problem& problem, int64_t seqlen, int64_t num_heads, int32_t block_rows) {
  return (seqlen + block_rows - 1) / block_rows * problem.batch * num_heads;
}

}  // namespace flashattn_ext
