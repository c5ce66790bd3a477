// What the roles of the Hopper fused backward kernel share beside bwd_dkv_config.cuh: shared
// memory, barriers, and the buffer of dQ.
#pragma once

#include "ptx/shared.cuh"
#include "sm90/bwd_dkv_config.cuh"
#include "sm90/bwd_dq_buffer.h"
#include "sm90/ring.cuh"

namespace flashattn_ext::sm90 {

template <typename Element, int kRow>
struct BwdFusedConfig : BwdKeyBlockConfig<Element, kBwdFusedTiles, kRow> {
  using Base = BwdKeyBlockConfig<Element, kBwdFusedTiles, kRow>;
  static constexpr bool kRoles = false, kInOrder = Base::kTile.in_order;
  static constexpr int kDsStages = Base::kTile.ds_stages;
  static constexpr int kTurnStages = Base::kTile.turn_stages;
  static constexpr uint32_t kDsChunkBytes = chunk_bytes(Base::kBlockM);
  static constexpr uint32_t kDsBytes = Base::kKeyGroups * kDsChunkBytes;
  static constexpr uint32_t kOffsetSum = Base::kOffsetScores + kDsStages * kDsBytes;
  static constexpr uint32_t kSumBytes = 4 * Base::kBlockM * Base::kHeadDim;
  // dK and dV leave through chunks of dS that their consumer alone writes, two warps to a chunk.
  static constexpr uint32_t kWarpRowBytes = 2 * 16 * Base::kHeadDim;
  static_assert(2 * kWarpRowBytes <= kDsChunkBytes && kDsStages >= 2);
  static constexpr int kTileSlots = Base::kTile.tile_slots;
  static constexpr uint32_t kOffsetTiles = Base::kOffsetEnd;
  static constexpr uint32_t kSmemBytes = kOffsetTiles + 4 * kTileSlots;
  static_assert(kSmemBytes == Base::kTile.smem_bytes());
  static_assert(Base::kBlockM * Base::kHeadDim == Base::kConsumers * BwdDqBuffer::kPieceFloats);
};

template <typename Config>
struct BwdFusedBarriers : BwdDkvBarriers<Config> {
  __device__ __forceinline__ uint32_t kv_empty() const {
    return this->base + 8 * (2 + 5 * Config::kStages);
  }
  __device__ __forceinline__ uint32_t tile_full(int slot) const {
    return kv_empty() + 8 + 8 * slot;
  }
  __device__ __forceinline__ uint32_t tile_empty(int slot) const {
    return tile_full(Config::kTileSlots + slot);
  }
  __device__ __forceinline__ uint32_t ds_full(int stage) const {
    return tile_empty(Config::kTileSlots + stage);
  }
  __device__ __forceinline__ uint32_t turn(int stage) const {
    return ds_full(Config::kDsStages + stage);
  }
  __device__ __forceinline__ uint32_t added(int stage) const {
    return turn(Config::kTurnStages + stage);
  }
  __device__ __forceinline__ uint32_t told(int stage) const {
    return added(Config::kTurnStages + stage);
  }
  // One thread; the CTA meets afterwards.
  __device__ __forceinline__ void init() const {
    ptx::mbarrier_init(kv_empty(), 4 * Config::kConsumers);
    for (int i = 0; i < Config::kTileSlots; ++i) {
      ptx::mbarrier_init(tile_full(i), 1);
      // The consumers' warps, that of the statistics and those of the turns.
      ptx::mbarrier_init(tile_empty(i), 4 * Config::kConsumers + (Config::kInOrder ? 3 : 1));
    }
    for (int s = 0; s < Config::kDsStages; ++s) {
      ptx::mbarrier_init(ds_full(s), 4 * Config::kConsumers);
    }
    for (int s = 0; Config::kInOrder && s < Config::kTurnStages; ++s) {
      ptx::mbarrier_init(turn(s), 1);
      ptx::mbarrier_init(added(s), 4 * Config::kConsumers);
      ptx::mbarrier_init(told(s), 1);
    }
    BwdDkvBarriers<Config>::init();
  }
};

// Which tiles there are, and the counter they are drawn from, a CTA's next one when it has loaded
// one; with kInOrder a CTA has the tile of its number.
struct BwdFusedTiles {
  TileOrder order;
  uint32_t* counter;  // 0 at the launch
};

// Numbers of tiles on their way from the loader to everybody else, through slots in shared memory;
// -1 at the end. Each reader has a queue of its own, at its own place.
template <typename Config>
class BwdFusedQueue {
 public:
  __device__ __forceinline__ explicit BwdFusedQueue(uint32_t smem)
      : slots(smem + Config::kOffsetTiles), barriers{smem + Config::kOffsetBarriers} {}

  // One thread.
  __device__ __forceinline__ void push(int tile) {
    ptx::mbarrier_wait(barriers.tile_empty(ring.stage()), ring.phase() ^ 1);
    ptx::st_shared_b32(slots + 4 * ring.stage(), static_cast<uint32_t>(tile));
    ptx::mbarrier_arrive(barriers.tile_full(ring.stage()));
    ring.advance();
  }

  // A warp.
  __device__ __forceinline__ int next() {
    ptx::mbarrier_wait(barriers.tile_full(ring.stage()), ring.phase());
    const int tile = ptx::uniform(static_cast<int>(ptx::ld_shared_b32(slots + 4 * ring.stage())));
    __syncwarp();  // every lane has read
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barriers.tile_empty(ring.stage()));
    ring.advance();
    return tile;
  }

 private:
  const uint32_t slots;
  const BwdFusedBarriers<Config> barriers;
  RingState<Config::kTileSlots> ring;
};

// What a CTA does for a tile.
struct BwdFusedWork : BwdDkvWork {
  int32_t n_block;
  // kInOrder: query blocks from there on see nothing before this key block, and those below see
  // nothing behind it.
  int32_t first_from = 0, last_below = 0;

  __device__ __forceinline__ bool is_first(int m_block) const { return m_block >= first_from; }
  __device__ __forceinline__ bool is_last(int m_block) const { return m_block < last_below; }

  template <typename Config>
  __device__ __forceinline__ static BwdFusedWork of(const BwdParams& params,
                                                    const BwdFusedTiles& tiles, int tile_idx) {
    const TileOrder::Tile tile = tiles.order.tile(tile_idx);
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
    BwdFusedWork work{BwdDkvWork(params, tile, kBlockM, kBlockN), tile.block};
    if (work.n0 >= work.side_k.length) work.blocks = {0, 0};
    if constexpr (Config::kInOrder) {
      work.go_down();
      const Band band(params, work.side_q.length, work.side_k.length);
      const BlockRange before = band.query_blocks(work.n0 - kBlockN, kBlockN, kBlockM);
      const BlockRange behind = band.query_blocks(work.n0 + kBlockN, kBlockN, kBlockM);
      const bool none_before = work.n0 == 0 || before.end <= before.begin;
      const bool none_behind =
          work.n0 + kBlockN >= work.side_k.length || behind.end <= behind.begin;
      work.first_from = ptx::uniform(none_before ? 0 : before.end);
      work.last_below = ptx::uniform(none_behind ? INT32_MAX : behind.begin);
    } else if (!is_masked(params)) {
      work.spread(tile.block, tiles.order.num_blocks);
    }
    return work;
  }
};

// The buffer as a launch has it.
struct BwdFusedDq {
  float* data;
  BwdDqBuffer buffer;
  uint32_t* turns;  // kInOrder: of each block, the key block whose turn it is; 0 at the launch

  // The first block of the CTA's sequence and a query head, among those of the buffer.
  __device__ __forceinline__ int64_t first_block(const BwdParams& params, const BwdDkvWork& work,
                                                 int head, int block_m) const {
    return head * buffer.blocks + buffer.first_block(params.cu_seqlens_q != nullptr, work.batch_idx,
                                                     work.side_q.start, params.seqlen_q, block_m);
  }
};

}  // namespace flashattn_ext::sm90
