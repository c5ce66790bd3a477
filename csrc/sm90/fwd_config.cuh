// What the roles of the Hopper forward share: the layout of shared memory, the barriers, and the
// tiles that pass from the producer to the consumers.
#pragma once

#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/seqlen_info.cuh"
#include "attention/tile_order.h"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "sm90/ring.cuh"
#include "sm90/tiles.h"
#include "tile/swizzle.cuh"

namespace flashattn_ext::sm90 {

template <typename Element_, int kRow>
struct FwdConfig {
  using Element = Element_;
  static constexpr FwdTile kTile = kFwdTiles[kRow];
  static constexpr int kHeadDim = kTile.bucket, kHeadDimV = kTile.bucket_v;
  static constexpr int kBlockN = kTile.block_n, kConsumers = kTile.consumers;
  static constexpr int kBlockM = kTile.block_m();
  static constexpr int kNumThreads = 128 * (kConsumers + 1);
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 32 == 0 && kBlockN % 16 == 0);

  // Some of a tile's key blocks may be seen by other consumers' queries only.
  static constexpr bool kSkips = kBlockN < kBlockM;

  // Registers per thread: of an SM's 64K, what a producer does not need. Measured to compile clean.
  static constexpr int kWarpgroups = kTile.ctas_per_sm * kConsumers;
  static constexpr int kProducerRegs = kWarpgroups == 2 ? 40 : kWarpgroups == 3 ? 32 : 24;
  static constexpr int kConsumerRegs = kWarpgroups == 2 ? 232 : kWarpgroups == 3 ? 160 : 104;

  using ChunkLayout = tile::SmemLayout<64>;  // the copy engine's 128-byte swizzle
  static constexpr int kQkChunks = kTile.qk_chunks(), kVChunks = kTile.v_chunks();
  static constexpr uint32_t kQChunkBytes = FwdTile::chunk_bytes(64);  // one consumer's rows
  static constexpr uint32_t kQBytes = kQkChunks * kQChunkBytes;
  static constexpr uint32_t kKvChunkBytes = FwdTile::chunk_bytes(kBlockN);
  static constexpr uint32_t kKBytes = kQkChunks * kKvChunkBytes;
  static constexpr uint32_t kVBytes = kVChunks * kKvChunkBytes;
  static constexpr uint32_t kVStepBytes = FwdTile::chunk_bytes(16);   // 16 keys further on
  static constexpr uint32_t kOChunkBytes = FwdTile::chunk_bytes(16);  // one warp's rows
  static constexpr uint32_t kOBytes = kTile.tma_store ? kVChunks * kOChunkBytes : 0;

  static constexpr uint32_t kOffsetQ = 0;
  static constexpr uint32_t kOffsetK = kConsumers * kQBytes;
  static constexpr uint32_t kOffsetV = kOffsetK + kTile.k_stages * kKBytes;
  static constexpr uint32_t kOffsetO = kOffsetV + kTile.v_stages * kVBytes;
  static constexpr uint32_t kOffsetTiles = kOffsetO + 4 * kConsumers * kOBytes;
  static constexpr uint32_t kOffsetBarriers =
      kOffsetTiles + kTile.tile_slot_bytes() * FwdTile::kTileSlots;
  static constexpr uint32_t kSmemBytes = kOffsetBarriers + 8 * kTile.num_barriers();
  static_assert(kSmemBytes == kTile.smem_bytes());
};

// mbarriers; fwd_kernel.cuh lists them.
template <typename Config>
struct FwdBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t q_full(int consumer) const { return at(0, consumer); }
  __device__ __forceinline__ uint32_t q_empty(int consumer) const { return at(kQ, consumer); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return at(2 * kQ, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return at(2 * kQ + kK, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return at(2 * (kQ + kK), stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const {
    return at(2 * (kQ + kK) + kV, stage);
  }
  __device__ __forceinline__ uint32_t tile_full(int slot) const {
    return at(2 * (kQ + kK + kV), slot);
  }
  __device__ __forceinline__ uint32_t tile_empty(int slot) const {
    return at(2 * (kQ + kK + kV) + FwdTile::kTileSlots, slot);
  }
  __device__ __forceinline__ uint32_t near_end() const {
    return at(2 * (kQ + kK + kV + FwdTile::kTileSlots), 0);
  }

  // One thread; the CTA meets afterwards.
  __device__ __forceinline__ void init() const {
    constexpr int kConsumerWarps = 4 * Config::kConsumers;
    for (int w = 0; w < kQ; ++w) init_pair(q_full(w), q_empty(w), 4);
    for (int s = 0; s < kK; ++s) init_pair(k_full(s), k_empty(s), kConsumerWarps);
    for (int s = 0; s < kV; ++s) init_pair(v_full(s), v_empty(s), kConsumerWarps);
    for (int i = 0; i < FwdTile::kTileSlots; ++i) {
      init_pair(tile_full(i), tile_empty(i), 128 * Config::kConsumers + 1);
    }
    ptx::mbarrier_init(near_end(), 1);
    ptx::fence_mbarrier_init();
  }

 private:
  static constexpr int kQ = Config::kConsumers, kK = Config::kTile.k_stages,
                       kV = Config::kTile.v_stages;

  __device__ __forceinline__ uint32_t at(int first, int i) const { return base + 8 * (first + i); }
  __device__ __forceinline__ static void init_pair(uint32_t full, uint32_t empty, int readers) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, readers);
  }
};

// The tile that a CTA works on.
struct FwdTileInfo {
  int32_t batch_idx, head_idx;
  int32_t m0;                  // first query
  int32_t q_start, k_start;    // first packed rows of the sequence; 0 in dense
  int32_t seqlen_q, seqlen_k;  // of this sequence
  BlockRange blocks;           // key blocks, visited from the last to the first

  // Some query of the tile exists and sees some key. Otherwise nothing is loaded; queries that
  // exist get their zeros.
  __device__ __forceinline__ bool has_work() const { return blocks.end > blocks.begin; }
};

// The key blocks of a consumer's 64 queries, visited from `last` to `first`. Those in [open_begin,
// open_end) are seen whole by all of them, and not as a query's first, so that rows have a
// reference by then; open_end >= first. Of the tile's blocks, `before` come ahead of `last` and
// `behind` after `first`: other consumers see something of them.
struct KeyBlocks {
  int32_t first, last, before, behind, open_begin, open_end;
};

// Tiles on their way from the scheduler to the loader and the consumers, through slots in shared
// memory. Each reader has a queue of its own, at its own place. A tile stays in its slot until
// every reader has released it: read where it is needed, it takes no registers.
template <typename Config>
class TileQueue {
 public:
  __device__ __forceinline__ TileQueue(uint32_t smem, const FwdBarriers<Config>& barriers)
      : slots(smem + Config::kOffsetTiles), barriers(barriers) {}

  // The scheduler's thread.
  __device__ __forceinline__ void push(const FwdTileInfo& tile,
                                       const KeyBlocks (&keys)[Config::kConsumers]) {
    ptx::mbarrier_wait(barriers.tile_empty(ring.stage()), ring.phase() ^ 1);
    const uint32_t slot = slots + kSlotBytes * ring.stage();
    ptx::st_shared_v4(slot, make_int4(tile.batch_idx, tile.head_idx, tile.m0, tile.q_start));
    ptx::st_shared_v4(slot + 16,
                      make_int4(tile.seqlen_q, tile.seqlen_k, tile.blocks.begin, tile.blocks.end));
    ptx::st_shared_b32(slot + 32, tile.k_start);
#pragma unroll
    for (int c = 0; c < Config::kConsumers; ++c) {
      const KeyBlocks& k = keys[c];
      ptx::st_shared_v4(slot + 48 + 32 * c, make_int4(k.first, k.last, k.before, k.behind));
      ptx::st_shared_v4(slot + 64 + 32 * c, make_int4(k.open_begin, k.open_end, 0, 0));
    }
    ptx::mbarrier_arrive(barriers.tile_full(ring.stage()));
    ring.advance();
  }
  __device__ __forceinline__ void push_end() { push({-1, 0, 0, 0, 0, 0, 0, {0, 0}}, {}); }

  // A reader waits for the next tile; batch_idx is -1 at the end.
  __device__ __forceinline__ FwdTileInfo wait() const {
    ptx::mbarrier_wait(barriers.tile_full(ring.stage()), ring.phase());
    return tile();
  }
  __device__ __forceinline__ FwdTileInfo tile() const {
    const uint32_t slot = slots + kSlotBytes * ring.stage();
    const int4 a = ptx::ld_shared_v4_b32(slot), b = ptx::ld_shared_v4_b32(slot + 16);
    const int k_start = ptx::ld_shared_b32(slot + 32);
    return {a.x, a.y, a.z, a.w, k_start, b.x, b.y, {b.z, b.w}};
  }
  __device__ __forceinline__ KeyBlocks keys(int consumer) const {
    const uint32_t place = slots + kSlotBytes * ring.stage() + 48 + 32 * consumer;
    const int4 a = ptx::ld_shared_v4_b32(place), b = ptx::ld_shared_v4_b32(place + 16);
    return {ptx::uniform(a.x), ptx::uniform(a.y), ptx::uniform(a.z),
            ptx::uniform(a.w), ptx::uniform(b.x), ptx::uniform(b.y)};
  }
  // Every thread of a consumer, one of the loader.
  __device__ __forceinline__ void release() {
    ptx::mbarrier_arrive(barriers.tile_empty(ring.stage()));
    ring.advance();
  }

 private:
  static constexpr int kSlotBytes = Config::kTile.tile_slot_bytes();

  const uint32_t slots;
  const FwdBarriers<Config> barriers;
  RingState<FwdTile::kTileSlots> ring;
};

}  // namespace flashattn_ext::sm90
