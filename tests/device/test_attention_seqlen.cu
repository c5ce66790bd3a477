// Lengths and offsets of a sequence, with lengths on the device that are right, odd and wrong.
#include <climits>

#include "attention/seqlen_info.cuh"
#include "harness.h"

namespace flashattn_ext::testing {
namespace {

struct Side {
  int64_t start;
  int32_t length;
};

enum class Which { kQuery, kKey };

__global__ void side_kernel(FwdParams params, Which which, Side* sides) {
  const int batch_idx = threadIdx.x;
  const SeqlenSide side =
      which == Which::kQuery ? query_side(params, batch_idx) : key_side(params, batch_idx);
  sides[batch_idx] = {side.start, side.length};
}

// Without cu_seqlens the layout is dense, without seqused every sequence is used to its end.
struct SideInput {
  int32_t batch;
  int32_t max_seqlen;
  int64_t total;
  std::vector<int32_t> cu_seqlens, seqused;
};

std::vector<Side> sides_on_device(const SideInput& input, Which which) {
  const DeviceBuffer<int32_t> cu_seqlens(input.cu_seqlens), seqused(input.seqused);
  const int32_t* cu_seqlens_ptr = input.cu_seqlens.empty() ? nullptr : cu_seqlens.data();
  const int32_t* seqused_ptr = input.seqused.empty() ? nullptr : seqused.data();
  FwdParams params;  // the other side keeps its zeros
  if (which == Which::kQuery) {
    params.seqlen_q = input.max_seqlen;
    params.total_q = input.total;
    params.cu_seqlens_q = cu_seqlens_ptr;
    params.seqused_q = seqused_ptr;
  } else {
    params.seqlen_k = input.max_seqlen;
    params.total_k = input.total;
    params.cu_seqlens_k = cu_seqlens_ptr;
    params.seqused_k = seqused_ptr;
  }
  DeviceBuffer<Side> sides(input.batch);
  launch({1, input.batch}, side_kernel, params, which, sides.data());
  return sides.to_host();
}

void check_sides(const char* what, const SideInput& input, const std::vector<Side>& expected) {
  for (const Which which : {Which::kQuery, Which::kKey}) {
    const std::vector<Side> actual = sides_on_device(input, which);
    for (int32_t b = 0; b < input.batch; ++b) {
      check(actual[b].start == expected[b].start && actual[b].length == expected[b].length,
            "%s, sequence %d of the %s: got start %lld, length %d, wanted %lld and %d", what, b,
            which == Which::kQuery ? "queries" : "keys", static_cast<long long>(actual[b].start),
            actual[b].length, static_cast<long long>(expected[b].start), expected[b].length);
    }
  }
}

const DeviceTest dense("seqlen.dense", [] {
  check_sides("dense", {3, 100, 300, {}, {}}, {{0, 100}, {0, 100}, {0, 100}});
  check_sides("dense with seqused", {3, 100, 300, {}, {40, 0, 100}}, {{0, 40}, {0, 0}, {0, 100}});
});

const DeviceTest varlen("seqlen.varlen", [] {
  const std::vector<int32_t> cu_seqlens = {0, 5, 5, 37, 40};
  check_sides("varlen", {4, 32, 40, cu_seqlens, {}}, {{0, 5}, {5, 0}, {5, 32}, {37, 3}});
  check_sides("varlen with a tail nobody owns", {4, 32, 64, cu_seqlens, {}},
              {{0, 5}, {5, 0}, {5, 32}, {37, 3}});
  check_sides("varlen with seqused", {4, 32, 40, cu_seqlens, {5, 0, 7, 1}},
              {{0, 5}, {5, 0}, {5, 7}, {37, 1}});
});

const DeviceTest wrong_values("seqlen.wrong_values_are_clamped", [] {
  check_sides("sequences longer than max_seqlen", {2, 10, 100, {0, 50, 100}, {}},
              {{0, 10}, {50, 10}});
  check_sides("cu_seqlens past the tensor", {3, 80, 100, {0, 60, 130, 190}, {}},
              {{0, 60}, {60, 40}, {100, 0}});
  check_sides("cu_seqlens that decrease", {2, 100, 100, {70, 20, 90}, {}}, {{70, 0}, {20, 70}});
  check_sides("cu_seqlens below zero", {2, 100, 100, {-30, 40, -1}, {}}, {{0, 40}, {40, 0}});
  check_sides("cu_seqlens at the ends of int32", {2, 100, 100, {INT_MIN, INT_MAX, INT_MIN}, {}},
              {{0, 100}, {100, 0}});
  check_sides("seqused outside of the sequence", {3, 50, 100, {0, 30, 60, 100}, {31, -1, INT_MAX}},
              {{0, 30}, {30, 0}, {60, 40}});
  check_sides("seqused at the ends of int32", {2, 50, 100, {}, {INT_MIN, INT_MAX}},
              {{0, 0}, {0, 50}});
});

// Whatever the lengths hold, rows [start, start + length) lie inside the tensor.
const DeviceTest random_values("seqlen.random_values_stay_inside", [] {
  constexpr int32_t kBatch = 1000, kMaxSeqlen = 70;
  constexpr int64_t kTotal = 500;
  const SideInput input = {kBatch, kMaxSeqlen, kTotal,
                           random_integers<int32_t>(kBatch + 1, -200, 700, 1),
                           random_integers<int32_t>(kBatch, -20, 100, 2)};
  for (const Which which : {Which::kQuery, Which::kKey})
    for (const Side& side : sides_on_device(input, which)) {
      check(side.start >= 0 && side.length >= 0 && side.length <= kMaxSeqlen &&
                side.start + side.length <= kTotal,
            "start %lld, length %d of %lld rows", static_cast<long long>(side.start), side.length,
            static_cast<long long>(kTotal));
    }
});

// ---- head_ptr ----

__global__ void head_ptr_kernel(Strides strides, int batch_idx, int64_t start, int head_idx,
                                int64_t* offset) {
  // Addresses only: nothing is read.
  uint16_t* const base = reinterpret_cast<uint16_t*>(uintptr_t{1} << 40);
  *offset = head_ptr(base, strides, batch_idx, start, head_idx) - base;
}

const DeviceTest head_pointer("seqlen.head_ptr_counts_in_64_bits", [] {
  Strides strides;
  strides.batch = (int64_t{1} << 31) + 8;
  strides.row = (int64_t{1} << 20) + 16;
  strides.head = int64_t{1} << 32;
  DeviceBuffer<int64_t> offset(1);
  launch({1, 1}, head_ptr_kernel, strides, 3, int64_t{70000}, 5, offset.data());
  const int64_t expected = 3 * strides.batch + 70000 * strides.row + 5 * strides.head;
  check(offset.to_host()[0] == expected, "offset %lld, wanted %lld",
        static_cast<long long>(offset.to_host()[0]), static_cast<long long>(expected));
});

}  // namespace
}  // namespace flashattn_ext::testing
