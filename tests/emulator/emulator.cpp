#include "emulator.h"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "sm90/tensor_map.h"

emulator::Index threadIdx, blockIdx, blockDim, gridDim;

// The kernels' names of dynamic shared memory, one place.
extern "C" {
alignas(1024) unsigned char emulator_shared[emulator::kSharedBytes];
}
namespace flashattn_ext::sm80 {
extern unsigned char smem[] __attribute__((alias("emulator_shared")));
}
namespace flashattn_ext::sm90 {
extern unsigned char dynamic_smem[] __attribute__((alias("emulator_shared")));
}

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10;

// What is started, made a group and done when it is waited for.
struct Deferred {
  std::vector<std::function<void()>> started;
  std::deque<std::vector<std::function<void()>>> groups;

  void commit() { groups.push_back(std::exchange(started, {})); }
  void wait(size_t groups_left) {
    for (; groups.size() > groups_left; groups.pop_front())
      for (const auto& work : groups.front()) work();
  }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
  bool ended = false;
  Deferred copies, products;
};

struct Mbarrier {
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;  // still to come
  uint32_t phase = 0;
  std::vector<std::function<void()>> copies;
};

struct Warp {
  const char* name = nullptr;
  int come = 0;
  uint64_t times = 0;
  std::array<void*, kWarp> lanes;
};

struct Barrier {
  int come = 0, wanted = 0;
  uint64_t times = 0;
};

std::vector<Fiber> fibers(kMostThreads);
std::array<Warp, kMostThreads / kWarp> warps;
std::array<Barrier, 16> barriers;
std::map<uint32_t, Mbarrier> mbarriers;
ucontext_t scheduler;
int running = 0, alive = 0;
uint64_t progress = 0;  // grows whenever somebody gets on
uint32_t shared_limit = 0;
const std::function<void()>* body = nullptr;

unsigned char* const base = emulator_shared;
// Static shared memory lies elsewhere in this module; its addresses are above those of `base`.
constexpr uint32_t kStaticBase = 0x40000000;

void yield() { swapcontext(&fibers[running].context, &scheduler); }

void enter() {
  (*body)();
  fibers[running].ended = true;
  --alive;
  ++progress;
  yield();
}

void open(Barrier& barrier) {
  barrier.come = 0;
  ++barrier.times;
  ++progress;
}

void run_cta(int num_threads) {
  warps.fill({});
  barriers.fill({});
  mbarriers.clear();
  alive = num_threads;
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.ended = false;
    fiber.copies = fiber.products = {};
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  while (alive > 0) {
    const uint64_t before = progress;
    for (int i = 0; i < num_threads; ++i) {
      if (fibers[i].ended) continue;
      running = i;
      threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
    }
    // Those that ended need not come to the barrier of all.
    if (barriers[0].come > 0 && barriers[0].come == alive) open(barriers[0]);
    if (progress == before) fail("every thread waits for another");
  }
}

Mbarrier& mbarrier_at(uint32_t address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("an mbarrier that nobody made");
  return found->second;
}

void advance_phase(Mbarrier& barrier) {
  if (barrier.pending < 0) fail("more arrivals than an mbarrier takes");
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
  ++progress;
}

// The box's element (row, column) in shared memory, with the 128-byte swizzle.
unsigned char* in_box(uint32_t tile, int row, int piece) {
  return shared(swizzled(tile + 128 * row + 16 * piece), 16);
}

// Calls f(row of the box, 16-byte piece, place in the tensor or nullptr outside of it).
template <typename F>
void for_each_piece(const void* map, int col, int row, int head, int batch, const F& f) {
  flashattn_ext::sm90::TensorMapShape shape;
  std::memcpy(&shape, map, sizeof(shape));
  for (int r = 0; r < shape.box_rows; ++r) {
    for (int piece = 0; piece < 8; ++piece) {
      const bool inside = row + r >= 0 && row + r < shape.rows && col + 8 * piece < shape.head_dim;
      const int64_t offset = batch * shape.strides.batch + (row + r) * shape.strides.row +
                             head * shape.strides.head + col + 8 * piece;
      f(r, piece, inside ? static_cast<const uint16_t*>(shape.data) + offset : nullptr);
    }
  }
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "emulator: CTA %u, thread %d: %s\n", blockIdx.x, running, what);
  std::abort();
}

int thread_idx() { return running; }

void warp_collective(const char* name, void* mine,
                     const std::function<void(const std::array<void*, kWarp>&)>& together) {
  Warp& warp = warps[running / kWarp];
  if (warp.come > 0 && std::strcmp(warp.name, name) != 0) fail("lanes of a warp have parted");
  warp.name = name;
  warp.lanes[lane()] = mine;
  ++progress;
  if (++warp.come == kWarp) {
    together(warp.lanes);
    warp.come = 0;
    ++warp.times;
    return;
  }
  for (const uint64_t times = warp.times; warp.times == times;) yield();
}

void barrier(int id, int num_threads, bool wait) {
  Barrier& barrier = barriers[id];
  if (barrier.come > 0 && barrier.wanted != num_threads) fail("a barrier of two sizes");
  barrier.wanted = num_threads;
  ++progress;
  if (++barrier.come == (num_threads > 0 ? num_threads : alive)) return open(barrier);
  for (const uint64_t times = barrier.times; wait && barrier.times == times;) yield();
}

void wait_until(const std::function<bool()>& condition) {
  while (!condition()) yield();
}

void got_on() { ++progress; }

unsigned char* shared(uint32_t address, uint32_t bytes) {
  if (address % bytes != 0) fail("a misaligned shared address");
  if (address >= kStaticBase / 2) return base + static_cast<int32_t>(address - kStaticBase);
  const uint32_t offset = address - kSharedBase;
  if (address < kSharedBase || offset + bytes > shared_limit) fail("outside of shared memory");
  return base + offset;
}

uint32_t shared_address(const void* pointer) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - base;
  const bool dynamic = offset >= 0 && offset < kSharedBytes;
  return (dynamic ? kSharedBase : kStaticBase) + static_cast<uint32_t>(offset);
}

void start_copy(uint32_t to, const void* from, uint32_t bytes, bool valid) {
  unsigned char* place = shared(to, bytes);
  fibers[running].copies.started.push_back(
      [=] { valid ? std::memcpy(place, from, bytes) : std::memset(place, 0, bytes); });
}
void commit_copies() { fibers[running].copies.commit(); }
void wait_for_copies(size_t groups_left) { fibers[running].copies.wait(groups_left); }

void start_product(std::function<void()> product) {
  fibers[running].products.started.push_back(std::move(product));
}
void commit_products() { fibers[running].products.commit(); }
void wait_for_products(size_t groups_left) { fibers[running].products.wait(groups_left); }

void init_mbarrier(uint32_t address, int arrivals) {
  mbarriers[address] = Mbarrier{arrivals, arrivals};
}

void arrive(uint32_t address, uint32_t more_bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  barrier.bytes += more_bytes;
  --barrier.pending;
  got_on();
  advance_phase(barrier);
}

void wait_for_phase(uint32_t address, uint32_t parity) {
  Mbarrier& barrier = mbarrier_at(address);
  wait_until([&] {
    for (const auto& copy : std::exchange(barrier.copies, {})) copy();
    advance_phase(barrier);
    return (barrier.phase & 1) != parity;
  });
}

void load_box(uint32_t to, const void* map, uint32_t mbarrier, int col, int row, int head,
              int batch) {
  Mbarrier& barrier = mbarrier_at(mbarrier);
  barrier.copies.push_back([=, &barrier] {
    for_each_piece(map, col, row, head, batch, [&](int r, int piece, const uint16_t* from) {
      unsigned char* place = in_box(to, r, piece);
      from ? std::memcpy(place, from, 16) : std::memset(place, 0, 16);
      barrier.bytes -= 16;
    });
  });
}

void store_box(const void* map, uint32_t from, int col, int row, int head, int batch) {
  for_each_piece(map, col, row, head, batch, [&](int r, int piece, const uint16_t* to) {
    if (to) std::memcpy(const_cast<uint16_t*>(to), in_box(from, r, piece), 16);
  });
}

void run(dim3 grid, int num_threads, uint32_t shared_bytes, const std::function<void()>& kernel) {
  if (num_threads > kMostThreads || shared_bytes > kSharedBytes) fail("a launch beyond the limits");
  body = &kernel;
  shared_limit = shared_bytes;
  blockDim = {static_cast<uint32_t>(num_threads), 1, 1};
  gridDim = {grid.x, grid.y, 1};
  for (blockIdx = {}; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
      std::memset(base, 0xff, shared_bytes);  // NaN in every type
      run_cta(num_threads);
    }
  }
}

}  // namespace emulator

// What the launches call of the runtime.
extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
}

namespace flashattn_ext::sm90 {

// A tensor map is what it was made of: load_box reads that.
cudaError_t encode_tensor_map(const TensorMapShape& shape, CUtensorMap* map) {
  static_assert(sizeof(shape) <= sizeof(*map) && std::is_trivially_copyable_v<TensorMapShape>);
  std::memcpy(map, &shape, sizeof(shape));
  return cudaSuccess;
}

}  // namespace flashattn_ext::sm90
