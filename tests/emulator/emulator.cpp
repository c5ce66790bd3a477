#include "emulator.h"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

emulator::Index threadIdx, blockIdx, blockDim, gridDim;

namespace flashattn_ext::sm80 {
alignas(1024) unsigned char smem[emulator::kSharedBytes];
}

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10;

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
  bool valid;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
  bool ended = false;
  std::vector<Copy> started;
  std::deque<std::vector<Copy>> groups;
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
ucontext_t scheduler;
int running = 0, alive = 0;
uint64_t progress = 0;  // grows whenever somebody gets on
uint32_t shared_limit = 0;
const std::function<void()>* body = nullptr;

unsigned char* const base = flashattn_ext::sm80::smem;

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
  alive = num_threads;
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.ended = false;
    fiber.started.clear();
    fiber.groups.clear();
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

void barrier(int id, int num_threads) {
  Barrier& barrier = barriers[id];
  if (barrier.come > 0 && barrier.wanted != num_threads) fail("a barrier of two sizes");
  barrier.wanted = num_threads;
  ++progress;
  if (++barrier.come == (num_threads > 0 ? num_threads : alive)) return open(barrier);
  for (const uint64_t times = barrier.times; barrier.times == times;) yield();
}

unsigned char* shared(uint32_t address, uint32_t bytes) {
  const uint32_t offset = address - kSharedBase;
  if (address < kSharedBase || offset + bytes > shared_limit) fail("outside of shared memory");
  if (address % bytes != 0) fail("a misaligned shared address");
  return base + offset;
}

uint32_t shared_address(const void* pointer) {
  return kSharedBase + static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - base);
}

void start_copy(uint32_t to, const void* from, uint32_t bytes, bool valid) {
  shared(to, bytes);
  fibers[running].started.push_back({to, from, bytes, valid});
}

void commit_copies() {
  Fiber& fiber = fibers[running];
  fiber.groups.push_back(std::move(fiber.started));
  fiber.started.clear();
}

void wait_for_copies(size_t groups_left) {
  auto& groups = fibers[running].groups;
  for (; groups.size() > groups_left; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      unsigned char* to = shared(copy.to, copy.bytes);
      copy.valid ? std::memcpy(to, copy.from, copy.bytes) : std::memset(to, 0, copy.bytes);
    }
  }
}

void run(uint32_t grid, int num_threads, uint32_t shared_bytes,
         const std::function<void()>& kernel) {
  if (num_threads > kMostThreads || shared_bytes > kSharedBytes) fail("a launch beyond the limits");
  body = &kernel;
  shared_limit = shared_bytes;
  blockDim = {static_cast<uint32_t>(num_threads), 1, 1};
  gridDim = {grid, 1, 1};
  for (blockIdx = {}; blockIdx.x < grid; ++blockIdx.x) {
    std::memset(base, 0xff, shared_bytes);  // NaN in every type
    run_cta(num_threads);
  }
}

}  // namespace emulator
