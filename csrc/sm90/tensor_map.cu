#include "sm90/tensor_map.h"

#include <cuda_runtime.h>

namespace flashattn_ext::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's entry point, looked up once; nullptr where the driver has none.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer,
                                                               12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTiled>(pointer)
               : nullptr;
  }();
  return function;
}

}  // namespace

cudaError_t encode_tensor_map(const TensorMapShape& shape, CUtensorMap* map) {
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr cuuint64_t kElementBytes = 2;
  const cuuint64_t sizes[4] = {
      static_cast<cuuint64_t>(shape.head_dim), static_cast<cuuint64_t>(shape.rows),
      static_cast<cuuint64_t>(shape.heads), static_cast<cuuint64_t>(shape.batch)};
  // The stride of a dimension of one element means nothing to the caller, but must be valid here.
  const auto stride_bytes = [&](int64_t stride, int64_t size) {
    return size > 1 ? static_cast<cuuint64_t>(stride) * kElementBytes : cuuint64_t{16};
  };
  const cuuint64_t strides[3] = {stride_bytes(shape.strides.row, shape.rows),
                                 stride_bytes(shape.strides.head, shape.heads),
                                 stride_bytes(shape.strides.batch, shape.batch)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(shape.box_rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map,
             shape.dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             4, const_cast<void*>(shape.data), sizes, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flashattn_ext::sm90
