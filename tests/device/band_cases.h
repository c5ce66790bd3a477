// Band problems for the tests of masks and block ranges, and what is visible in them, computed in
// 64 bits from the definition: query i sees key j when -window_left <= j - (i + off) <=
// window_right.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "attention/params.h"

namespace flashattn_ext::testing {

struct BandProblem {
  int32_t seqlen_q, seqlen_k;
  int32_t window_left, window_right;
  bool top_left;

  int64_t off() const { return top_left ? 0 : int64_t{seqlen_k} - seqlen_q; }
  bool in_window(int64_t i, int64_t j) const {
    const int64_t r = j - (i + off());
    return r >= -int64_t{window_left} && r <= window_right;
  }
  bool visible(int64_t i, int64_t j) const {
    return i < seqlen_q && j < seqlen_k && in_window(i, j);
  }
  std::string text() const {
    char line[128];
    std::snprintf(line, sizeof(line), "seqlens %d, %d, window (%d, %d)%s", seqlen_q, seqlen_k,
                  window_left, window_right, top_left ? ", top left" : "");
    return line;
  }
};

// Half-open; all empty intervals are equal.
struct Interval {
  int64_t begin, end;
  bool empty() const { return end <= begin; }
  bool operator==(const Interval& other) const {
    return (empty() && other.empty()) || (begin == other.begin && end == other.end);
  }
};

// First row or column of the block (of `block`) that holds `at`, or of the nearest one there is.
inline int32_t block_start(int64_t at, int32_t seqlen, int32_t block) {
  const int64_t inside = std::max<int64_t>(0, std::min<int64_t>(at, seqlen - 1));
  return static_cast<int32_t>(inside / block * block);
}

// Every problem of these lengths and windows, aligned both ways.
inline std::vector<BandProblem> make_problems(const std::vector<int32_t>& seqlens,
                                              const std::vector<int32_t>& windows) {
  std::vector<BandProblem> problems;
  for (const int32_t seqlen_q : seqlens)
    for (const int32_t seqlen_k : seqlens)
      for (const int32_t left : windows)
        for (const int32_t right : windows)
          for (const bool top_left : {false, true})
            problems.push_back({seqlen_q, seqlen_k, left, right, top_left});
  return problems;
}

inline std::vector<BandProblem> small_problems() {
  return make_problems({1, 5, 16, 45}, {0, 1, 7, 44, kUnlimited});
}

// The longest sequences and the widest windows that the plan admits.
inline std::vector<BandProblem> extreme_problems() {
  constexpr int32_t kLongest = (1 << 30) - 1;
  return make_problems({1, 1000, kLongest - 1, kLongest}, {0, 1, 1 << 20, kLongest, kUnlimited});
}

}  // namespace flashattn_ext::testing
