// Products on chunked tiles, and rows of them made zero, against plain loops on integers whose sums
// are exact. A test lays out all of shared memory on the host, as `image`; what no kernel should
// read of it is NaN.
#include "sm90/chunked_tile.cuh"

#include <cstring>
#include <utility>

#include "harness.h"
#include "swizzle128.h"

namespace flashattn_ext::testing {
namespace {

constexpr int kThreads = 128, kGroupRows = 64;
constexpr uint16_t kNaN = 0xffff;  // in both 16-bit formats

using Image = std::vector<uint16_t>;  // the bits of 16-bit elements

__host__ __device__ constexpr int num_chunks(int cols) { return (cols + 63) / kChunkCols; }

// Appends a row-major (rows, cols) matrix as a tile. Columns of the last chunk that the matrix does
// not have are NaN.
template <typename Element>
void append_tile(Image& image, const Element* matrix, int rows, int cols) {
  const size_t start = image.size();
  image.resize(start + chunked_size(rows, cols), kNaN);
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < cols; ++col) {
      std::memcpy(&image[start + chunked_index(row, col, rows)], &matrix[row * cols + col], 2);
    }
}

// Rows [begin, end) of the tile at `start` become `bits`, columns that the matrix has not as well.
void set_rows(Image& image, size_t start, int rows, int cols, int begin, int end, uint16_t bits) {
  for (int chunk = 0; chunk < num_chunks(cols); ++chunk) {
    const auto first = image.begin() + start + chunk * rows * kChunkCols;
    std::fill(first + begin * kChunkCols, first + end * kChunkCols, bits);
  }
}

// All threads copy the image to shared memory, whole when they return.
__device__ void load_image(uint16_t* smem, const uint16_t* image, int size) {
  for (int i = threadIdx.x; i < size; i += kThreads) smem[i] = image[i];
  ptx::fence_proxy_async();  // written here, read by the tensor cores
  __syncthreads();           // every thread's part is written
}

// Calls f(element, its index in a row-major C (64, 8 * kTiles)) for this thread's accumulators.
template <int kTiles, typename Function>
__device__ __forceinline__ void for_each_of(float (&acc)[kTiles][4], const Function& f) {
  const int row0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col0 = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      f(acc[j][e], (row0 + 8 * (e >> 1)) * 8 * kTiles + col0 + 8 * j + (e & 1));
    }
}

// One warpgroup. C (64, kRows) becomes X Y^T. The image has `num_groups` tiles of 64 rows, of which
// X is number `group`, and behind them Y, whose rows from `valid` on are made zero first.
template <typename Element, int kDepth, int kRows>
__global__ void __launch_bounds__(kThreads)
    xyt_kernel(const uint16_t* image, int size, int num_groups, int group, int valid, float* c) {
  constexpr int kChunks = num_chunks(kDepth);
  constexpr uint32_t kXChunk = sm90::chunk_bytes(kGroupRows), kYChunk = sm90::chunk_bytes(kRows);
  extern __shared__ __align__(1024) uint16_t smem[];
  load_image(smem, image, size);
  const uint32_t sX = ptx::smem_address(smem) + group * kChunks * kXChunk;
  const uint32_t sY = ptx::smem_address(smem) + num_groups * kChunks * kXChunk;
  sm90::zero_rows<kChunks>(sY, kYChunk, valid, kRows, threadIdx.x, kThreads);
  __syncthreads();  // every thread's part is zero
  float acc[kRows / 8][4];
  for_each_of(acc, [&](float& x, int i) { x = c[i]; });
  sm90::start_xyt<Element, kDepth>(acc, sX, kXChunk, sY, kYChunk);
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(acc);
  for_each_of(acc, [&](float& x, int i) { c[i] = x; });
}

// One warpgroup. C (64, kCols) += W Z, W (64, kRows) row-major in global memory and the image Z,
// whose rows from `valid` on are made zero first.
template <typename Element, int kRows, int kCols>
__global__ void __launch_bounds__(kThreads)
    wz_kernel(const uint16_t* image, int size, const Element* w, int valid, float* c) {
  constexpr uint32_t kZChunk = sm90::chunk_bytes(kRows);
  extern __shared__ __align__(1024) uint16_t smem[];
  load_image(smem, image, size);
  const uint32_t sZ = ptx::smem_address(smem);
  sm90::zero_rows<num_chunks(kCols)>(sZ, kZChunk, valid, kRows, threadIdx.x, kThreads);
  __syncthreads();  // every thread's part is zero
  // As mma.sync m16n8k16 has A: register i holds row g + 8 * (i & 1), columns 2t + 8 * (i >> 1) and
  // the next.
  uint32_t fragments[kRows / 16][4];
  w += (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * kRows + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int kk = 0; kk < kRows / 16; ++kk)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragments[kk][i] =
          *reinterpret_cast<const uint32_t*>(w + 8 * (i & 1) * kRows + 16 * kk + 8 * (i >> 1));
    }
  float acc[kCols / 8][4];
  for_each_of(acc, [&](float& x, int i) { x = c[i]; });
  sm90::start_wz<Element>(acc, fragments, sZ, kZChunk);
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(acc);
  ptx::wgmma_pin(fragments);
  for_each_of(acc, [&](float& x, int i) { c[i] = x; });
}

// zero_rows by the first `num_threads` threads, on the two chunks of 64 rows that lie at `start`,
// in elements, of the image. `result` is the image afterwards.
__global__ void zero_rows_kernel(const uint16_t* image, int size, int start, int begin, int end,
                                 int num_threads, uint16_t* result) {
  extern __shared__ __align__(1024) uint16_t smem[];
  load_image(smem, image, size);
  if (static_cast<int>(threadIdx.x) < num_threads) {
    sm90::zero_rows<2>(ptx::smem_address(smem + start), sm90::chunk_bytes(64), begin, end,
                       threadIdx.x, num_threads);
  }
  __syncthreads();  // every thread's part is zero
  for (int i = threadIdx.x; i < size; i += kThreads) result[i] = smem[i];
}

// X is one of the groups. Rows of Y from `valid` on are NaN in shared memory, and columns of C from
// there on zero.
template <typename Element, int kDepth, int kRows>
void check_xyt(int num_groups, int group, int valid) {
  const int group_size = kGroupRows * kDepth;
  const auto x = random_integers<Element>(num_groups * group_size, -4, 4, 1);
  const auto y = random_integers<Element>(kRows * kDepth, -4, 4, 2);
  Image image;
  for (int i = 0; i < num_groups; ++i) append_tile(image, &x[i * group_size], kGroupRows, kDepth);
  const size_t y_start = image.size();
  append_tile(image, y.data(), kRows, kDepth);
  set_rows(image, y_start, kRows, kDepth, valid, kRows, kNaN);

  const std::vector<float> x_values = to_float(x), y_values = to_float(y);
  std::vector<float> expected(kGroupRows * kRows);
  for (int row = 0; row < kGroupRows; ++row)
    for (int col = 0; col < valid; ++col)
      for (int k = 0; k < kDepth; ++k) {
        expected[row * kRows + col] +=
            x_values[group * group_size + row * kDepth + k] * y_values[col * kDepth + k];
      }
  const int size = static_cast<int>(image.size());
  const DeviceBuffer<uint16_t> gImage(image);
  const DeviceBuffer<float> gC(expected.size());  // NaN, which must not be added to
  launch({1, kThreads, 2 * size}, xyt_kernel<Element, kDepth, kRows>, gImage.data(), size,
         num_groups, group, valid, gC.data());
  const std::string what = "X Y^T, depth " + std::to_string(kDepth) + ", group " +
                           std::to_string(group) + " of " + std::to_string(num_groups);
  check_equal(gC.to_host(), expected, kRows, what.c_str());
}

// Rows of Z from `valid` on are NaN in shared memory, and count as zero although W is not zero.
template <typename Element, int kRows, int kCols>
void check_wz(int valid) {
  const auto w = random_integers<Element>(kGroupRows * kRows, -4, 4, 3);
  const auto z = random_integers<Element>(kRows * kCols, -4, 4, 4);
  const auto c = random_integers<float>(kGroupRows * kCols, -50, 50, 5);
  Image image;
  append_tile(image, z.data(), kRows, kCols);
  set_rows(image, 0, kRows, kCols, valid, kRows, kNaN);

  const std::vector<float> w_values = to_float(w), z_values = to_float(z);
  std::vector<float> expected = c;
  for (int row = 0; row < kGroupRows; ++row)
    for (int col = 0; col < kCols; ++col)
      for (int k = 0; k < valid; ++k) {
        expected[row * kCols + col] += w_values[row * kRows + k] * z_values[k * kCols + col];
      }
  const int size = static_cast<int>(image.size());
  const DeviceBuffer<uint16_t> gImage(image);
  const DeviceBuffer<Element> gW(w);
  const DeviceBuffer<float> gC(c);
  launch({1, kThreads, 2 * size}, wz_kernel<Element, kRows, kCols>, gImage.data(), size, gW.data(),
         valid, gC.data());
  const std::string what = "C + W Z, " + std::to_string(kCols) + " columns";
  check_equal(gC.to_host(), expected, kCols, what.c_str());
}

// The only group, and each of two. 96 is a chunk and a half.
template <typename Element, int kRows>
void test_xyt() {
  for (const auto& [num_groups, group] : {std::pair{1, 0}, {2, 0}, {2, 1}}) {
    check_xyt<Element, 64, kRows>(num_groups, group, kRows);
    check_xyt<Element, 96, kRows>(num_groups, group, kRows);
    check_xyt<Element, 128, kRows>(num_groups, group, kRows);
    check_xyt<Element, 192, kRows>(num_groups, group, kRows);
    check_xyt<Element, 256, kRows>(num_groups, group, kRows);
  }
}

template <typename Element, int kRows>
void test_wz() {
  check_wz<Element, kRows, 64>(kRows);
  check_wz<Element, kRows, 96>(kRows);
  check_wz<Element, kRows, 128>(kRows);
  check_wz<Element, kRows, 192>(kRows);
  check_wz<Element, kRows, 256>(kRows);
}

// Two chunks of 64 rows, with 8 rows of 128 bytes in front and 8 behind: the rows asked for become
// zero, and nothing else changes.
template <typename Element>
void test_zero_rows() {
  constexpr int kRows = 64, kCols = 2 * kChunkCols, kStart = 8 * kChunkCols;
  constexpr int kSize = kStart + kRows * kCols + kStart;
  Image integers;
  append_tile(integers, random_integers<Element>(kSize, 1, 9, 6).data(), kSize / 64, 64);
  for (const int num_threads : {32, 128})
    for (const auto& [begin, end] : {std::pair{0, 0}, {0, 64}, {5, 6}, {60, 64}, {0, 3}}) {
      Image image = integers, expected = integers;
      set_rows(image, kStart, kRows, kCols, begin, end, kNaN);
      set_rows(expected, kStart, kRows, kCols, begin, end, 0);
      const DeviceBuffer<uint16_t> gImage(image), result(kSize);
      launch({1, kThreads, 2 * kSize}, zero_rows_kernel, gImage.data(), kSize, kStart, begin, end,
             num_threads, result.data());
      const std::string what = "rows " + std::to_string(begin) + " to " + std::to_string(end) +
                               " by " + std::to_string(num_threads) + " threads";
      check_equal(result.to_host(), expected, kChunkCols, what.c_str());
    }
}

const HopperTest xyt_bf16_64("chunked_tile.start_xyt.bfloat16.64", test_xyt<__nv_bfloat16, 64>);
const HopperTest xyt_bf16_128("chunked_tile.start_xyt.bfloat16.128", test_xyt<__nv_bfloat16, 128>);
const HopperTest xyt_fp16_64("chunked_tile.start_xyt.float16.64", test_xyt<__half, 64>);
const HopperTest xyt_fp16_128("chunked_tile.start_xyt.float16.128", test_xyt<__half, 128>);
const HopperTest wz_bf16_64("chunked_tile.start_wz.bfloat16.64", test_wz<__nv_bfloat16, 64>);
const HopperTest wz_bf16_128("chunked_tile.start_wz.bfloat16.128", test_wz<__nv_bfloat16, 128>);
const HopperTest wz_fp16_64("chunked_tile.start_wz.float16.64", test_wz<__half, 64>);
const HopperTest wz_fp16_128("chunked_tile.start_wz.float16.128", test_wz<__half, 128>);

const HopperTest zero_bf16("chunked_tile.zero_rows.bfloat16", test_zero_rows<__nv_bfloat16>);
const HopperTest zero_fp16("chunked_tile.zero_rows.float16", test_zero_rows<__half>);

// What was NaN does not reach a product.
const HopperTest zeroed("chunked_tile.zero_rows.products", [] {
  check_xyt<__nv_bfloat16, 128, 64>(1, 0, 37);
  check_xyt<__half, 128, 64>(1, 0, 37);
  check_wz<__nv_bfloat16, 64, 128>(37);
  check_wz<__half, 64, 128>(37);
});

}  // namespace
}  // namespace flashattn_ext::testing
