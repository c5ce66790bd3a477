// A CTA on the CPU, for kernels that use CUDA's ordinary vocabulary and the PTX wrappers that
// include/ptx/ has a version of. Force-included before every file of the kernels.
//
// Every thread of a CTA is a fiber, all of them on one thread of the host, CTAs one after the
// other. What a warp does together (a product, a shuffle, a vote) is done once, by the last lane to
// come. A collective that some lanes never come to, a barrier that nobody opens, and a shared
// address outside of what the launch asked for end the process with a sentence. Copies and products
// that a thread starts are done when somebody waits for them and not before.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#undef __global__
#undef __constant__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __align__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static  // tests/emulated.py takes it away behind `extern`
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulator {

constexpr int kWarp = 32, kMostThreads = 1024;
constexpr uint32_t kSharedBytes = 227 << 10;
constexpr uint32_t kSharedBase = 1024;  // so that an address of 0 is wrong

[[noreturn]] void fail(const char* what);

// Where the running fiber is.
int thread_idx();
inline int lane() { return thread_idx() % kWarp; }

// `together` gets every lane's `mine`, once, when the last of them has come; `name` has to be the
// same for all. The arguments lie in fibers that wait, and are alive.
void warp_collective(const char* name, void* mine,
                     const std::function<void(const std::array<void*, kWarp>&)>& together);

template <typename Mine, typename Together>
void collective(const char* name, Mine& mine, const Together& together) {
  warp_collective(name, &mine, [&](const std::array<void*, kWarp>& lanes) {
    std::array<Mine*, kWarp> all;
    std::transform(lanes.begin(), lanes.end(), all.begin(),
                   [](void* lane) { return static_cast<Mine*>(lane); });
    together(all);
  });
}

// Barrier `id` of the CTA; `num_threads` of 0: all that have not ended.
void barrier(int id, int num_threads, bool wait = true);

// Lets the other threads run; `condition` becomes true by what one of them does.
void wait_until(const std::function<bool()>& condition);
// Something happened that a waiting thread may have waited for.
void got_on();

// `bytes` of shared memory at a shared address.
unsigned char* shared(uint32_t address, uint32_t bytes);
uint32_t shared_address(const void* pointer);
// Where the 128-byte swizzle puts what belongs at a shared address.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Copies of this thread: started, made a group, waited for until so many groups are left.
void start_copy(uint32_t to, const void* from, uint32_t bytes, bool valid);
void commit_copies();
void wait_for_copies(size_t groups_left);

// mbarriers, by shared address. A copy to one is made when somebody waits for it.
void init_mbarrier(uint32_t address, int arrivals);
void arrive(uint32_t address, uint32_t more_bytes);
void wait_for_phase(uint32_t address, uint32_t parity);
void load_box(uint32_t to, const void* map, uint32_t mbarrier, int col, int row, int head,
              int batch);
void store_box(const void* map, uint32_t from, int col, int row, int head, int batch);

// Products of this thread, like the copies above.
void start_product(std::function<void()> product);
void commit_products();
void wait_for_products(size_t groups_left);

// Runs `kernel` in every thread of every CTA, with as much shared memory.
void run(dim3 grid, int num_threads, uint32_t shared_bytes, const std::function<void()>& kernel);

// kernel<<<grid, threads, shared bytes, stream>>>(...), as tests/emulated.py spells it for a host
// compiler.
struct Launch {
  dim3 grid;
  int num_threads;
  uint32_t shared_bytes;
  cudaStream_t stream;

  template <typename... Params, typename... Args>
  void operator()(void (*kernel)(Params...), Args&&... args) const {
    run(grid, num_threads, shared_bytes, [&] { kernel(args...); });
  }
};

template <typename... Params, typename... Args>
cudaError_t launch_ex(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  Launch{config->gridDim, static_cast<int>(config->blockDim.x),
         static_cast<uint32_t>(config->dynamicSmemBytes), nullptr}(kernel, args...);
  return cudaSuccess;
}

struct Index {
  uint32_t x = 0, y = 0, z = 0;
};

}  // namespace emulator

#define cudaLaunchKernelEx emulator::launch_ex
#define cudaFuncSetAttribute(kernel, attribute, value) cudaSuccess

extern emulator::Index threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { emulator::barrier(0, 0); }
inline void __syncwarp(uint32_t = 0xffffffffu) {
  int nothing = 0;
  emulator::collective("__syncwarp", nothing, [](const auto&) {});
}

template <typename T>
T __shfl_sync(uint32_t, T x, int from) {
  struct Mine {
    T x;
    int from;
    T result;
  } mine{x, from % emulator::kWarp, x};
  emulator::collective("shfl", mine, [](const auto& lanes) {
    for (auto* lane : lanes) lane->result = lanes[lane->from]->x;
  });
  return mine.result;
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T x, int other) {
  return __shfl_sync(mask, x, emulator::lane() ^ other);
}

inline int __any_sync(uint32_t, int x) {
  emulator::collective("__any_sync", x, [](const auto& lanes) {
    const bool any = std::any_of(lanes.begin(), lanes.end(), [](int* lane) { return *lane != 0; });
    for (int* lane : lanes) *lane = any;
  });
  return x;
}
inline int __all_sync(uint32_t mask, int x) { return !__any_sync(mask, x == 0); }

template <typename To, typename From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &x, sizeof(x));
  return result;
}
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }

template <typename T>
T __ldcs(const T* from) {
  return *from;
}
inline uint32_t atomicAdd(uint32_t* to, uint32_t x) { return std::exchange(*to, *to + x); }
inline int atomicAdd(int* to, int x) { return std::exchange(*to, *to + x); }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
