// What the Hopper backward kernels take beside BwdParams.
#pragma once

#include <cuda.h>

namespace flashattn_ext::sm90 {

// Four-dimensional maps (head_dim, rows, heads, batch) of 16-bit elements, in boxes of 64 columns
// with the 128-byte swizzle; in varlen the batch dimension is 1 and rows are packed rows. Boxes
// have the rows of the kernel's tiles.
struct BwdTensorMaps {
  CUtensorMap q, k, v, dout;
};

}  // namespace flashattn_ext::sm90
