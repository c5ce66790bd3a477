// A position in a ring of stages.
#pragma once

#include <cstdint>

namespace flashattn_ext::sm90 {

// Which stage, and which phase of its barriers. One number holds both: consumers have no registers
// to spare.
template <int kStages>
class RingState {
 public:
  __device__ __forceinline__ int stage() const {
    return position < kStages ? position : position - kStages;
  }
  __device__ __forceinline__ uint32_t phase() const { return position >= kStages; }
  __device__ __forceinline__ void advance() {
    position = position == 2 * kStages - 1 ? 0 : position + 1;
  }
  // The place before. That of a fresh ring is one whose barriers let pass.
  __device__ __forceinline__ RingState before() const {
    RingState result;
    result.position = position == 0 ? 2 * kStages - 1 : position - 1;
    return result;
  }

 private:
  int position = 0;
};

}  // namespace flashattn_ext::sm90
