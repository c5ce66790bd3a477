// What tests/emulated.py calls: the portable kernels with a tile of the caller's choice.
#include <cstring>
#include <iterator>

#include "sm80/launch.h"
#include "sm80/tiles.h"
#include "smxx/kernels.h"

namespace flashattn_ext {
namespace {

// Calls f(row) where the table has that row; whether it has.
template <typename Tile, size_t kRows, typename F>
bool with_row(const Tile (&table)[kRows], int row, const F& f) {
  if (row < 0 || row >= static_cast<int>(kRows)) return false;
  f(table[row]);
  return true;
}

// Calls f(row of the kernel's table, its launch).
template <typename F>
bool with_tile(const char* kernel, int row, const F& f) {
  if (!std::strcmp(kernel, "fwd"))
    return with_row(sm80::kFwdTiles, row, [&](const auto& tile) { f(tile, sm80::run_fwd); });
  if (!std::strcmp(kernel, "bwd_dq"))
    return with_row(sm80::kBwdDqTiles, row, [&](const auto& tile) { f(tile, sm80::run_bwd_dq); });
  if (!std::strcmp(kernel, "bwd_dkv"))
    return with_row(sm80::kBwdDkvTiles, row, [&](const auto& tile) { f(tile, sm80::run_bwd_dkv); });
  return false;
}

}  // namespace
}  // namespace flashattn_ext

using namespace flashattn_ext;

extern "C" int params_bytes() { return sizeof(BwdParams); }

// {bucket, block_m, block_n, num_warps, stages} of a row; false where there is none.
extern "C" bool tile_of(const char* kernel, int row, int32_t* numbers) {
  return with_tile(kernel, row, [&](const auto& tile, const auto&) {
    const int32_t values[] = {tile.bucket, tile.block_m, tile.block_n, tile.num_warps, tile.stages};
    std::copy(std::begin(values), std::end(values), numbers);
  });
}

extern "C" bool launch(const char* kernel, int row, const BwdParams* params) {
  return with_tile(kernel, row,
                   [&](const auto& tile, const auto& run) { run(*params, tile, nullptr); });
}

extern "C" void launch_delta(const BwdParams* params) { smxx::run_bwd_delta(*params, nullptr); }
