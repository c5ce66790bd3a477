// What the Hopper forward takes beside FwdParams.
#pragma once

#include <cuda.h>

#include "attention/divisor.h"
#include "attention/tile_order.h"

namespace flashattn_ext::sm90 {

// Four-dimensional maps (head_dim, rows, heads, batch) of 16-bit elements, in boxes of 64
// columns with the 128-byte swizzle; in varlen the batch dimension is 1 and rows are packed rows.
struct FwdTensorMaps {
  CUtensorMap q;  // boxes of 64 rows: one consumer warpgroup's
  CUtensorMap k;  // boxes of Bc rows
  CUtensorMap v;
  CUtensorMap out;  // boxes of 16 rows: one warp's; where the tile stores through the copy engine
};

// Which tiles there are, and how they reach the CTAs.
struct FwdTiles {
  TileOrder order;
  Divisor by_heads_q;  // a head over the batch, by the heads of a sequence
  Divisor by_group;    // a query head, by those that share a head of K and V
  int32_t* counter;    // of tiles taken beyond the first of each CTA; nullptr: every grid-th
};

}  // namespace flashattn_ext::sm90
