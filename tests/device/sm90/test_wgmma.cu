// wgmma against a plain loop, on integers whose sums are exact. Operands lie in shared memory and
// descriptors advance as the kernels have them.
#include "harness.h"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "swizzle128.h"

namespace flashattn_ext::testing {
namespace {

constexpr int kRows = 64, kThreads = 128;
constexpr int kRowBytes = 2 * kChunkCols;  // of a chunk
constexpr uint32_t kMostSharedBytes = 227 * 1024;

enum class Product {
  kSharedABt,     // A B^T, both from shared memory
  kSharedAB,      // A B, both from shared memory
  kRegistersABt,  // A B^T, A from registers
  kRegistersAB,   // A B, A from registers
};

// B is (kN, kDepth) for A B^T and (kDepth, kN) for A B.
template <Product kProduct, int kN, int kDepth>
struct Shape {
  static constexpr bool kSharedA =
      kProduct == Product::kSharedABt || kProduct == Product::kSharedAB;
  static constexpr int kTransB =
      kProduct == Product::kSharedAB || kProduct == Product::kRegistersAB ? 1 : 0;
  static constexpr int kBRows = kTransB ? kDepth : kN, kBCols = kTransB ? kN : kDepth;
  static constexpr int kASize = chunked_size(kRows, kDepth), kBSize = chunked_size(kBRows, kBCols);
  static constexpr int kBChunkBytes = kBRows * kRowBytes;
  static_assert(kBChunkBytes % 1024 == 0, "chunks begin where the swizzle pattern does");
};

// All threads fill a tile, chunk by chunk, from a row-major (rows, cols) matrix.
template <typename Element>
__device__ void fill_chunks(Element* tile, const Element* matrix, int rows, int cols) {
  for (int i = threadIdx.x; i < rows * cols; i += kThreads) {
    tile[chunked_index(i / cols, i % cols, rows)] = matrix[i];
  }
}

// A fragments of this warp's 16 rows, as mma.sync m16n8k16 has them: register i holds row
// g + 8 * (i & 1), columns 2t + 8 * (i >> 1) and the next.
template <typename Element, int kDepth>
__device__ void read_a_fragments(uint32_t (&a)[kDepth / 16][4], const Element* matrix) {
  const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
#pragma unroll
  for (int kk = 0; kk < kDepth / 16; ++kk)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row0 + lane / 4 + 8 * (i & 1);
      const int col = 16 * kk + 2 * (lane % 4) + 8 * (i >> 1);
      a[kk][i] = *reinterpret_cast<const uint32_t*>(matrix + row * kDepth + col);
    }
}

// One warpgroup. C (64, kN) becomes the product, plus what it was if `accumulate`.
template <typename Element, Product kProduct, int kN, int kDepth>
__global__ void __launch_bounds__(kThreads)
    wgmma_kernel(const Element* a, const Element* b, float* c, int accumulate) {
  using Shape = Shape<kProduct, kN, kDepth>;
  extern __shared__ __align__(1024) unsigned char smem[];
  Element* sA = reinterpret_cast<Element*>(smem);
  Element* sB = sA + Shape::kASize;
  fill_chunks(sA, a, kRows, kDepth);
  fill_chunks(sB, b, Shape::kBRows, Shape::kBCols);
  ptx::fence_proxy_async();  // written here, read by the tensor cores
  __syncthreads();           // both tiles are complete

  // Row 16w + g + 8*(e >> 1), column 8j + 2t + (e & 1) of C.
  const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
  const auto c_index = [&](int j, int e) {
    return (row0 + lane / 4 + 8 * (e >> 1)) * kN + 8 * j + 2 * (lane % 4) + (e & 1);
  };
  float acc[kN / 8][4];
#pragma unroll
  for (int j = 0; j < kN / 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[j][e] = c[c_index(j, e)];
  uint32_t fragments[Shape::kSharedA ? 1 : kDepth / 16][4] = {};
  if constexpr (!Shape::kSharedA) read_a_fragments<Element, kDepth>(fragments, a);

  const uint64_t desc_a = ptx::wgmma_descriptor(ptx::smem_address(sA), 0);
  const uint64_t desc_b =
      ptx::wgmma_descriptor(ptx::smem_address(sB), Shape::kTransB ? Shape::kBChunkBytes : 0);
  ptx::wgmma_pin(acc);
  ptx::wgmma_pin(fragments);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kDepth / 16; ++kk) {
    const int add = kk != 0 || accumulate;
    // Depth as columns: 32 bytes per step of 16, then the next chunk. Depth as rows: 16 rows.
    const uint32_t a_step = kk / 4 * kRows * kRowBytes + kk % 4 * 32;
    const uint32_t b_step =
        Shape::kTransB ? kk * 16 * kRowBytes : kk / 4 * Shape::kBChunkBytes + kk % 4 * 32;
    if constexpr (Shape::kSharedA) {
      ptx::wgmma_ss<Element, Shape::kTransB>(acc, ptx::wgmma_advance(desc_a, a_step),
                                             ptx::wgmma_advance(desc_b, b_step), add);
    } else {
      ptx::wgmma_rs<Element, Shape::kTransB>(acc, fragments[kk], ptx::wgmma_advance(desc_b, b_step),
                                             add);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(acc);
  ptx::wgmma_pin(fragments);
#pragma unroll
  for (int j = 0; j < kN / 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[c_index(j, e)] = acc[j][e];
}

template <typename Element, Product kProduct, int kN, int kDepth>
void test_product(const char* what) {
  using Shape = Shape<kProduct, kN, kDepth>;
  const auto a = random_integers<Element>(kRows * kDepth, -4, 4, 1);
  const auto b = random_integers<Element>(kN * kDepth, -4, 4, 2);
  const auto c = random_integers<float>(kRows * kN, -50, 50, 3);
  std::vector<float> product(kRows * kN);
  const std::vector<float> a_values = to_float(a), b_values = to_float(b);
  for (int row = 0; row < kRows; ++row)
    for (int col = 0; col < kN; ++col)
      for (int k = 0; k < kDepth; ++k) {
        const int b_index = Shape::kTransB ? k * kN + col : col * kDepth + k;
        product[row * kN + col] += a_values[row * kDepth + k] * b_values[b_index];
      }
  const DeviceBuffer<Element> gA(a), gB(b);
  for (const int accumulate : {0, 1}) {
    const DeviceBuffer<float> gC(c);
    launch({1, kThreads, 2 * (Shape::kASize + Shape::kBSize)},
           wgmma_kernel<Element, kProduct, kN, kDepth>, gA.data(), gB.data(), gC.data(),
           accumulate);
    std::vector<float> expected = product;
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += accumulate ? c[i] : 0.0f;
    check_equal(gC.to_host(), expected, kN, what);
  }
}

// S = Q K^T of one chunk, one and a half, two and four.
template <typename Element, Product kProduct, int kN>
void test_abt() {
  test_product<Element, kProduct, kN, 64>("a depth of 64");
  test_product<Element, kProduct, kN, 96>("a depth of 96");
  test_product<Element, kProduct, kN, 128>("a depth of 128");
  test_product<Element, kProduct, kN, 256>("a depth of 256");
}

// O = P V with blocks of 64, 80, 112 and 128 keys.
template <typename Element, int kN>
void test_ab() {
  test_product<Element, Product::kRegistersAB, kN, 64>("a depth of 64");
  test_product<Element, Product::kRegistersAB, kN, 80>("a depth of 80");
  test_product<Element, Product::kRegistersAB, kN, 112>("a depth of 112");
  test_product<Element, Product::kRegistersAB, kN, 128>("a depth of 128");
}

// dQ = dS K with blocks of 64 and 128 keys.
template <typename Element, int kN>
void test_shared_ab() {
  test_product<Element, Product::kSharedAB, kN, 64>("a depth of 64");
  test_product<Element, Product::kSharedAB, kN, 128>("a depth of 128");
}

using BFloat16 = __nv_bfloat16;
using Float16 = __half;
constexpr Product kShared = Product::kSharedABt, kRegisters = Product::kRegistersABt;

const HopperTest ss_bf16_64("ptx.wgmma_ss.bfloat16.64", test_abt<BFloat16, kShared, 64>);
const HopperTest ss_bf16_80("ptx.wgmma_ss.bfloat16.80", test_abt<BFloat16, kShared, 80>);
const HopperTest ss_bf16_96("ptx.wgmma_ss.bfloat16.96", test_abt<BFloat16, kShared, 96>);
const HopperTest ss_bf16_112("ptx.wgmma_ss.bfloat16.112", test_abt<BFloat16, kShared, 112>);
const HopperTest ss_bf16_128("ptx.wgmma_ss.bfloat16.128", test_abt<BFloat16, kShared, 128>);
const HopperTest ss_bf16_192("ptx.wgmma_ss.bfloat16.192", test_abt<BFloat16, kShared, 192>);
const HopperTest ss_bf16_256("ptx.wgmma_ss.bfloat16.256", test_abt<BFloat16, kShared, 256>);
const HopperTest ss_fp16_64("ptx.wgmma_ss.float16.64", test_abt<Float16, kShared, 64>);
const HopperTest ss_fp16_80("ptx.wgmma_ss.float16.80", test_abt<Float16, kShared, 80>);
const HopperTest ss_fp16_96("ptx.wgmma_ss.float16.96", test_abt<Float16, kShared, 96>);
const HopperTest ss_fp16_112("ptx.wgmma_ss.float16.112", test_abt<Float16, kShared, 112>);
const HopperTest ss_fp16_128("ptx.wgmma_ss.float16.128", test_abt<Float16, kShared, 128>);
const HopperTest ss_fp16_192("ptx.wgmma_ss.float16.192", test_abt<Float16, kShared, 192>);
const HopperTest ss_fp16_256("ptx.wgmma_ss.float16.256", test_abt<Float16, kShared, 256>);

const HopperTest ss_trans_bf16_64("ptx.wgmma_ss.trans_b.bfloat16.64", test_shared_ab<BFloat16, 64>);
const HopperTest ss_trans_bf16_80("ptx.wgmma_ss.trans_b.bfloat16.80", test_shared_ab<BFloat16, 80>);
const HopperTest ss_trans_bf16_96("ptx.wgmma_ss.trans_b.bfloat16.96", test_shared_ab<BFloat16, 96>);
const HopperTest ss_trans_bf16_112("ptx.wgmma_ss.trans_b.bfloat16.112",
                                   test_shared_ab<BFloat16, 112>);
const HopperTest ss_trans_bf16_128("ptx.wgmma_ss.trans_b.bfloat16.128",
                                   test_shared_ab<BFloat16, 128>);
const HopperTest ss_trans_bf16_192("ptx.wgmma_ss.trans_b.bfloat16.192",
                                   test_shared_ab<BFloat16, 192>);
const HopperTest ss_trans_bf16_256("ptx.wgmma_ss.trans_b.bfloat16.256",
                                   test_shared_ab<BFloat16, 256>);
const HopperTest ss_trans_fp16_64("ptx.wgmma_ss.trans_b.float16.64", test_shared_ab<Float16, 64>);
const HopperTest ss_trans_fp16_80("ptx.wgmma_ss.trans_b.float16.80", test_shared_ab<Float16, 80>);
const HopperTest ss_trans_fp16_96("ptx.wgmma_ss.trans_b.float16.96", test_shared_ab<Float16, 96>);
const HopperTest ss_trans_fp16_112("ptx.wgmma_ss.trans_b.float16.112",
                                   test_shared_ab<Float16, 112>);
const HopperTest ss_trans_fp16_128("ptx.wgmma_ss.trans_b.float16.128",
                                   test_shared_ab<Float16, 128>);
const HopperTest ss_trans_fp16_192("ptx.wgmma_ss.trans_b.float16.192",
                                   test_shared_ab<Float16, 192>);
const HopperTest ss_trans_fp16_256("ptx.wgmma_ss.trans_b.float16.256",
                                   test_shared_ab<Float16, 256>);

const HopperTest rs_bf16_64("ptx.wgmma_rs.bfloat16.64", test_abt<BFloat16, kRegisters, 64>);
const HopperTest rs_bf16_80("ptx.wgmma_rs.bfloat16.80", test_abt<BFloat16, kRegisters, 80>);
const HopperTest rs_bf16_96("ptx.wgmma_rs.bfloat16.96", test_abt<BFloat16, kRegisters, 96>);
const HopperTest rs_bf16_112("ptx.wgmma_rs.bfloat16.112", test_abt<BFloat16, kRegisters, 112>);
const HopperTest rs_bf16_128("ptx.wgmma_rs.bfloat16.128", test_abt<BFloat16, kRegisters, 128>);
const HopperTest rs_bf16_192("ptx.wgmma_rs.bfloat16.192", test_abt<BFloat16, kRegisters, 192>);
const HopperTest rs_bf16_256("ptx.wgmma_rs.bfloat16.256", test_abt<BFloat16, kRegisters, 256>);
const HopperTest rs_fp16_64("ptx.wgmma_rs.float16.64", test_abt<Float16, kRegisters, 64>);
const HopperTest rs_fp16_80("ptx.wgmma_rs.float16.80", test_abt<Float16, kRegisters, 80>);
const HopperTest rs_fp16_96("ptx.wgmma_rs.float16.96", test_abt<Float16, kRegisters, 96>);
const HopperTest rs_fp16_112("ptx.wgmma_rs.float16.112", test_abt<Float16, kRegisters, 112>);
const HopperTest rs_fp16_128("ptx.wgmma_rs.float16.128", test_abt<Float16, kRegisters, 128>);
const HopperTest rs_fp16_192("ptx.wgmma_rs.float16.192", test_abt<Float16, kRegisters, 192>);
const HopperTest rs_fp16_256("ptx.wgmma_rs.float16.256", test_abt<Float16, kRegisters, 256>);

const HopperTest trans_bf16_64("ptx.wgmma_rs.trans_b.bfloat16.64", test_ab<BFloat16, 64>);
const HopperTest trans_bf16_80("ptx.wgmma_rs.trans_b.bfloat16.80", test_ab<BFloat16, 80>);
const HopperTest trans_bf16_96("ptx.wgmma_rs.trans_b.bfloat16.96", test_ab<BFloat16, 96>);
const HopperTest trans_bf16_112("ptx.wgmma_rs.trans_b.bfloat16.112", test_ab<BFloat16, 112>);
const HopperTest trans_bf16_128("ptx.wgmma_rs.trans_b.bfloat16.128", test_ab<BFloat16, 128>);
const HopperTest trans_bf16_192("ptx.wgmma_rs.trans_b.bfloat16.192", test_ab<BFloat16, 192>);
const HopperTest trans_bf16_256("ptx.wgmma_rs.trans_b.bfloat16.256", test_ab<BFloat16, 256>);
const HopperTest trans_fp16_64("ptx.wgmma_rs.trans_b.float16.64", test_ab<Float16, 64>);
const HopperTest trans_fp16_80("ptx.wgmma_rs.trans_b.float16.80", test_ab<Float16, 80>);
const HopperTest trans_fp16_96("ptx.wgmma_rs.trans_b.float16.96", test_ab<Float16, 96>);
const HopperTest trans_fp16_112("ptx.wgmma_rs.trans_b.float16.112", test_ab<Float16, 112>);
const HopperTest trans_fp16_128("ptx.wgmma_rs.trans_b.float16.128", test_ab<Float16, 128>);
const HopperTest trans_fp16_192("ptx.wgmma_rs.trans_b.float16.192", test_ab<Float16, 192>);
const HopperTest trans_fp16_256("ptx.wgmma_rs.trans_b.float16.256", test_ab<Float16, 256>);

// ---- Descriptors ----

// A descriptor that is moved on is the one made for the place it comes to, wherever in shared
// memory the tile lies and whatever its chunks. Thread by thread, in units of 1024 bytes, of where
// a tile may begin; the steps are those of 16 columns and of 16 rows.
__global__ void advance_kernel(int* errors) {
  const uint32_t base = 1024 * threadIdx.x;
  int wrong = 0;
  for (const uint32_t leading : {0u, 8192u, 14336u, 16384u, 32768u}) {
    const uint64_t descriptor = ptx::wgmma_descriptor(base, leading);
    for (uint32_t bytes = 0; base + bytes < kMostSharedBytes; bytes += 32) {
      wrong +=
          ptx::wgmma_advance(descriptor, bytes) != ptx::wgmma_descriptor(base + bytes, leading);
    }
    // In two steps as in one.
    wrong += ptx::wgmma_advance(ptx::wgmma_advance(descriptor, 96), 2048) !=
             ptx::wgmma_advance(descriptor, 2144);
  }
  errors[threadIdx.x] = wrong;
}

const HopperTest advance("ptx.wgmma_advance", [] {
  constexpr int kTilePlaces = kMostSharedBytes / 1024;
  DeviceBuffer<int> errors(kTilePlaces);
  launch({1, kTilePlaces}, advance_kernel, errors.data());
  check_equal(errors.to_host(), std::vector<int>(kTilePlaces, 0), kTilePlaces,
              "wrong descriptors at (0, start in KB)");
});

}  // namespace
}  // namespace flashattn_ext::testing
