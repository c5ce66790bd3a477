// A plan as text and numbers: what `flashattn_ext.explain` shows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"

namespace flashattn_ext {

struct Rejection {
  std::string family;
  std::string reason;
};

struct Explanation {
  std::string family;  // empty when nothing runs the call
  std::string error;   // the sentence the call raises then
  std::vector<KernelReport> kernels;
  std::vector<Rejection> rejected;
  std::vector<std::string> copies;  // inputs that are copied to a contiguous tensor first
  Window window;
  bool empty = false;
  bool deterministic = true;
  int64_t workspace_bytes = 0;
  std::string workspace_formula;
};

Explanation explain(const Problem& problem, const DeviceInfo& device, std::string_view forced = {});

}  // namespace flashattn_ext
