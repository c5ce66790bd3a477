// Tensor maps and the loads through them: what lands in shared memory, element by element.
#include "phase.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tensor_views.h"

namespace flashattn_ext::testing {
namespace {

constexpr int kThreads = 128, kBarrierBytes = 8;

// One CTA copies every box of `boxes`, one after the other, to `result` by way of shared memory,
// which is all ones before: what the copy engine leaves alone shows.
__global__ void copy_boxes_kernel(const __grid_constant__ CUtensorMap map, const Coordinates* boxes,
                                  int num_boxes, int box_rows, uint32_t* result) {
  extern __shared__ __align__(1024) uint32_t box[];  // and the barrier behind it
  const int words = box_rows * kChunkCols / 2;
  const uint32_t bar = ptx::smem_address(box + words);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&map);
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barrier is initialised
  for (int i = 0; i < num_boxes; ++i) {
    for (int w = threadIdx.x; w < words; w += kThreads) box[w] = 0xffffffffu;
    ptx::fence_proxy_async();  // written here, next by the copy engine
    __syncthreads();           // every thread's part is written
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(bar, 4 * words);  // clipped boxes count in full
      ptx::tma_load_4d(ptx::smem_address(box), &map, bar, boxes[i].col, boxes[i].row, boxes[i].head,
                       boxes[i].batch);
    }
    ptx::mbarrier_wait(bar, i & 1);
    for (int w = threadIdx.x; w < words; w += kThreads) result[i * words + w] = box[w];
    __syncthreads();  // the box is read
  }
}

std::vector<uint16_t> split_words(const std::vector<uint32_t>& words) {
  std::vector<uint16_t> halves(2 * words.size());
  for (size_t i = 0; i < words.size(); ++i) {
    halves[2 * i] = static_cast<uint16_t>(words[i]);
    halves[2 * i + 1] = static_cast<uint16_t>(words[i] >> 16);
  }
  return halves;
}

// Every box of `box_rows` rows that a kernel would ask for: all heads and batches, all 64-column
// chunks up to `bucket` columns, and rows from 0, the middle, near the end and past it.
std::vector<Coordinates> boxes_of(const View& view, int box_rows, int bucket) {
  std::vector<Coordinates> boxes;
  for (int batch = 0; batch < view.batch; ++batch)
    for (int head = 0; head < view.heads; ++head)
      for (int col = 0; col < bucket; col += kChunkCols)
        for (const int row : {0, 3, view.rows / 2, view.rows - box_rows / 2, view.rows - 1,
                              view.rows, view.rows + 64}) {
          if (row >= 0) boxes.push_back({col, row, head, batch});
        }
  return boxes;
}

void check_view(const View& view, int box_rows, int bucket, Dtype dtype, const char* what) {
  std::vector<uint16_t> storage(view.storage_size());
  for (size_t i = 0; i < storage.size(); ++i) storage[i] = element_bits(i);
  const DeviceBuffer<uint16_t> gStorage(storage);
  const std::vector<Coordinates> boxes = boxes_of(view, box_rows, bucket);
  const DeviceBuffer<Coordinates> gBoxes(boxes);

  const CUtensorMap map = view.map(gStorage.data(), box_rows, dtype, what);
  const int box_size = box_rows * kChunkCols;
  DeviceBuffer<uint32_t> result(boxes.size() * box_size / 2);
  launch({1, kThreads, 2 * box_size + kBarrierBytes}, copy_boxes_kernel, map, gBoxes.data(),
         static_cast<int>(boxes.size()), box_rows, result.data());

  const std::vector<uint16_t> actual = split_words(result.to_host());
  for (size_t i = 0; i < boxes.size(); ++i)
    for (int row = 0; row < box_rows; ++row)
      for (int col = 0; col < kChunkCols; ++col) {
        Coordinates at = boxes[i];
        at.row += row;
        at.col += col;
        const uint16_t expected = view.holds(at) ? storage[view.index(at)] : 0;
        const uint16_t got = actual[i * box_size + chunked_index(row, col, box_rows)];
        check(
            got == expected,
            "%s: box at column %d, row %d, head %d, batch %d: element (%d, %d): got the bits %04x, "
            "wanted %04x",
            what, boxes[i].col, boxes[i].row, boxes[i].head, boxes[i].batch, row, col, got,
            expected);
      }
}

template <Dtype kDtype>
void test_layouts() {
  check_view(contiguous(2, 200, 3, 128), 64, 128, kDtype, "contiguous");
  check_view(contiguous(2, 100, 2, 256), 80, 256, kDtype, "contiguous, boxes of 80 rows");
  check_view(contiguous(1, 300, 2, 64), 128, 64, kDtype, "contiguous, boxes of 128 rows");
  check_view(heads_first(2, 150, 3, 64), 64, 64, kDtype, "heads first");
  // The keys of a fused (batch, rows, 3, heads, head_dim) tensor.
  check_view({2, 90, 2, 128, {90 * 3 * 2 * 128, 3 * 2 * 128, 128}, 2 * 128}, 64, 128, kDtype,
             "a slice of fused qkv");
  // Rows first, then batches, with gaps of 8 elements between heads.
  check_view({3, 70, 2, 64, {2 * 72, 3 * 2 * 72, 72}, 8}, 64, 64, kDtype, "gaps between heads");
}

const HopperTest layouts_bf16("ptx.tma_load_4d.layouts.bfloat16", test_layouts<Dtype::kBFloat16>);
const HopperTest layouts_fp16("ptx.tma_load_4d.layouts.float16", test_layouts<Dtype::kFloat16>);

// Head dims that end within a chunk, or chunks before the bucket does: the rest is zero, not what
// follows in memory.
const HopperTest head_dims("ptx.tma_load_4d.head_dims_between_buckets", [] {
  for (const int head_dim : {8, 40, 56}) {
    check_view(contiguous(2, 70, 2, head_dim), 64, 64, Dtype::kFloat16, "a bucket of 64");
  }
  for (const int head_dim : {72, 96, 120}) {
    check_view(contiguous(1, 70, 2, head_dim), 64, 128, Dtype::kBFloat16, "a bucket of 128");
  }
  for (const int head_dim : {136, 192, 200, 248}) {
    check_view(contiguous(1, 100, 2, head_dim), 80, 256, Dtype::kBFloat16, "a bucket of 256");
  }
});

// Dimensions of one element may come with any stride.
const HopperTest single_elements("ptx.tma_load_4d.dimensions_of_one", [] {
  View view = contiguous(1, 100, 3, 64);
  view.strides.batch = 0;
  check_view(view, 64, 64, Dtype::kBFloat16, "a batch of 1 with stride 0");
  view.strides.batch = 3;
  check_view(view, 64, 64, Dtype::kBFloat16, "a batch of 1 with stride 3");
  view = contiguous(2, 100, 1, 64);
  view.strides.head = 1;
  check_view(view, 64, 64, Dtype::kBFloat16, "one head with stride 1");
  view = contiguous(2, 1, 3, 64);
  view.strides.row = 5;
  check_view(view, 64, 64, Dtype::kBFloat16, "one row with stride 5");
  view = {1, 1, 1, 8, {0, 0, 0}, 16};
  check_view(view, 64, 64, Dtype::kBFloat16, "eight elements");
});

// A batch stride beyond 2^32 bytes: coordinates are 32 bits, addresses are not.
const HopperTest far_batch("ptx.tma_load_4d.far_batch", [] {
  constexpr int64_t kBatchStride = (int64_t{1} << 31) + 1024;  // elements
  constexpr int kRows = 64, kSize = kRows * kChunkCols;
  DeviceBuffer<uint16_t> storage(kBatchStride + kSize);
  std::vector<uint16_t> tile(kSize);
  for (int i = 0; i < kSize; ++i) tile[i] = element_bits(i);
  check_cuda(
      cudaMemcpy(storage.data() + kBatchStride, tile.data(), 2 * kSize, cudaMemcpyHostToDevice),
      "copying to the device");
  CUtensorMap map;
  check_cuda(sm90::encode_tensor_map({storage.data(),
                                      2,
                                      kRows,
                                      1,
                                      kChunkCols,
                                      {kBatchStride, kChunkCols, 0},
                                      kRows,
                                      Dtype::kBFloat16},
                                     &map),
             "encoding the map");
  const DeviceBuffer<Coordinates> boxes(std::vector<Coordinates>{{0, 0, 0, 1}});
  DeviceBuffer<uint32_t> result(kSize / 2);
  launch({1, kThreads, 2 * kSize + kBarrierBytes}, copy_boxes_kernel, map, boxes.data(), 1, kRows,
         result.data());
  std::vector<uint16_t> expected(kSize);
  for (int row = 0; row < kRows; ++row)
    for (int col = 0; col < kChunkCols; ++col)
      expected[chunked_index(row, col, kRows)] = tile[row * kChunkCols + col];
  check_equal(split_words(result.to_host()), expected, kChunkCols, "the box in shared memory");
});

// Two boxes complete on one barrier. It has not seen its bytes before both have landed: `early`
// must stay 0 although the first box has had all the time it needs.
__global__ void two_boxes_kernel(const __grid_constant__ CUtensorMap map, uint32_t* result,
                                 uint32_t* early) {
  constexpr int kBoxWords = 64 * kChunkCols / 2;
  extern __shared__ __align__(1024) uint32_t box[];  // and the barrier behind both
  const uint32_t smem = ptx::smem_address(box), bar = smem + 2 * 4 * kBoxWords;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(bar, 2 * 4 * kBoxWords);
    ptx::tma_load_4d(smem, &map, bar, 0, 0, 0, 0);
    __nanosleep(200000);
    *early = is_over(bar, 0);
    ptx::tma_load_4d(smem + 4 * kBoxWords, &map, bar, 64, 0, 0, 0);
  }
  __syncthreads();  // the barrier is initialised
  ptx::mbarrier_wait(bar, 0);
  for (int w = threadIdx.x; w < 2 * kBoxWords; w += kThreads) result[w] = box[w];
}

const HopperTest two_boxes("ptx.tma_load_4d.two_boxes_on_one_barrier", [] {
  constexpr int kRows = 64, kCols = 2 * kChunkCols;
  std::vector<uint16_t> tile(kRows * kCols), expected(tile.size());
  for (int row = 0; row < kRows; ++row)
    for (int col = 0; col < kCols; ++col) {
      const uint16_t bits = element_bits(row * kCols + col);
      tile[row * kCols + col] = bits;
      expected[chunked_index(row, col, kRows)] = bits;
    }
  const DeviceBuffer<uint16_t> gTile(tile);
  CUtensorMap map;
  check_cuda(sm90::encode_tensor_map(
                 {gTile.data(), 1, kRows, 1, kCols, {0, kCols, 0}, kRows, Dtype::kBFloat16}, &map),
             "encoding the map");
  DeviceBuffer<uint32_t> result(tile.size() / 2), early(1);
  launch({1, kThreads, 2 * kRows * kCols + kBarrierBytes}, two_boxes_kernel, map, result.data(),
         early.data());
  check_equal(early.to_host(), {0}, 1, "a wait for two boxes that ended after one");
  check_equal(split_words(result.to_host()), expected, kChunkCols, "the boxes in shared memory");
});

// What the copy engine cannot do is an error of the encoding, not a wrong copy.
const HopperTest refusals("ptx.encode_tensor_map.refuses", [] {
  const DeviceBuffer<uint16_t> storage(4096);
  const auto refused = [&](int64_t offset, const Strides& strides, int box_rows, const char* what) {
    CUtensorMap map;
    const cudaError_t error = sm90::encode_tensor_map(
        {storage.data() + offset, 2, 4, 2, 64, strides, box_rows, Dtype::kBFloat16}, &map);
    check(error == cudaErrorInvalidValue, "%s: got %s, wanted %s", what, cudaGetErrorName(error),
          cudaGetErrorName(cudaErrorInvalidValue));
  };
  refused(1, {512, 128, 64}, 64, "a base that is not aligned to 16 bytes");
  refused(0, {512, 132, 64}, 64, "a row stride that is not a multiple of 16 bytes");
  refused(0, {512, 128, 64}, 257, "a box of more than 256 rows");
});

}  // namespace
}  // namespace flashattn_ext::testing
