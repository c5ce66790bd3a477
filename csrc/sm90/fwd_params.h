// What the Hopper forward takes beside FwdParams: the tensor maps of its inputs.
#pragma once

#include <cuda.h>

namespace flashattn_ext::sm90 {

// Four-dimensional maps (head_dim, rows, heads, batch) of 16-bit elements, read in boxes of 64
// columns with the 128-byte swizzle; in varlen the batch dimension is 1 and rows are packed rows.
struct FwdTensorMaps {
  CUtensorMap q;  // boxes of 64 rows: one consumer warpgroup's
  CUtensorMap k;  // boxes of Bc rows
  CUtensorMap v;
};

}  // namespace flashattn_ext::sm90
