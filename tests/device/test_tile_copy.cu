// TileLoader and store_rows: full tiles, tails, and what lies outside of the valid part.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "fragment_io.cuh"
#include "harness.h"
#include "tile/gmem_copy.cuh"

namespace flashattn_ext::testing {
namespace {

constexpr uint16_t kPoison = 0xffff;  // NaN in fp16 and in bf16

struct Valid {
  int rows, cols;
};

// ---- TileLoader ----

constexpr int kGuardRows = 8;  // of poison behind the tile, which must stay

template <int kRows, int kCols, int kNumThreads>
__global__ void loader_kernel(const uint16_t* source, int64_t row_stride, Valid valid,
                              uint16_t* result) {
  extern __shared__ __align__(128) unsigned char smem[];
  uint16_t* tile = reinterpret_cast<uint16_t*>(smem);
  constexpr int kSize = (kRows + kGuardRows) * kCols;
  for (int i = threadIdx.x; i < kSize; i += kNumThreads) tile[i] = kPoison;
  __syncthreads();  // the fill is over before the copies start
  const tile::TileLoader<kRows, kCols, kNumThreads> loader(threadIdx.x, valid.cols);
  loader.load(ptx::smem_address(tile), source, row_stride, valid.rows);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // everybody's copies have landed
  for (int i = threadIdx.x; i < kSize; i += kNumThreads) {
    result[i] = tile[tile_index<kCols>(i / kCols, i % kCols)];
  }
}

// Everything in global memory but the valid part is NaN; the tile must hold zeros there. A stride
// of 0 repeats one row, as an expanded tensor does.
template <int kRows, int kCols, int kNumThreads>
void check_loader(int64_t row_stride, Valid valid) {
  const int source_rows = row_stride == 0 ? 1 : kRows;
  std::vector<uint16_t> source(source_rows * row_stride + kCols, kPoison);
  std::vector<uint16_t> expected(kRows * kCols, 0);
  expected.resize((kRows + kGuardRows) * kCols, kPoison);
  for (int row = 0; row < std::min(valid.rows, kRows); ++row)
    for (int col = 0; col < std::min(valid.cols, kCols); ++col) {
      const int source_row = row_stride == 0 ? 0 : row;
      const uint16_t x = static_cast<uint16_t>(1 + source_row * kCols + col);
      source[source_row * row_stride + col] = x;
      expected[row * kCols + col] = x;
    }
  const DeviceBuffer<uint16_t> gSource(source);
  DeviceBuffer<uint16_t> result(expected.size());
  launch({1, kNumThreads, static_cast<int>(2 * expected.size())},
         loader_kernel<kRows, kCols, kNumThreads>, gSource.data(), row_stride, valid,
         result.data());
  char what[128];
  std::snprintf(what, sizeof(what), "%dx%d tile of %d threads, %d valid rows, %d valid columns",
                kRows, kCols, kNumThreads, valid.rows, valid.cols);
  check_equal(result.to_host(), expected, kCols, what);
}

template <int kRows, int kCols, int kNumThreads>
void check_loader_tails() {
  for (const int rows : {kRows, kRows + 100, kRows - 1, 17, 1, 0, -5})
    for (const int cols : {kCols, kCols - 8, 8}) {
      check_loader<kRows, kCols, kNumThreads>(kCols + 24, {rows, cols});
    }
  check_loader<kRows, kCols, kNumThreads>(0, {kRows, kCols});
}

template <int kCols>
void test_loader() {
  check_loader_tails<32, kCols, 128>();
  check_loader_tails<64, kCols, 128>();
  check_loader_tails<64, kCols, 256>();
  check_loader_tails<128, kCols, 128>();
}

const DeviceTest loader_32("tile.loader.32", test_loader<32>);
const DeviceTest loader_64("tile.loader.64", test_loader<64>);
const DeviceTest loader_96("tile.loader.96", test_loader<96>);
const DeviceTest loader_128("tile.loader.128", test_loader<128>);
const DeviceTest loader_192("tile.loader.192", test_loader<192>);
const DeviceTest loader_256("tile.loader.256", test_loader<256>);

// ---- store_rows ----

constexpr int kNumWarps = 2;

template <typename Element, int kMTiles, int kCols, bool kOneFactor>
__global__ void store_kernel(const float* matrix, const float* factors, Element* result,
                             int64_t row_stride, Valid valid) {
  extern __shared__ __align__(128) unsigned char smem[];
  const int lane = threadIdx.x % 32, warp_row = 16 * kMTiles * (threadIdx.x / 32);
  float acc[kMTiles][kCols / 8][4], factor[kMTiles][2];
  read_fragment(acc, matrix + warp_row * kCols);
  for (int m = 0; m < kMTiles; ++m)
    for (int half = 0; half < 2; ++half)
      factor[m][half] = factors[warp_row + 16 * m + lane / 4 + 8 * half];
  const uint32_t smem_rows =
      ptx::smem_address(smem) + warp_row * tile::SmemLayout<kCols>::kPitchBytes;
  Element* warp_result = result + warp_row * row_stride;
  const int valid_rows = valid.rows - warp_row;
  if constexpr (kOneFactor) {
    tile::store_rows<Element, kMTiles, kCols>(acc, factors[0], smem_rows, warp_result, row_stride,
                                              valid_rows, valid.cols, lane);
  } else {
    tile::store_rows<Element, kMTiles, kCols>(acc, factor, smem_rows, warp_result, row_stride,
                                              valid_rows, valid.cols, lane);
  }
}

// Products in fp32, rounded once; outside of the valid part nothing is written.
template <typename Element, int kMTiles, int kCols, bool kOneFactor = false>
void check_store(Valid valid) {
  constexpr int kRows = 16 * kMTiles * kNumWarps;
  constexpr int kRowStride = kCols + 24;
  const auto matrix = random_integers<float>(kRows * kCols, -1000, 1000, 1);
  std::vector<float> factors = random_integers<float>(kRows, 1, 100, 2);
  for (float& factor : factors) factor = (kOneFactor ? 42.0f : factor) / 64.0f;
  std::vector<uint16_t> expected(kRows * kRowStride, kPoison);
  for (int row = 0; row < std::min(valid.rows, kRows); ++row)
    for (int col = 0; col < valid.cols; ++col) {
      const Element x = static_cast<Element>(matrix[row * kCols + col] * factors[row]);
      std::memcpy(&expected[row * kRowStride + col], &x, sizeof(x));
    }
  const DeviceBuffer<float> gMatrix(matrix), gFactors(factors);
  DeviceBuffer<uint16_t> result(expected.size());
  launch({1, 32 * kNumWarps, 2 * kRows * kCols}, store_kernel<Element, kMTiles, kCols, kOneFactor>,
         gMatrix.data(), gFactors.data(), reinterpret_cast<Element*>(result.data()),
         int64_t{kRowStride}, valid);
  char what[128];
  std::snprintf(what, sizeof(what), "%dx%d rows, %d valid rows, %d valid columns, bits", kRows,
                kCols, valid.rows, valid.cols);
  check_equal(result.to_host(), expected, kRowStride, what);
}

template <typename Element, int kMTiles, int kCols>
void check_store_tails() {
  constexpr int kRows = 16 * kMTiles * kNumWarps;
  for (const int rows : {kRows, kRows + 100, kRows - 1, 9, 1, 0})
    for (const int cols : {kCols, kCols - 8, 8}) {
      check_store<Element, kMTiles, kCols>({rows, cols});
    }
}

template <int kCols>
void test_store() {
  check_store_tails<__half, 1, kCols>();
  check_store_tails<__nv_bfloat16, kCols <= 128 ? 2 : 1, kCols>();
}

const DeviceTest one_factor("tile.store_rows.one_factor",
                            [] { check_store<__half, 2, 64, true>({50, 56}); });
const DeviceTest store_32("tile.store_rows.32", test_store<32>);
const DeviceTest store_64("tile.store_rows.64", test_store<64>);
const DeviceTest store_96("tile.store_rows.96", test_store<96>);
const DeviceTest store_128("tile.store_rows.128", test_store<128>);
const DeviceTest store_192("tile.store_rows.192", test_store<192>);
const DeviceTest store_256("tile.store_rows.256", test_store<256>);

}  // namespace
}  // namespace flashattn_ext::testing
