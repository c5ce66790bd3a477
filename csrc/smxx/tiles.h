// Tile sizes of the small kernels that a plan must know. Plain C++.
#pragma once

#include <cstdint>

namespace flashattn_ext::smxx {

inline constexpr int32_t kDeltaRows = 64;  // query rows per CTA of bwd_delta.cu

}  // namespace flashattn_ext::smxx
