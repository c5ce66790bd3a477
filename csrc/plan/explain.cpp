#include "plan/explain.h"

namespace flashattn_ext {
namespace {

std::vector<Rejection> rejections(const Problem& problem, const DeviceInfo& device,
                                  const Plan& plan) {
  std::vector<Rejection> rejected;
  for (const Family* family : families()) {
    if (family == plan.family) continue;
    const Reason reason = reject(*family, problem, device, false);
    const std::string not_chosen = "it runs this call and was not the one chosen";
    rejected.push_back({family->name, reason ? reason.str() : not_chosen});
  }
  return rejected;
}

}  // namespace

Explanation explain(const Problem& problem, const DeviceInfo& device, std::string_view forced) {
  const Plan plan = make_plan(problem, device, forced);
  Explanation explanation;
  explanation.rejected = rejections(problem, device, plan);
  explanation.window = canonical_window(problem);
  if (plan.family == nullptr) {
    explanation.error = error_sentence(problem, device, forced);
    return explanation;
  }
  explanation.family = plan.family->name;
  explanation.empty = plan.empty;
  explanation.deterministic = plan.empty || plan.deterministic;
  if (!plan.empty) explanation.kernels = plan.family->kernels(problem, plan);
  if (plan.copy_q) explanation.copies.push_back("q");
  if (plan.copy_k) explanation.copies.push_back("k");
  if (plan.copy_v) explanation.copies.push_back("v");
  if (plan.copy_out) explanation.copies.push_back("out");
  if (plan.copy_dout) explanation.copies.push_back("dout");
  explanation.workspace_bytes = plan.workspace_bytes;
  explanation.workspace_formula = plan.workspace_formula;
  return explanation;
}

}  // namespace flashattn_ext
