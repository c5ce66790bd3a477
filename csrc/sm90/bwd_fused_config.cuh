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
  static constexpr int kHeadDimV = Base::kHeadDim;
  static constexpr int kDsStages = Base::kTile.ds_stages;
  static constexpr int kTurnStages = Base::kTile.turn_stages;
  static constexpr uint32_t kDsChunkBytes = chunk_bytes(Base::kBlockM);
  static constexpr uint32_t kDsBytes = Base::kKeyGroups * kDsChunkBytes;
  // dK and dV leave through chunks of dS that their consumer alone writes, two warps to a chunk.
  static constexpr uint32_t kWarpRowBytes = 2 * 16 * Base::kHeadDim;
  static_assert(2 * kWarpRowBytes <= kDsChunkBytes && kDsStages >= 2);
  static constexpr int kTileSlots = Base::kTile.tile_slots;
  static constexpr uint32_t kOffsetTiles = Base::kOffsetEnd;
  static constexpr uint32_t kSmemBytes = kOffsetTiles + kTileSlots * Base::kTile.work_bytes;
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
      // The consumers, the warp of the statistics and those of the turns.
      ptx::mbarrier_init(tile_empty(i), 128 * Config::kConsumers + 32 * (Config::kInOrder ? 3 : 1));
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

// Which tiles there are, and the counter that CTAs draw them from.
struct BwdFusedTiles {
  TileOrder order;
  uint32_t* counter;  // 0 at the launch
};

// What a CTA does for a tile.
struct BwdFusedWork : BwdDkvWork {
  int32_t rank;  // of the tile among those of its head, in the order of the launch; -1: the end
  int32_t first_below;  // kInOrder: query blocks below see nothing behind this key block

  __device__ __forceinline__ bool is_end() const { return rank < 0; }
  // Whether this tile is the first of those that add to a query block's dQ.
  __device__ __forceinline__ bool is_first(int m_block) const { return m_block < first_below; }

  // A warp: the numbers that its lanes share.
  template <typename Config>
  __device__ __forceinline__ static BwdFusedWork of(const BwdParams& params,
                                                    const BwdFusedTiles& tiles, int tile_idx) {
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
    TileOrder::Tile tile = tiles.order.tile(tile_idx);
    const int rank = tile.block;
    if constexpr (Config::kInOrder) tile.block = tiles.order.num_blocks - 1 - rank;  // last first
    BwdFusedWork work{BwdDkvWork(params, tile, kBlockM, kBlockN), rank};
    if (work.n0 >= work.side_k.length) work.blocks = {0, 0};
    if constexpr (Config::kInOrder) {
      const Band band(params, work.side_q.length, work.side_k.length);
      const BlockRange behind = band.query_blocks(work.n0 + kBlockN, kBlockN, kBlockM);
      const bool none_behind =
          work.n0 + kBlockN >= work.side_k.length || behind.end <= behind.begin;
      work.first_below = none_behind ? INT32_MAX : behind.begin;
    } else if (!is_masked(params)) {
      work.spread(tile.block, tiles.order.num_blocks);
    }
    return work;
  }
};

static_assert(sizeof(BwdFusedWork) == BwdFusedTile::work_bytes);

// Work on its way from the loader to everybody else, through slots in shared memory. Each reader
// has a queue of its own, at its own place.
template <typename Config>
class BwdFusedQueue {
 public:
  __device__ __forceinline__ explicit BwdFusedQueue(unsigned char* smem)
      : slots(reinterpret_cast<BwdFusedWork*>(smem + Config::kOffsetTiles)),
        barriers{ptx::smem_address(smem) + Config::kOffsetBarriers} {}

  // One thread.
  __device__ __forceinline__ void push(const BwdFusedWork& work) {
    ptx::mbarrier_wait(barriers.tile_empty(ring.stage()), ring.phase() ^ 1);
    slots[ring.stage()] = work;
    ptx::mbarrier_arrive(barriers.tile_full(ring.stage()));
    ring.advance();
  }

  // A warp.
  __device__ __forceinline__ BwdFusedWork next() {
    ptx::mbarrier_wait(barriers.tile_full(ring.stage()), ring.phase());
    BwdFusedWork work = slots[ring.stage()];
    // The compiler is to know these as numbers that a warp's lanes share.
    work.rank = ptx::uniform(work.rank);
    work.n0 = ptx::uniform(work.n0);
    work.side_q = uniform(work.side_q);
    work.side_k = uniform(work.side_k);
    work.blocks = uniform(work.blocks);
    if constexpr (Config::kInOrder) {
      work.first_block = work.blocks.begin;
      work.first_below = ptx::uniform(work.first_below);
    } else {
      work.first_block = ptx::uniform(work.first_block);
    }
    ptx::mbarrier_arrive(barriers.tile_empty(ring.stage()));
    ring.advance();
    return work;
  }

 private:
  BwdFusedWork* const slots;
  const BwdFusedBarriers<Config> barriers;
  RingState<Config::kTileSlots> ring;
};

// The buffer as a launch has it.
struct BwdFusedDq {
  float* data;
  BwdDqBuffer buffer;
  uint32_t* turns;  // kInOrder: of each block, the rank whose turn it is; 0 at the launch

  // The first block of a sequence and a query head, among those of the buffer.
  __device__ __forceinline__ int64_t first_block(const BwdParams& params, int batch_idx,
                                                 int64_t start, int head, int block_m) const {
    return head * buffer.blocks + buffer.first_block(params.cu_seqlens_q != nullptr, batch_idx,
                                                     start, params.seqlen_q, block_m);
  }
  __device__ __forceinline__ int64_t first_block(const BwdParams& params, const BwdDkvWork& work,
                                                 int block_m) const {
    return first_block(params, work.batch_idx, work.side_q.start,
                       work.kv_head_idx * work.group_size, block_m);
  }
};

}  // namespace flashattn_ext::sm90
