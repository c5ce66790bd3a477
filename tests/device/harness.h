// A small harness for the device unit tests: registration, checks, device memory, launches.
//
// A test is a function without arguments, registered by an object at namespace scope:
//   const DeviceTest copies("ptx.cp_async_16.copies", [] { check(..., "a sentence"); });
// A HostTest needs no GPU and its name gets the prefix "host:". A HopperTest, of the files in
// sm90/, is skipped where the GPU is not of compute capability 9.0. A test fails by an exception,
// which `check` throws with a sentence that says what was wanted and what was got.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace flashattn_ext::testing {

// ---- Registration ----

struct Test {
  std::string name;
  void (*run)();
  bool needs_gpu;
  bool needs_hopper;
};

// A function's static: it exists before the first test of any file registers itself.
inline std::vector<Test>& registry() {
  static std::vector<Test> tests;
  return tests;
}

struct HostTest {
  HostTest(const char* name, void (*run)()) {
    registry().push_back({std::string("host:") + name, run, false, false});
  }
};

struct DeviceTest {
  DeviceTest(const char* name, void (*run)()) { registry().push_back({name, run, true, false}); }
};

struct HopperTest {
  HopperTest(const char* name, void (*run)()) { registry().push_back({name, run, true, true}); }
};

// ---- Checks ----

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Unless `holds`, fails the test with a printf-style sentence.
[[gnu::format(printf, 2, 3)]] inline void check(bool holds, const char* sentence, ...) {
  if (holds) return;
  char text[512];
  va_list arguments;
  va_start(arguments, sentence);
  vsnprintf(text, sizeof(text), sentence, arguments);
  va_end(arguments);
  throw Failure(text);
}

// Exact equality of two row-major matrices of `cols` columns; reports the first difference.
template <typename T>
void check_equal(const std::vector<T>& actual, const std::vector<T>& expected, size_t cols,
                 const char* what) {
  check(actual.size() == expected.size(), "%s: %zu values, wanted %zu", what, actual.size(),
        expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    check(actual[i] == expected[i], "%s (%zu, %zu): got %.9g, wanted %.9g", what, i / cols,
          i % cols, static_cast<double>(actual[i]), static_cast<double>(expected[i]));
  }
}

inline void check_cuda(cudaError_t error, const char* what) {
  check(error == cudaSuccess, "%s: CUDA says %s", what, cudaGetErrorString(error));
}

// ---- Data ----

// `count` integers of [low, high], the same in every run.
template <typename T>
std::vector<T> random_integers(size_t count, int low, int high, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<T> values(count);
  for (T& x : values) {
    x = static_cast<T>(static_cast<float>(low + static_cast<int>(generator() % (high - low + 1))));
  }
  return values;
}

template <typename Element>
std::vector<float> to_float(const std::vector<Element>& values) {
  std::vector<float> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = static_cast<float>(values[i]);
  return result;
}

// ---- Device memory and launches ----

// Owns `count` elements of device memory. Without values every byte is 0xff, which is NaN in every
// float format and -1 as an integer: what a kernel forgets to write, or should not read, shows.
template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t count) : count_(count) {
    check_cuda(cudaMalloc(&data_, std::max<size_t>(bytes(), 1)), "allocating device memory");
    check_cuda(cudaMemset(data_, 0xff, bytes()), "filling device memory");
  }
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size()) {
    check_cuda(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice),
               "copying to the device");
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() const { return static_cast<T*>(data_); }

  std::vector<T> to_host() const {
    std::vector<T> values(count_);
    check_cuda(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost),
               "copying from the device");
    return values;
  }

 private:
  size_t bytes() const { return count_ * sizeof(T); }

  size_t count_;
  void* data_ = nullptr;
};

struct LaunchShape {
  int num_ctas = 1;
  int num_threads = 32;
  int smem_bytes = 0;
};

// Runs a kernel to its end.
template <typename... Params, typename... Args>
void launch(const LaunchShape& shape, void (*kernel)(Params...), const Args&... args) {
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.smem_bytes),
      "asking for shared memory");
  kernel<<<shape.num_ctas, shape.num_threads, shape.smem_bytes>>>(args...);
  check_cuda(cudaGetLastError(), "launching");
  check_cuda(cudaDeviceSynchronize(), "running the kernel");
}

}  // namespace flashattn_ext::testing
