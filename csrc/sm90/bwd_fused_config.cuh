// What the roles of the Hopper fused backward kernel share beside bwd_dkv_config.cuh: shared
// memory, barriers, and the buffer of dQ.
#pragma once

#include "sm90/bwd_dkv_config.cuh"
#include "sm90/bwd_dq_buffer.h"

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
  static_assert(Base::kBlockM * Base::kHeadDim == Base::kConsumers * BwdDqBuffer::kPieceFloats);
};

template <typename Config>
struct BwdFusedBarriers : BwdDkvBarriers<Config> {
  __device__ __forceinline__ uint32_t ds_full(int stage) const {
    return this->base + 8 * (2 + 5 * Config::kStages + stage);
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

// The buffer as a launch has it.
struct BwdFusedDq {
  float* data;
  BwdDqBuffer buffer;
  uint32_t* turns;  // kInOrder: of each block, CTAs that have been at it; 0 at the launch

  // The first block of the CTA's sequence and a query head, among those of the buffer.
  __device__ __forceinline__ int64_t first_block(const BwdParams& params, const BwdDkvWork& work,
                                                 int head, int block_m) const {
    return head * buffer.blocks + buffer.first_block(params.cu_seqlens_q != nullptr, work.batch_idx,
                                                     work.side_q.start, params.seqlen_q, block_m);
  }
};

}  // namespace flashattn_ext::sm90
