// In the place of csrc/ptx/registers.cuh.
#pragma once

namespace flashattn_ext::ptx {

template <typename T>
T opaque(T x) {
  return x;
}
template <typename T>
T uniform(T x) {
  return x;
}
template <int kCount>
void setmaxnreg_dec() {}
template <int kCount>
void setmaxnreg_inc() {}

}  // namespace flashattn_ext::ptx
