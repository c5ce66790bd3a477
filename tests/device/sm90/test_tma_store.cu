// Stores through the copy engine: which elements of a tensor change, and to what, when boxes reach
// over its end; and when shared memory may be used again.
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tensor_views.h"

namespace flashattn_ext::testing {
namespace {

constexpr int kThreads = 128;

// One CTA stores every box of `boxes`, `group_boxes` of them at a time as one group. `values` is
// (num_boxes, box_rows, kChunkCols). As soon as a group has been read, its shared memory becomes
// all ones: a wait that ends too early would store these.
__global__ void store_boxes_kernel(const __grid_constant__ CUtensorMap map,
                                   const Coordinates* boxes, int num_boxes, int group_boxes,
                                   int box_rows, const uint16_t* values) {
  extern __shared__ __align__(1024) uint16_t smem[];
  const int box_size = box_rows * kChunkCols;
  for (int first = 0; first < num_boxes; first += group_boxes) {
    const int count = min(group_boxes, num_boxes - first);
    for (int i = threadIdx.x; i < count * box_size; i += kThreads) {
      const int box = i / box_size, row = i % box_size / kChunkCols, col = i % kChunkCols;
      smem[box * box_size + chunked_index(row, col, box_rows)] = values[first * box_size + i];
    }
    ptx::fence_proxy_async();  // written here, read by the copy engine
    __syncthreads();           // every thread's part is written
    if (threadIdx.x == 0) {
      for (int box = 0; box < count; ++box) {
        const Coordinates& at = boxes[first + box];
        ptx::tma_store_4d(&map, ptx::smem_address(smem + box * box_size), at.col, at.row, at.head,
                          at.batch);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read();
    }
    __syncthreads();  // the copy engine has read the group
    for (int i = threadIdx.x; i < count * box_size; i += kThreads) smem[i] = 0xffff;
    __syncthreads();  // before the next group is written
  }
}

// Boxes that cover the view and what lies behind it, each element once: rows past the end within
// the last box and in one of their own, columns past the head dim within a chunk and in chunks up
// to the bucket, a head and a batch that are not there.
std::vector<Coordinates> boxes_over(const View& view, int box_rows, int bucket) {
  std::vector<Coordinates> boxes;
  for (int batch = 0; batch <= view.batch; ++batch)
    for (int head = 0; head <= view.heads; ++head)
      for (int row = 0; row < view.rows + box_rows; row += box_rows)
        for (int col = 0; col < bucket; col += kChunkCols) boxes.push_back({col, row, head, batch});
  return boxes;
}

void check_store(const View& view, int box_rows, int bucket, int group_boxes, Dtype dtype,
                 const char* what) {
  std::vector<uint16_t> expected(view.storage_size());
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = element_bits(3 * i + 1);
  const DeviceBuffer<uint16_t> gStorage(expected);
  const std::vector<Coordinates> boxes = boxes_over(view, box_rows, bucket);
  const int num_boxes = static_cast<int>(boxes.size()), box_size = box_rows * kChunkCols;
  std::vector<uint16_t> values(num_boxes * box_size);
  for (size_t i = 0; i < values.size(); ++i) values[i] = element_bits(i);
  for (int box = 0; box < num_boxes; ++box)
    for (int i = 0; i < box_size; ++i) {
      Coordinates at = boxes[box];
      at.row += i / kChunkCols;
      at.col += i % kChunkCols;
      if (view.holds(at)) expected[view.index(at)] = values[box * box_size + i];
    }

  const CUtensorMap map = view.map(gStorage.data(), box_rows, dtype, what);
  const DeviceBuffer<Coordinates> gBoxes(boxes);
  const DeviceBuffer<uint16_t> gValues(values);
  launch({1, kThreads, 2 * group_boxes * box_size}, store_boxes_kernel, map, gBoxes.data(),
         num_boxes, group_boxes, box_rows, gValues.data());
  const std::string text = std::string(what) + ": bits of the buffer";
  check_equal(gStorage.to_host(), expected, view.strides.row > 0 ? view.strides.row : 1,
              text.c_str());
}

// One warp's rows as the kernels store them, and other numbers of rows.
template <Dtype kDtype>
void test_layouts() {
  check_store(contiguous(2, 96, 3, 128), 16, 128, 2, kDtype, "contiguous, whole boxes");
  check_store(contiguous(2, 75, 3, 128), 16, 128, 2, kDtype, "contiguous, rows end within a box");
  check_store(contiguous(1, 7, 2, 64), 16, 64, 1, kDtype, "fewer rows than a box has");
  check_store(contiguous(1, 130, 2, 64), 64, 64, 3, kDtype, "boxes of 64 rows");
  check_store(heads_first(2, 50, 3, 64), 16, 64, 1, kDtype, "heads first");
  // Rows first, then batches, with gaps of 8 elements between heads.
  check_store({3, 70, 2, 64, {2 * 72, 3 * 2 * 72, 72}, 8}, 16, 64, 1, kDtype, "gaps between heads");
  // One of three outputs side by side.
  check_store({2, 41, 2, 96, {41 * 3 * 2 * 96, 3 * 2 * 96, 96}, 2 * 96}, 16, 128, 2, kDtype,
              "a slice of a fused tensor");
}

const HopperTest layouts_bf16("ptx.tma_store_4d.layouts.bfloat16", test_layouts<Dtype::kBFloat16>);
const HopperTest layouts_fp16("ptx.tma_store_4d.layouts.float16", test_layouts<Dtype::kFloat16>);

// Head dims that end within a chunk, or chunks before the bucket does: what follows in memory, the
// next head's columns, stays what it was.
const HopperTest head_dims("ptx.tma_store_4d.head_dims_between_buckets", [] {
  for (const int head_dim : {8, 40, 56}) {
    check_store(contiguous(2, 37, 2, head_dim), 16, 64, 1, Dtype::kFloat16, "a bucket of 64");
  }
  for (const int head_dim : {8, 64, 72, 96, 120}) {
    check_store(contiguous(2, 37, 2, head_dim), 16, 128, 2, Dtype::kBFloat16, "a bucket of 128");
  }
  for (const int head_dim : {136, 192, 248}) {
    check_store(contiguous(1, 37, 2, head_dim), 16, 256, 4, Dtype::kBFloat16, "a bucket of 256");
  }
});

// Groups of many boxes, and boxes of one group each in quick succession: shared memory is written
// over as soon as the wait says so.
const HopperTest groups("ptx.tma_store_4d.groups", [] {
  for (const int group_boxes : {1, 2, 5, 16}) {
    check_store(contiguous(2, 500, 2, 128), 16, 128, group_boxes, Dtype::kBFloat16,
                "groups of some boxes");
  }
  check_store(contiguous(1, 1000, 2, 64), 256, 64, 3, Dtype::kBFloat16, "groups of large boxes");
});

// Two warps that store from buffers of their own and wait each for its own group, as the kernels'
// do.
__global__ void store_own_kernel(const __grid_constant__ CUtensorMap map, int steps) {
  constexpr int kBoxRows = 16, kBoxSize = kBoxRows * kChunkCols;
  __shared__ __align__(1024) uint16_t smem[2][kBoxSize];
  const int warp_idx = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int step = warp_idx; step < steps; step += 2) {
    if (lane == 0) ptx::bulk_wait_read();  // the box before has left
    __syncwarp();
    for (int i = lane; i < kBoxSize; i += 32) {
      smem[warp_idx][chunked_index(i / kChunkCols, i % kChunkCols, kBoxRows)] =
          static_cast<uint16_t>(step * kBoxSize + i);
    }
    ptx::fence_proxy_async();  // written here, read by the copy engine
    __syncwarp();
    if (lane == 0) {
      ptx::tma_store_4d(&map, ptx::smem_address(smem[warp_idx]), 0, kBoxRows * step, 0, 0);
      ptx::bulk_commit();
    }
  }
  if (lane == 0) ptx::bulk_wait_read();  // shared memory lasts until then
}

const HopperTest own_groups("ptx.tma_store_4d.each_warp_waits_for_its_own", [] {
  constexpr int kSteps = 60, kRows = 16 * kSteps;
  const View view = contiguous(1, kRows, 1, kChunkCols);
  DeviceBuffer<uint16_t> storage(view.storage_size());
  std::vector<uint16_t> expected(view.storage_size(), 0xffff);
  for (int i = 0; i < kRows * kChunkCols; ++i) expected[i] = static_cast<uint16_t>(i);
  launch({1, 64}, store_own_kernel, view.map(storage.data(), 16, Dtype::kBFloat16, "the map"),
         kSteps);
  check_equal(storage.to_host(), expected, kChunkCols, "the buffer");
});

}  // namespace
}  // namespace flashattn_ext::testing
