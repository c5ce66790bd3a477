// The facts of a device that a plan depends on.
#pragma once

#include <cstdint>

namespace flashattn_ext {

struct DeviceInfo {
  bool is_cuda = false;  // false: the CPU, whose other facts do not matter
  int32_t cc_major = 0;  // compute capability
  int32_t cc_minor = 0;
  int32_t num_sms = 0;
  int32_t smem_per_block_bytes = 0;  // largest a kernel can opt into
  int32_t smem_per_sm_bytes = 0;
};

}  // namespace flashattn_ext
