// What the roles of the Hopper dK/dV kernel share: the layout of shared memory, the barriers, and
// what a CTA works on.
#pragma once

#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/seqlen_info.cuh"
#include "attention/tile_order.h"
#include "ptx/mbarrier.cuh"
#include "sm90/chunked_tile.cuh"
#include "sm90/tiles.h"
#include "sm90/uniform.cuh"

namespace flashattn_ext::sm90 {

// Of every kernel with a CTA per key block: K and V; stages of Q and dO; what else the tile has in
// shared memory; stages of statistics; barriers.
template <typename Element_, const auto& kTable, int kRow>
struct BwdKeyBlockConfig {
  using Element = Element_;
  static constexpr auto kTile = kTable[kRow];
  static constexpr int kHeadDim = kTile.bucket, kBlockM = kTile.block_m;
  static constexpr int kConsumers = kTile.consumers, kBlockN = kTile.block_n();
  static constexpr int kStages = kTile.stages;
  static constexpr int kKeyGroups = kBlockN / 64;  // of 64 keys
  static constexpr int kNumThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegs = 24, kConsumerRegs = 240;
  // Consumers wait for ever for registers that the launch did not give the CTA.
  static constexpr int kLaunchRegs = 65536 / kNumThreads / 8 * 8;
  static_assert(kProducerRegs + kConsumers * kConsumerRegs <= (1 + kConsumers) * kLaunchRegs);
  static_assert(kConsumers == 2 && kHeadDim % 32 == 0 && kBlockM % 32 == 0);

  static constexpr int kChunks = kTile.chunks(), kVChunks = kTile.v_chunks();
  static constexpr uint32_t kRowChunkBytes = chunk_bytes(64);  // 64 keys
  static constexpr uint32_t kKRowBytes = kChunks * kRowChunkBytes;
  static constexpr uint32_t kVRowBytes = kVChunks * kRowChunkBytes;
  static constexpr uint32_t kQChunkBytes = chunk_bytes(kBlockM);  // of dO as well
  static constexpr uint32_t kQBytes = kChunks * kQChunkBytes;
  static constexpr uint32_t kDoBytes = kVChunks * kQChunkBytes;

  static constexpr uint32_t kOffsetK = 0;
  static constexpr uint32_t kOffsetV = kKeyGroups * kKRowBytes;
  static constexpr uint32_t kOffsetQ = kOffsetV + kKeyGroups * kVRowBytes;
  static constexpr uint32_t kOffsetDo = kOffsetQ + kStages * kQBytes;
  static constexpr uint32_t kOffsetScores = kOffsetDo + kStages * kDoBytes;
  static constexpr uint32_t kOffsetLse = kOffsetScores + kTile.scores_bytes();
  static constexpr uint32_t kOffsetDelta = kOffsetLse + 4 * kStages * kBlockM;
  static constexpr uint32_t kOffsetBarriers = kOffsetDelta + 4 * kStages * kBlockM;
  static constexpr uint32_t kOffsetEnd = kOffsetBarriers + 8 * kTile.num_barriers();
};

template <typename Element, int kRow>
struct BwdDkvConfig : BwdKeyBlockConfig<Element, kBwdDkvTiles, kRow> {
  using Base = BwdKeyBlockConfig<Element, kBwdDkvTiles, kRow>;
  static constexpr uint32_t kSmemBytes = Base::kOffsetEnd;
  static_assert(kSmemBytes == Base::kTile.smem_bytes());
  static constexpr bool kRoles = Base::kTile.roles;
  static constexpr int kHeadDimV = Base::kTile.bucket_v;
  static constexpr uint32_t kPBytes = 4 * 64 * Base::kBlockM;  // of a stage, for roles
  // With keys of its own, a consumer holds a stage while it passes over one that only the other
  // needs.
  static_assert(Base::kStages >= (kRoles ? 2 : 3));
};

template <typename Config>
struct BwdDkvBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t k_full() const { return base; }
  __device__ __forceinline__ uint32_t v_full() const { return base + 8; }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return at(0, stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return at(1, stage); }
  __device__ __forceinline__ uint32_t do_full(int stage) const { return at(2, stage); }
  __device__ __forceinline__ uint32_t do_empty(int stage) const { return at(3, stage); }
  __device__ __forceinline__ uint32_t landed(int stage) const { return at(4, stage); }
  __device__ __forceinline__ uint32_t p_full(int stage) const { return at(5, stage); }
  __device__ __forceinline__ uint32_t p_empty(int stage) const { return at(6, stage); }

  // One thread; the CTA meets afterwards.
  __device__ __forceinline__ void init() const {
    ptx::mbarrier_init(k_full(), 1);
    ptx::mbarrier_init(v_full(), 1);
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(q_full(s), 1 + 32);
      ptx::mbarrier_init(q_empty(s), 128 * Config::kConsumers);
      ptx::mbarrier_init(do_full(s), 1);
      ptx::mbarrier_init(do_empty(s), 4 * Config::kConsumers);
      ptx::mbarrier_init(landed(s), 1);
      if constexpr (Config::kRoles) {
        ptx::mbarrier_init(p_full(s), 128);
        ptx::mbarrier_init(p_empty(s), 128);
      }
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t at(int kind, int stage) const {
    return base + 8 * (2 + kind * Config::kStages + stage);
  }
};

// What a CTA works on: `blocks` of each query head of the group, from the first to the last.
struct BwdDkvWork {
  int32_t batch_idx, kv_head_idx;
  int32_t group_size;  // query heads
  int32_t n0;          // first key
  SeqlenSide side_q, side_k;
  BlockRange blocks;
  int32_t first_block;  // the walk over a head's blocks begins there and goes round
  BlockRange rows;      // of Q and dO, that may be multiplied as they are

  __device__ __forceinline__ BwdDkvWork(const BwdParams& params, const TileOrder::Tile& tile,
                                        int block_m, int block_n)
      : batch_idx(tile.head / params.num_heads_k),
        kv_head_idx(tile.head - batch_idx * params.num_heads_k),
        group_size(params.num_heads_q / params.num_heads_k),
        n0(ptx::uniform(tile.block * block_n)),
        side_q(uniform(query_side(params, batch_idx))),
        side_k(uniform(key_side(params, batch_idx))),
        blocks(
            uniform(Band(params, side_q.length, side_k.length).query_blocks(n0, block_n, block_m))),
        first_block(blocks.begin),
        rows(Band(params, side_q.length, side_k.length).seeing_rows()) {
    // Past the end of a dense tensor the copy engine reads zeros itself.
    const bool packed = params.cu_seqlens_q != nullptr || params.seqused_q != nullptr;
    if (!packed && rows.end == side_q.length) rows.end = INT32_MAX;
  }

  // The block has rows that see no key, which may hold anything in dO, or rows behind the sequence,
  // which belong to another one and may hold anything in Q, too. P is 0 there, and 0 * NaN is not.
  __device__ __forceinline__ bool has_foreign_rows(int m0, int block_m) const {
    return m0 < rows.begin || m0 + block_m > rows.end;
  }

  // The walk of this CTA, the rank-th of `count`, begins as far into the blocks.
  __device__ __forceinline__ void spread(int rank, int count) {
    const int64_t num_blocks = max(blocks.end - blocks.begin, 0);
    first_block = ptx::uniform(blocks.begin + static_cast<int>(rank * num_blocks / count));
  }

  __device__ __forceinline__ int num_steps() const {
    return max(blocks.end - blocks.begin, 0) * group_size;
  }
  __device__ __forceinline__ int block_after(int block) const {
    return block + 1 == blocks.end ? blocks.begin : block + 1;
  }

  // Calls f(m0, query head) for every step.
  template <typename Function>
  __device__ __forceinline__ void for_each_step(int block_m, const Function& f) const {
    for (int head = 0; head < group_size; ++head) {
      int block = first_block;
      for (int left = blocks.end - blocks.begin; left > 0; --left) {
        f(block * block_m, kv_head_idx * group_size + head);
        block = block_after(block);
      }
    }
  }
};

}  // namespace flashattn_ext::sm90
