// What all CUDA families ask of a problem, whatever their kernels.
#pragma once

#include <cstdint>

#include "plan/problem.h"
#include "plan/reason.h"

namespace flashattn_ext {

inline constexpr int64_t kMaxHeadDim = 256;  // of the CUDA kernels

inline constexpr int64_t kMaxInt32 = (int64_t{1} << 31) - 1;
inline constexpr int64_t kMaxGrid = kMaxInt32;  // CUDA's limit of grid.x

// The input cannot be read in place: 16-byte copies need its last dimension contiguous, its base
// and its other strides multiples of 16 bytes.
bool needs_copy(const Layout& layout);

// Dtype, head dims, options and sizes.
Reason reject_problem(const Problem& problem);

Reason reject_grid(int64_t blocks);

}  // namespace flashattn_ext
