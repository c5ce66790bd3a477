// In the place of csrc/ptx/grid_dependency.cuh: kernels run one after the other.
#pragma once

namespace flashattn_ext::ptx {

inline void launch_dependents() {}
inline void wait_for_dependency() {}

}  // namespace flashattn_ext::ptx
