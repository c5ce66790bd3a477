// The executable specification, flashattn_ext/spec.py: every option in any floating dtype, on the
// CPU.
#include "plan/plan.h"

namespace flashattn_ext {
namespace {

Reason choose(const Problem&, const DeviceInfo&, bool, Plan&) { return {}; }

std::vector<KernelReport> kernels(const Problem&, const Plan&) { return {}; }

}  // namespace

const Family kSpecFamily = {
    .name = "spec",
    .summary = "the executable specification in plain torch",
    .on_cuda = false,
    .forward_by_name_only = false,
    .choose = choose,
    .kernels = kernels,
};

}  // namespace flashattn_ext
