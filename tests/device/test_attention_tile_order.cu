// The order of tiles, on the host: every tile once, groups that fit the L2 and are of one size
// where that costs little, the longest tiles first.
#include <set>
#include <utility>

#include "attention/tile_order.h"
#include "harness.h"

namespace flashattn_ext::testing {
namespace {

struct OrderCase {
  int32_t num_blocks, num_heads, heads_per_unit;
  int64_t bytes_per_unit;
};

// Whole groups, a last group that is smaller, groups made smaller to be of one size, head counts of
// which no such size exists, single heads and blocks, operands larger than a group.
constexpr OrderCase kCases[] = {
    {1, 1, 1, 1000},
    {7, 1, 1, 1 << 20},
    {1, 9, 3, 1 << 20},
    {5, 12, 4, kL2GroupBytes},
    {5, 12, 4, kL2GroupBytes / 2},
    {4, 20, 4, kL2GroupBytes / 2},
    {6, 21, 3, kL2GroupBytes / 5},
    {3, 40, 8, 2 * kL2GroupBytes},
    {16, 64, 1, kL2GroupBytes / 7 + 1},
    {3, 24, 1, kL2GroupBytes / 10},
    {3, 24, 2, kL2GroupBytes / 5},
    {2, 14, 1, kL2GroupBytes / 8},
    {2, 11, 1, kL2GroupBytes / 10},
    {2, 26, 1, kL2GroupBytes / 12},
    {9, 30, 5, 0},
};

const HostTest once("tile_order.every_tile_once", [] {
  for (const OrderCase& c : kCases)
    for (const bool descending : {false, true}) {
      const TileOrder order = make_tile_order(c.num_blocks, c.num_heads, c.heads_per_unit,
                                              c.bytes_per_unit, descending);
      check(order.num_tiles() == int64_t{c.num_blocks} * c.num_heads, "%lld tiles for %d x %d",
            static_cast<long long>(order.num_tiles()), c.num_blocks, c.num_heads);
      std::set<std::pair<int32_t, int32_t>> seen;
      for (int32_t cta = 0; cta < order.num_tiles(); ++cta) {
        const TileOrder::Tile tile = order.tile(cta);
        check(tile.block >= 0 && tile.block < c.num_blocks && tile.head >= 0 &&
                  tile.head < c.num_heads,
              "cta %d of %d x %d got block %d, head %d", cta, c.num_blocks, c.num_heads, tile.block,
              tile.head);
        check(seen.emplace(tile.block, tile.head).second, "block %d of head %d came twice",
              tile.block, tile.head);
      }
    }
});

// A group is done before the next starts; in it every head takes its block before any head takes
// the next one; blocks go down when the work grows with the block index.
const HostTest sequence("tile_order.groups_then_blocks_then_heads", [] {
  for (const OrderCase& c : kCases)
    for (const bool descending : {false, true}) {
      const TileOrder order = make_tile_order(c.num_blocks, c.num_heads, c.heads_per_unit,
                                              c.bytes_per_unit, descending);
      int32_t cta = 0;
      for (int32_t first = 0; first < c.num_heads; first += order.heads_per_group) {
        const int32_t end = std::min(first + order.heads_per_group, c.num_heads);
        for (int32_t rank = 0; rank < c.num_blocks; ++rank)
          for (int32_t head = first; head < end; ++head) {
            const TileOrder::Tile tile = order.tile(cta);
            const int32_t block = descending ? c.num_blocks - 1 - rank : rank;
            check(tile.block == block && tile.head == head,
                  "cta %d: got block %d of head %d, wanted block %d of head %d", cta, tile.block,
                  tile.head, block, head);
            ++cta;
          }
      }
      check(cta == order.num_tiles(), "the groups hold %d tiles", cta);
    }
});

// Units per group: as many as fit, or, if not all do, the largest number of more than half as many
// that divides all of them.
const HostTest group_size("tile_order.groups_fit_the_l2", [] {
  for (const OrderCase& c : kCases) {
    const TileOrder order =
        make_tile_order(c.num_blocks, c.num_heads, c.heads_per_unit, c.bytes_per_unit, false);
    const int64_t units = order.heads_per_group / c.heads_per_unit;
    check(order.heads_per_group % c.heads_per_unit == 0 && units >= 1,
          "%d heads per group split units of %d", order.heads_per_group, c.heads_per_unit);
    const int64_t all_units = c.num_heads / c.heads_per_unit;
    int64_t fitting = 1;
    while (fitting < all_units && (fitting + 1) * c.bytes_per_unit <= kL2GroupBytes) ++fitting;
    int64_t wanted = fitting;
    for (int64_t even = fitting / 2 + 1; even <= fitting; ++even) {
      if (all_units % even == 0) wanted = even;
    }
    check(units == wanted, "%d units of which %d fit: %d per group, wanted %d",
          static_cast<int>(all_units), static_cast<int>(fitting), static_cast<int>(units),
          static_cast<int>(wanted));
  }
});

// The same by hand: one size where a divisor is more than half of what fits, else as many as fit.
const HostTest even_groups("tile_order.groups_of_one_size", [] {
  const struct {
    int32_t units, fitting, wanted;
  } cases[] = {{64, 6, 4},   {64, 9, 8},   {24, 10, 8},  {12, 5, 4},   {14, 8, 7}, {32, 32, 32},
               {32, 31, 16}, {11, 10, 10}, {26, 12, 12}, {10, 4, 4},   {6, 5, 3},  {7, 1, 1},
               {48, 20, 16}, {9, 8, 8},    {40, 15, 10}, {100, 26, 25}};
  for (const auto& c : cases)
    for (const int32_t heads_per_unit : {1, 4}) {
      const TileOrder order = make_tile_order(3, c.units * heads_per_unit, heads_per_unit,
                                              kL2GroupBytes / c.fitting, true);
      check(order.heads_per_group == c.wanted * heads_per_unit,
            "%d units of which %d fit: %d heads per group, wanted %d x %d", c.units, c.fitting,
            order.heads_per_group, c.wanted, heads_per_unit);
    }
});

// Nearly as many tiles as 31 bits count, in groups and in one group of all: no number on the way
// overflows.
const HostTest large("tile_order.nearly_2_to_31_tiles", [] {
  constexpr int32_t kBlocks = (1 << 18) - 1, kHeads = 1 << 13, kTiles = kBlocks * kHeads;
  for (const int64_t bytes : {kL2GroupBytes / 4, int64_t{0}}) {
    const TileOrder order = make_tile_order(kBlocks, kHeads, 8, bytes, true);
    const int32_t heads = bytes == 0 ? kHeads : 32, per_group = heads * kBlocks;
    check(order.heads_per_group == heads, "%d heads per group, wanted %d", order.heads_per_group,
          heads);
    check(order.num_tiles() == kTiles, "%lld tiles", static_cast<long long>(order.num_tiles()));
    const auto check_tile = [&](int32_t cta, int32_t block, int32_t head) {
      const TileOrder::Tile tile = order.tile(cta);
      check(tile.block == block && tile.head == head,
            "cta %d: got block %d of head %d, wanted block %d of head %d", cta, tile.block,
            tile.head, block, head);
    };
    check_tile(0, kBlocks - 1, 0);
    check_tile(heads - 1, kBlocks - 1, heads - 1);
    check_tile(heads, kBlocks - 2, 0);
    check_tile(kTiles - per_group, kBlocks - 1, kHeads - heads);
    check_tile(kTiles - 1, 0, kHeads - 1);
  }
});

// Over query blocks, a causal problem's heads share the L2 in groups and its blocks run from the
// longest; blocks of equal work go head by head, or rather by the heads that share K and V.
const HostTest queries("tile_order.of_query_blocks", [] {
  FwdParams params = {};
  params.batch = 3;
  params.num_heads_q = 16;
  params.num_heads_k = 4;
  params.head_dim = params.head_dim_v = 128;
  params.seqlen_q = 1000;
  params.seqlen_k = 4096;  // 2 MB of K and V for four query heads
  params.window_left = params.window_right = kUnlimited;
  const TileOrder full = make_query_tile_order(params, 128);
  check(full.num_blocks == 8 && full.num_heads == 48, "%d blocks of %d heads", full.num_blocks,
        full.num_heads);
  check(!full.descending && full.heads_per_group == 4, "equal work: %d heads per group",
        full.heads_per_group);
  params.window_right = 0;
  const TileOrder causal = make_query_tile_order(params, 128);
  check(causal.descending, "causal: the longest blocks do not come first");
  // 8 of 12 units fit, of which 6 are half of all.
  check(causal.heads_per_group == 6 * 4, "causal: %d heads per group", causal.heads_per_group);
});

}  // namespace
}  // namespace flashattn_ext::testing
