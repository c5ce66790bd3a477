// Which keys a query sees: causal masks and windows as one band, and the ends of the sequences.
//
// Query i sees key j when -window_left <= j - (i + off) <= window_right (see params.h). The band
// also answers which blocks of the other side a block must visit and which need no mask at all.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace flashattn_ext {

// Half-open range of block or row indices; empty when end <= begin.
struct BlockRange {
  int32_t begin, end;
};

struct Band {
  int32_t seqlen_q, seqlen_k;
  int32_t lower;  // key j is visible from query i only if j - i >= lower
  int32_t upper;  // ... and j - i <= upper

  __device__ __forceinline__ Band(const FwdParams& p, int32_t seqlen_q, int32_t seqlen_k)
      : seqlen_q(seqlen_q), seqlen_k(seqlen_k) {
    const int32_t off = p.top_left ? 0 : seqlen_k - seqlen_q;
    lower = off - p.window_left;
    upper = off + p.window_right;
  }

  // True when every query of [m0, m0 + rows) sees every key of [n0, n0 + cols): no mask needed.
  __device__ __forceinline__ bool covers(int m0, int rows, int n0, int cols) const {
    return n0 + cols <= seqlen_k && n0 + cols - 1 - m0 <= upper && n0 - (m0 + rows - 1) >= lower;
  }

  // Key blocks that queries [m0, m0 + block_m) see something of.
  __device__ __forceinline__ BlockRange key_blocks(int m0, int block_m, int block_n) const {
    const int32_t last_row = min(m0 + block_m, seqlen_q) - 1;
    const int32_t begin_key = max(0, m0 + lower);
    const int32_t end_key =
        min(static_cast<int64_t>(seqlen_k), static_cast<int64_t>(last_row) + upper + 1);
    if (end_key <= begin_key) return {0, 0};
    return {begin_key / block_n, (end_key + block_n - 1) / block_n};
  }

  // Query blocks that see something of keys [n0, n0 + block_n).
  __device__ __forceinline__ BlockRange query_blocks(int n0, int block_n, int block_m) const {
    const int32_t last_key = min(n0 + block_n, seqlen_k) - 1;
    const int64_t begin_row = max(static_cast<int64_t>(0), static_cast<int64_t>(n0) - upper);
    const int64_t end_row =
        min(static_cast<int64_t>(seqlen_q), static_cast<int64_t>(last_key) - lower + 1);
    if (end_row <= begin_row) return {0, 0};
    return {static_cast<int32_t>(begin_row / block_m),
            static_cast<int32_t>((end_row + block_m - 1) / block_m)};
  }

  // First and one-past-last of the queries that see some key.
  __device__ __forceinline__ BlockRange seeing_rows() const {
    return {max(0, -upper), static_cast<int32_t>(min(static_cast<int64_t>(seqlen_q),
                                                     static_cast<int64_t>(seqlen_k) - lower))};
  }

  // First and one-past-last visible key of query `row`, clipped to the sequence.
  __device__ __forceinline__ int32_t first_key(int row) const { return max(0, row + lower); }
  __device__ __forceinline__ int32_t end_key(int row) const {
    return static_cast<int32_t>(
        min(static_cast<int64_t>(seqlen_k), static_cast<int64_t>(row) + upper + 1));
  }

  // First and one-past-last query that sees key `key`. Not clipped to the queries' end: rows past
  // it are zero in shared memory and add nothing.
  __device__ __forceinline__ int32_t first_row(int key) const { return key - upper; }
  __device__ __forceinline__ int32_t end_row(int key) const {
    if (key >= seqlen_k) return 0;
    return static_cast<int32_t>(
        min(static_cast<int64_t>(INT32_MAX), static_cast<int64_t>(key) - lower + 1));
  }
};

}  // namespace flashattn_ext
