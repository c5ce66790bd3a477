// Encodes tensor maps on the host, without linking against libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flashattn_ext::sm90 {

// A (batch, rows, heads, head_dim) tensor of 16-bit elements and the boxes it is read in.
struct TensorMapShape {
  const void* data;
  int64_t batch, rows, heads, head_dim;
  Strides strides;  // elements
  int32_t box_rows;
  Dtype dtype;
};

// `map` reads boxes (64 columns, box_rows) at coordinates (column, row, head, batch).
cudaError_t encode_tensor_map(const TensorMapShape& shape, CUtensorMap* map);

}  // namespace flashattn_ext::sm90
