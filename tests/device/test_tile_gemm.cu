// Tile products of two warps on data whose sums are exact in fp32, compared with a plain loop.
#include "fragment_io.cuh"
#include "harness.h"
#include "ptx/shared.cuh"
#include "tile/warp_gemm.cuh"

namespace flashattn_ext::testing {
namespace {

constexpr int kNumWarps = 2;

// c (rows, cols) += x (rows, depth) * y (depth, cols)
std::vector<float> add_product(std::vector<float> c, const std::vector<float>& x,
                               const std::vector<float>& y, int depth, int cols) {
  const int rows = static_cast<int>(c.size()) / cols;
  for (int row = 0; row < rows; ++row)
    for (int k = 0; k < depth; ++k)
      for (int col = 0; col < cols; ++col)
        c[row * cols + col] += x[row * depth + k] * y[k * cols + col];
  return c;
}

// ---- gemm_xyt ----

template <typename Element, int kMTiles, int kNTiles, int kDepth>
__global__ void gemm_xyt_kernel(const Element* x, const Element* y, float* c) {
  constexpr int kRows = 16 * kMTiles * kNumWarps;
  extern __shared__ __align__(128) unsigned char smem[];
  Element* sX = reinterpret_cast<Element*>(smem);
  Element* sY = sX + kRows * kDepth;
  fill_tile<kDepth>(sX, x, kRows);
  fill_tile<kDepth>(sY, y, 8 * kNTiles);
  __syncthreads();  // both tiles are complete

  const int lane = threadIdx.x % 32, warp_row = 16 * kMTiles * (threadIdx.x / 32);
  float* warp_c = c + warp_row * 8 * kNTiles;
  float acc[kMTiles][kNTiles][4];
  read_fragment(acc, warp_c);
  const uint32_t warp_x = ptx::smem_address(sX) + warp_row * tile::SmemLayout<kDepth>::kPitchBytes;
  tile::gemm_xyt<Element>(acc, tile::Operand<kDepth>::rows_first(warp_x, lane),
                          tile::Operand<kDepth>::cols_first(ptx::smem_address(sY), lane));
  write_fragment(acc, warp_c);
}

template <typename Element, int kMTiles, int kNTiles, int kDepth>
void test_gemm_xyt() {
  constexpr int kRows = 16 * kMTiles * kNumWarps, kCols = 8 * kNTiles;
  const auto x = random_integers<Element>(kRows * kDepth, -4, 4, 1);
  const auto y = random_integers<Element>(kCols * kDepth, -4, 4, 2);
  const auto c = random_integers<float>(kRows * kCols, -50, 50, 3);
  const DeviceBuffer<Element> gX(x), gY(y);
  const DeviceBuffer<float> gC(c);
  launch({1, 32 * kNumWarps, static_cast<int>(2 * (kRows + kCols) * kDepth)},
         gemm_xyt_kernel<Element, kMTiles, kNTiles, kDepth>, gX.data(), gY.data(), gC.data());

  std::vector<float> y_transposed(y.size());
  for (int n = 0; n < kCols; ++n)
    for (int k = 0; k < kDepth; ++k)
      y_transposed[k * kCols + n] = static_cast<float>(y[n * kDepth + k]);
  check_equal(gC.to_host(), add_product(c, to_float(x), y_transposed, kDepth, kCols), kCols,
              kMTiles == 1 ? "X Y^T of one row tile" : "X Y^T of two row tiles");
}

template <typename Element, int kDepth>
void test_gemm_xyt_depth() {
  test_gemm_xyt<Element, 1, 8, kDepth>();
  test_gemm_xyt<Element, 2, 4, kDepth>();
}

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

const DeviceTest xyt_bf16_32("tile.gemm_xyt.bfloat16.32", test_gemm_xyt_depth<BFloat16, 32>);
const DeviceTest xyt_bf16_64("tile.gemm_xyt.bfloat16.64", test_gemm_xyt_depth<BFloat16, 64>);
const DeviceTest xyt_bf16_96("tile.gemm_xyt.bfloat16.96", test_gemm_xyt_depth<BFloat16, 96>);
const DeviceTest xyt_bf16_128("tile.gemm_xyt.bfloat16.128", test_gemm_xyt_depth<BFloat16, 128>);
const DeviceTest xyt_bf16_192("tile.gemm_xyt.bfloat16.192", test_gemm_xyt_depth<BFloat16, 192>);
const DeviceTest xyt_bf16_256("tile.gemm_xyt.bfloat16.256", test_gemm_xyt_depth<BFloat16, 256>);
const DeviceTest xyt_fp16_32("tile.gemm_xyt.float16.32", test_gemm_xyt_depth<Float16, 32>);
const DeviceTest xyt_fp16_64("tile.gemm_xyt.float16.64", test_gemm_xyt_depth<Float16, 64>);
const DeviceTest xyt_fp16_96("tile.gemm_xyt.float16.96", test_gemm_xyt_depth<Float16, 96>);
const DeviceTest xyt_fp16_128("tile.gemm_xyt.float16.128", test_gemm_xyt_depth<Float16, 128>);
const DeviceTest xyt_fp16_192("tile.gemm_xyt.float16.192", test_gemm_xyt_depth<Float16, 192>);
const DeviceTest xyt_fp16_256("tile.gemm_xyt.float16.256", test_gemm_xyt_depth<Float16, 256>);

// ---- gemm_wz ----

constexpr int kKTiles = 4;  // W has 8 * kKTiles columns

// C gains W Z twice: from W as an accumulator, and from the A fragments of it.
template <typename Element, int kMTiles, int kCols>
__global__ void gemm_wz_kernel(const float* w, const Element* z, float* c) {
  extern __shared__ __align__(128) unsigned char smem[];
  Element* sZ = reinterpret_cast<Element*>(smem);
  fill_tile<kCols>(sZ, z, 8 * kKTiles);
  __syncthreads();  // the tile is complete

  const int lane = threadIdx.x % 32, warp_row = 16 * kMTiles * (threadIdx.x / 32);
  float* warp_c = c + warp_row * kCols;
  float acc[kMTiles][kCols / 8][4], acc_w[kMTiles][kKTiles][4];
  read_fragment(acc, warp_c);
  read_fragment(acc_w, w + warp_row * 8 * kKTiles);
  const auto operand = tile::Operand<kCols>::rows_first(ptx::smem_address(sZ), lane);
  tile::gemm_wz<Element>(acc, acc_w, operand);
  uint32_t fragments[kMTiles][kKTiles / 2][4];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int kk = 0; kk < kKTiles / 2; ++kk)
      tile::pack_a_fragment<Element>(fragments[m][kk], acc_w[m], kk);
  tile::gemm_wz<Element>(acc, fragments, operand);
  write_fragment(acc, warp_c);
}

// W lies between 1 and 2 with more digits than Element holds, so that its rounding is seen;
// rounded, it is a multiple of 2^-10, and sums of 64 products with small integers are exact.
template <typename Element, int kMTiles, int kCols>
void test_gemm_wz() {
  constexpr int kRows = 16 * kMTiles * kNumWarps, kDepth = 8 * kKTiles;
  std::vector<float> w = random_integers<float>(kRows * kDepth, 0, 1 << 20, 1);
  for (float& x : w) x = 1.0f + x * 0x1p-20f;
  const auto z = random_integers<Element>(kDepth * kCols, -4, 4, 2);
  const auto c = random_integers<float>(kRows * kCols, -50, 50, 3);
  const DeviceBuffer<float> gW(w), gC(c);
  const DeviceBuffer<Element> gZ(z);
  launch({1, 32 * kNumWarps, 2 * kDepth * kCols}, gemm_wz_kernel<Element, kMTiles, kCols>,
         gW.data(), gZ.data(), gC.data());

  std::vector<float> rounded(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    rounded[i] = 2.0f * static_cast<float>(static_cast<Element>(w[i]));
  }
  check_equal(gC.to_host(), add_product(c, rounded, to_float(z), kDepth, kCols), kCols,
              kMTiles == 1 ? "2 W Z of one row tile" : "2 W Z of two row tiles");
}

// Two row tiles of 192 or more columns do not fit a thread's registers; no kernel has them.
template <typename Element, int kCols>
void test_gemm_wz_cols() {
  test_gemm_wz<Element, 1, kCols>();
  if constexpr (kCols <= 128) test_gemm_wz<Element, 2, kCols>();
}

const DeviceTest wz_bf16_32("tile.gemm_wz.bfloat16.32", test_gemm_wz_cols<BFloat16, 32>);
const DeviceTest wz_bf16_64("tile.gemm_wz.bfloat16.64", test_gemm_wz_cols<BFloat16, 64>);
const DeviceTest wz_bf16_96("tile.gemm_wz.bfloat16.96", test_gemm_wz_cols<BFloat16, 96>);
const DeviceTest wz_bf16_128("tile.gemm_wz.bfloat16.128", test_gemm_wz_cols<BFloat16, 128>);
const DeviceTest wz_bf16_192("tile.gemm_wz.bfloat16.192", test_gemm_wz_cols<BFloat16, 192>);
const DeviceTest wz_bf16_256("tile.gemm_wz.bfloat16.256", test_gemm_wz_cols<BFloat16, 256>);
const DeviceTest wz_fp16_32("tile.gemm_wz.float16.32", test_gemm_wz_cols<Float16, 32>);
const DeviceTest wz_fp16_64("tile.gemm_wz.float16.64", test_gemm_wz_cols<Float16, 64>);
const DeviceTest wz_fp16_96("tile.gemm_wz.float16.96", test_gemm_wz_cols<Float16, 96>);
const DeviceTest wz_fp16_128("tile.gemm_wz.float16.128", test_gemm_wz_cols<Float16, 128>);
const DeviceTest wz_fp16_192("tile.gemm_wz.float16.192", test_gemm_wz_cols<Float16, 192>);
const DeviceTest wz_fp16_256("tile.gemm_wz.float16.256", test_gemm_wz_cols<Float16, 256>);

}  // namespace
}  // namespace flashattn_ext::testing
