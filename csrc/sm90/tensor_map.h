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

// A tensor with the rows of the call's queries (q, out, dout), or of its keys (k, v), of `head_dim`
// columns. In varlen the batch is 1 and rows are packed rows.
inline TensorMapShape query_rows(const FwdParams& p, const void* data, const Strides& strides,
                                 int32_t head_dim, int32_t box_rows) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  return {data,
          varlen ? 1 : p.batch,
          varlen ? p.total_q : p.seqlen_q,
          p.num_heads_q,
          head_dim,
          strides,
          box_rows,
          p.dtype};
}
inline TensorMapShape key_rows(const FwdParams& p, const void* data, const Strides& strides,
                               int32_t head_dim, int32_t box_rows) {
  const bool varlen = p.cu_seqlens_k != nullptr;
  return {data,
          varlen ? 1 : p.batch,
          varlen ? p.total_k : p.seqlen_k,
          p.num_heads_k,
          head_dim,
          strides,
          box_rows,
          p.dtype};
}

// `map` reads boxes (64 columns, box_rows) at coordinates (column, row, head, batch).
cudaError_t encode_tensor_map(const TensorMapShape& shape, CUtensorMap* map);

}  // namespace flashattn_ext::sm90
