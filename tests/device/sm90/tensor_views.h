// What the tests of the copy engine share: views of buffers, and the boxes they are copied in.
#pragma once

#include <cuda.h>

#include "attention/params.h"
#include "harness.h"
#include "sm90/tensor_map.h"
#include "swizzle128.h"

namespace flashattn_ext::testing {

struct Coordinates {
  int col, row, head, batch;
};

// A view of a buffer that is larger than what it shows. Sizes and strides as TensorMapShape has
// them; `offset` is the first element's.
struct View {
  int batch, rows, heads, head_dim;
  Strides strides;
  int64_t offset;

  int64_t index(const Coordinates& at) const {
    return offset + at.batch * strides.batch + at.row * strides.row + at.head * strides.head +
           at.col;
  }
  bool holds(const Coordinates& at) const {
    return at.col < head_dim && at.row < rows && at.head < heads && at.batch < batch;
  }
  // Elements of a buffer that holds it and some that no box may touch.
  int64_t storage_size() const {
    return index({head_dim - 1, rows - 1, heads - 1, batch - 1}) + 1 + 4096;
  }
  CUtensorMap map(uint16_t* storage, int box_rows, Dtype dtype, const char* what) const {
    CUtensorMap result;
    check_cuda(
        sm90::encode_tensor_map(
            {storage + offset, batch, rows, heads, head_dim, strides, box_rows, dtype}, &result),
        what);
    return result;
  }
};

inline View contiguous(int batch, int rows, int heads, int head_dim) {
  const int64_t row = int64_t{heads} * head_dim;
  return {batch, rows, heads, head_dim, {rows * row, row, head_dim}, 0};
}

// (batch, heads, rows, head_dim) in memory.
inline View heads_first(int batch, int rows, int heads, int head_dim) {
  const int64_t head = int64_t{rows} * head_dim;
  return {batch, rows, heads, head_dim, {heads * head, head_dim, head}, 0};
}

// Bits that differ between neighbours, are never 0 and are not all ones; some are infinities and
// NaN of both types, which must arrive as they are.
inline uint16_t element_bits(int64_t i) {
  return static_cast<uint16_t>(1 + (i * 40503 + i / 64) % 65534);
}

}  // namespace flashattn_ext::testing
