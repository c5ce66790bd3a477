// The order of tiles, on the host: every tile once, groups that fit the L2, the longest tiles
// first.
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

// Whole groups, a last group that is smaller, single heads and blocks, operands larger than a
// group.
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
      for (int64_t cta = 0; cta < order.num_tiles(); ++cta) {
        const TileOrder::Tile tile = order.tile(cta);
        check(tile.block >= 0 && tile.block < c.num_blocks && tile.head >= 0 &&
                  tile.head < c.num_heads,
              "cta %d of %d x %d got block %d, head %d", static_cast<int>(cta), c.num_blocks,
              c.num_heads, tile.block, tile.head);
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
      int64_t cta = 0;
      for (int32_t first = 0; first < c.num_heads; first += order.heads_per_group) {
        const int32_t end = std::min(first + order.heads_per_group, c.num_heads);
        for (int32_t rank = 0; rank < c.num_blocks; ++rank)
          for (int32_t head = first; head < end; ++head) {
            const TileOrder::Tile tile = order.tile(cta);
            const int32_t block = descending ? c.num_blocks - 1 - rank : rank;
            check(tile.block == block && tile.head == head,
                  "cta %d: got block %d of head %d, wanted block %d of head %d",
                  static_cast<int>(cta), tile.block, tile.head, block, head);
            ++cta;
          }
      }
      check(cta == order.num_tiles(), "the groups hold %d tiles", static_cast<int>(cta));
    }
});

const HostTest group_size("tile_order.groups_fit_the_l2", [] {
  for (const OrderCase& c : kCases) {
    const TileOrder order =
        make_tile_order(c.num_blocks, c.num_heads, c.heads_per_unit, c.bytes_per_unit, false);
    const int64_t units = order.heads_per_group / c.heads_per_unit;
    check(order.heads_per_group % c.heads_per_unit == 0 && units >= 1,
          "%d heads per group split units of %d", order.heads_per_group, c.heads_per_unit);
    check(units == 1 || units * c.bytes_per_unit <= kL2GroupBytes, "%d units of %lld bytes",
          static_cast<int>(units), static_cast<long long>(c.bytes_per_unit));
    const bool all = order.heads_per_group >= c.num_heads;
    check(all || (units + 1) * c.bytes_per_unit > kL2GroupBytes,
          "%d units of %lld bytes leave room for one more", static_cast<int>(units),
          static_cast<long long>(c.bytes_per_unit));
  }
});

// More tiles than 32 bits count: the index is split in 64 bits.
const HostTest large("tile_order.more_than_2_to_32_tiles", [] {
  const TileOrder order = make_tile_order(1 << 20, 1 << 13, 8, kL2GroupBytes / 4, true);
  check(order.heads_per_group == 32, "%d heads per group, wanted 32", order.heads_per_group);
  check(order.num_tiles() == int64_t{1} << 33, "%lld tiles",
        static_cast<long long>(order.num_tiles()));
  const TileOrder::Tile first = order.tile(0), last = order.tile(order.num_tiles() - 1);
  check(first.block == (1 << 20) - 1 && first.head == 0, "first: block %d of head %d", first.block,
        first.head);
  check(last.block == 0 && last.head == (1 << 13) - 1, "last: block %d of head %d", last.block,
        last.head);
});

}  // namespace
}  // namespace flashattn_ext::testing
