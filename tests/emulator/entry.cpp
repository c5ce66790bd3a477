// What tests/emulated.py calls: kernels with a tile of the caller's choice.
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <vector>

#include "sm80/launch.h"
#include "sm80/tiles.h"
#include "sm90/bwd_dq_buffer.h"
#include "sm90/launch.h"
#include "smxx/kernels.h"

namespace flashattn_ext {
namespace {

// That of Dv, where the table has one of its own.
template <typename Tile>
auto bucket_v(const Tile& tile, int) -> decltype(tile.bucket_v) {
  return tile.bucket_v;
}
template <typename Tile>
int32_t bucket_v(const Tile& tile, long) {
  return tile.bucket;
}

cudaError_t run_fwd_sm90(const FwdParams& params, const sm90::FwdTile& tile, cudaStream_t) {
  int32_t counter = 99;  // the launch sets it
  return sm90::run_fwd(params, tile, {2, &counter}, nullptr);
}

cudaError_t run_bwd_fused(const BwdParams& params, const sm90::BwdFusedTile& tile, cudaStream_t) {
  const sm90::BwdDqBuffer buffer(params.cu_seqlens_q != nullptr, params.batch, params.seqlen_q,
                                 params.total_q, tile.block_m, tile.bucket);
  const int64_t dq_floats = buffer.bytes(params.num_heads_q) / 4;
  // The launch clears what has to be zero.
  std::vector<float> workspace(
      dq_floats + buffer.counter_bytes(params.num_heads_q, tile.in_order) / 4, NAN);
  auto* counters = reinterpret_cast<uint32_t*>(workspace.data() + dq_floats);
  return sm90::run_bwd_fused(params, tile, {2, workspace.data(), counters}, nullptr);
}

// Calls f(row) where the table has that row; whether it has.
template <typename Tile, size_t kRows, typename Run, typename F>
bool with_row(const Tile (&table)[kRows], int row, const Run& run, const F& f) {
  if (row < 0 || row >= static_cast<int>(kRows)) return false;
  f(table[row], run);
  return true;
}

// Calls f(row of the kernel's table, its launch).
template <typename F>
bool with_tile(const char* kernel, int row, const F& f) {
  const auto is = [&](const char* name) { return !std::strcmp(kernel, name); };
  if (is("sm80.fwd")) return with_row(sm80::kFwdTiles, row, sm80::run_fwd, f);
  if (is("sm80.bwd_dq")) return with_row(sm80::kBwdDqTiles, row, sm80::run_bwd_dq, f);
  if (is("sm80.bwd_dkv")) return with_row(sm80::kBwdDkvTiles, row, sm80::run_bwd_dkv, f);
  if (is("sm90.fwd")) return with_row(sm90::kFwdTiles, row, run_fwd_sm90, f);
  if (is("sm90.bwd_dq")) return with_row(sm90::kBwdDqTiles, row, sm90::run_bwd_dq, f);
  if (is("sm90.bwd_dkv")) return with_row(sm90::kBwdDkvTiles, row, sm90::run_bwd_dkv, f);
  if (is("sm90.bwd_fused")) return with_row(sm90::kBwdFusedTiles, row, run_bwd_fused, f);
  return false;
}

}  // namespace
}  // namespace flashattn_ext

using namespace flashattn_ext;

extern "C" int params_bytes() { return sizeof(BwdParams); }

// {bucket, that of Dv, block_m, block_n} of a row; false where there is none.
extern "C" bool tile_of(const char* kernel, int row, int32_t* numbers) {
  return with_tile(kernel, row, [&](const auto& tile, const auto&) {
    using Tile = std::decay_t<decltype(tile)>;  // Br and Bc: members, or computed
    const int32_t values[] = {tile.bucket, bucket_v(tile, 0), std::invoke(&Tile::block_m, tile),
                              std::invoke(&Tile::block_n, tile)};
    std::copy(std::begin(values), std::end(values), numbers);
  });
}

extern "C" bool launch(const char* kernel, int row, const BwdParams* params) {
  return with_tile(kernel, row, [&](const auto& tile, const auto& run) {
    if (run(*params, tile, nullptr) != cudaSuccess) emulator::fail("a launch failed");
  });
}

extern "C" void launch_delta(const BwdParams* params) { smxx::run_bwd_delta(*params, nullptr); }
