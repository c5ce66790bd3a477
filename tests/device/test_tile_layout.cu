// The swizzle on the host, and the fragment addresses that are computed from it on the device.
#include <set>

#include "fragment_io.cuh"
#include "harness.h"
#include "tile/fragment.cuh"
#include "tile/gmem_copy.cuh"

namespace flashattn_ext::testing {
namespace {

// ---- Swizzle ----

// 16-byte accesses of a warp are served eight lanes at a time: eight addresses are free of bank
// conflicts when they fall into the eight different 16-byte groups of a 128-byte line of banks.
void check_conflict_free(const std::vector<uint32_t>& offsets, const char* access, int row,
                         int piece) {
  std::set<uint32_t> groups;
  for (const uint32_t offset : offsets) groups.insert(offset / 16 % 8);
  check(groups.size() == 8, "%s at row %d, piece %d: only %zu of 8 bank groups", access, row, piece,
        groups.size());
}

constexpr int kRows = 64;

template <int kCols>
void test_swizzle() {
  using Layout = tile::SmemLayout<kCols>;
  constexpr int kPieces = Layout::kPiecesPerRow;

  // Every 16 bytes of the tile are some piece's, and no row leaves its own pitch.
  std::set<uint32_t> offsets;
  for (int row = 0; row < kRows; ++row)
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint32_t offset = Layout::offset_bytes(row, piece);
      check(offset % 16 == 0 && offset / (2 * kCols) == static_cast<uint32_t>(row),
            "piece %d of row %d is at byte %u", piece, row, offset);
      offsets.insert(offset);
    }
  check(offsets.size() == size_t{kRows} * kPieces, "%zu places for %d pieces", offsets.size(),
        kRows * kPieces);
  check(Layout::tile_bytes(kRows) == 2u * kRows * kCols, "a tile takes %u bytes",
        Layout::tile_bytes(kRows));

  // The rows of one 8x8 matrix: ldmatrix, and the 4-byte stores of an accumulator tile.
  for (int row = 0; row < kRows; row += 8)
    for (int piece = 0; piece < kPieces; ++piece) {
      std::vector<uint32_t> matrix;
      for (int i = 0; i < 8; ++i) matrix.push_back(Layout::offset_bytes(row + i, piece));
      check_conflict_free(matrix, "a matrix", row, piece);
    }
  // Eight neighbouring lanes of a copy: pieces in the order of the rows.
  for (int first = 0; first < kRows * kPieces; first += 8) {
    std::vector<uint32_t> copy;
    for (int i = first; i < first + 8; ++i) {
      copy.push_back(Layout::offset_bytes(i / kPieces, i % kPieces));
    }
    check_conflict_free(copy, "a copy", first / kPieces, first % kPieces);
  }
}

const HostTest swizzle_32("tile.swizzle.32", test_swizzle<32>);
const HostTest swizzle_64("tile.swizzle.64", test_swizzle<64>);
const HostTest swizzle_96("tile.swizzle.96", test_swizzle<96>);
const HostTest swizzle_128("tile.swizzle.128", test_swizzle<128>);
const HostTest swizzle_192("tile.swizzle.192", test_swizzle<192>);
const HostTest swizzle_256("tile.swizzle.256", test_swizzle<256>);

const HostTest power_of_two("tile.floor_power_of_two", [] {
  for (int x = 1; x <= 1025; ++x) {
    const int power = tile::floor_power_of_two(x);
    check((power & (power - 1)) == 0 && power <= x && 2 * power > x, "of %d: got %d", x, power);
  }
});

// ---- Operand addresses ----

// A base like any tile's: a multiple of 128 bytes.
constexpr uint32_t kTileAddress = 128 * 37;
constexpr int kRowSteps = 8;  // block rows 0, 8, ... 56

// Addresses only: nothing is read. Index ((row / 8) * kCols / 16 + col16) * 32 + lane.
template <int kCols>
__global__ void operand_kernel(uint32_t* rows_first, uint32_t* cols_first) {
  const int lane = threadIdx.x;
  const auto a = tile::Operand<kCols>::rows_first(kTileAddress, lane);
  const auto b = tile::Operand<kCols>::cols_first(kTileAddress, lane);
  for (int step = 0; step < kRowSteps; ++step)
    for (int col16 = 0; col16 < kCols / 16; ++col16) {
      const int index = (step * (kCols / 16) + col16) * 32 + lane;
      rows_first[index] = a.at(8 * step, col16);
      cols_first[index] = b.at(8 * step, col16);
    }
}

// Lane l supplies row l % 8 of matrix l / 8. rows_first: matrices 1 and 3 are eight rows further
// down, 2 and 3 eight columns to the right; cols_first: the other way round.
template <int kCols>
void test_operand() {
  const size_t count = size_t{kRowSteps} * (kCols / 16) * 32;
  std::vector<uint32_t> rows_first(count), cols_first(count);
  for (size_t i = 0; i < count; ++i) {
    const int lane = i % 32, col16 = i / 32 % (kCols / 16), row = 8 * (i / 32 / (kCols / 16));
    const int matrix = lane / 8, in_matrix = lane % 8;
    const auto address = [&](int down, int right) {
      return kTileAddress +
             tile::SmemLayout<kCols>::offset_bytes(row + 8 * down + in_matrix, 2 * col16 + right);
    };
    rows_first[i] = address(matrix % 2, matrix / 2);
    cols_first[i] = address(matrix / 2, matrix % 2);
  }
  DeviceBuffer<uint32_t> gRowsFirst(count), gColsFirst(count);
  launch({}, operand_kernel<kCols>, gRowsFirst.data(), gColsFirst.data());
  check_equal(gRowsFirst.to_host(), rows_first, 32, "rows_first address (block, lane)");
  check_equal(gColsFirst.to_host(), cols_first, 32, "cols_first address (block, lane)");
}

const DeviceTest operand_32("tile.operand.32", test_operand<32>);
const DeviceTest operand_64("tile.operand.64", test_operand<64>);
const DeviceTest operand_96("tile.operand.96", test_operand<96>);
const DeviceTest operand_128("tile.operand.128", test_operand<128>);
const DeviceTest operand_192("tile.operand.192", test_operand<192>);
const DeviceTest operand_256("tile.operand.256", test_operand<256>);

// ---- Accumulators ----

constexpr int kMTiles = 2, kNTiles = 4;

__global__ void accumulator_kernel(int* index, float* doubled, float* cleared) {
  const int lane = threadIdx.x;
  for (int e = 0; e < 4; ++e) {
    index[4 * lane + e] = tile::acc_row(lane, e) * 8 + tile::acc_col(lane, e);
  }
  float acc[kMTiles][kNTiles][4];
  read_fragment(acc, doubled);
  tile::transform(acc, [](float x) { return 2.0f * x; });
  write_fragment(acc, doubled);
  tile::clear(acc);
  write_fragment(acc, cleared);
}

const DeviceTest accumulator("tile.accumulator", [] {
  constexpr int kCols = 8 * kNTiles, kSize = 16 * kMTiles * kCols;
  const auto values = random_integers<float>(kSize, -100, 100, 1);
  DeviceBuffer<int> index(32 * 4);
  DeviceBuffer<float> doubled(values), cleared(kSize);
  launch({}, accumulator_kernel, index.data(), doubled.data(), cleared.data());
  std::vector<int> expected;
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 4; ++e) expected.push_back(fragment_index<1>(lane, 0, 0, e));
  check_equal(index.to_host(), expected, 4, "8 * row + column of (lane, element)");
  std::vector<float> twice = values;
  for (float& x : twice) x *= 2.0f;
  check_equal(doubled.to_host(), twice, kCols, "transformed accumulator");
  check_equal(cleared.to_host(), std::vector<float>(kSize, 0.0f), kCols, "cleared accumulator");
});

// ---- Quads ----

__global__ void transpose_quad_kernel(uint32_t* words) {
  const int lane = threadIdx.x;
  uint32_t x[4];
  for (int j = 0; j < 4; ++j) x[j] = words[4 * lane + j];
  tile::transpose_quad(x, lane);
  for (int j = 0; j < 4; ++j) words[4 * lane + j] = x[j];
}

// Word j of lane t of a quad is then what word t of its lane j was.
const DeviceTest transpose_quad("tile.transpose_quad", [] {
  std::vector<uint32_t> words(32 * 4), expected(32 * 4);
  for (int quad = 0; quad < 8; ++quad)
    for (int t = 0; t < 4; ++t)
      for (int j = 0; j < 4; ++j) {
        const uint32_t id = 100 * quad + 10 * t + j;
        words[4 * (4 * quad + t) + j] = id;
        expected[4 * (4 * quad + j) + t] = id;
      }
  const DeviceBuffer<uint32_t> gWords(words);
  launch({}, transpose_quad_kernel, gWords.data());
  check_equal(gWords.to_host(), expected, 4, "word of (lane, index)");
});

}  // namespace
}  // namespace flashattn_ext::testing
