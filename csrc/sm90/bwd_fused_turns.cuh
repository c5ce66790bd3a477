// How the CTAs of the Hopper fused backward kernel add to dQ one after the other (kInOrder). Two
// warps of the producer warpgroup see to it, so that consumers meet nothing but mbarriers.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/reduce.cuh"
#include "sm90/bwd_fused_config.cuh"
#include "sm90/ring.cuh"

namespace flashattn_ext::sm90 {

// When the CTA may add to a query block's dQ, and that it has. A warp each, of which one lane
// does it.
template <typename Config>
class BwdFusedTurns {
  static constexpr int kBlockM = Config::kBlockM;

 public:
  __device__ __forceinline__ BwdFusedTurns(const BwdParams& params, const BwdFusedWork& work,
                                           const BwdFusedDq& dq, uint32_t smem)
      : params(params), work(work), dq(dq), barriers{smem + Config::kOffsetBarriers} {}

  __device__ __forceinline__ void await() {
    for_each_step([&](int m_block, int64_t place) {
      if (!work.is_first(m_block)) ptx::wait_for_count(dq.turns + place, work.rank);
      // Who tells others has seen the last phases of this stage. A fresh barrier lets pass.
      ptx::mbarrier_wait(barriers.told(ring.stage()), ring.phase() ^ 1);
      ptx::mbarrier_arrive(barriers.turn(ring.stage()));
    });
  }

  __device__ __forceinline__ void pass_on() {
    for_each_step([&](int m_block, int64_t place) {
      ptx::mbarrier_wait(barriers.added(ring.stage()), ring.phase());
      ptx::st_release(dq.turns + place, work.rank + 1);
      ptx::mbarrier_arrive(barriers.told(ring.stage()));
    });
  }

 private:
  // Calls f(query block, its place in the buffer) for every step of the CTA's tile.
  template <typename Function>
  __device__ __forceinline__ void for_each_step(const Function& f) {
    int64_t place = dq.first_block(params, work, kBlockM);
    if (threadIdx.x % 32 == 0) {
      for (int heads = work.group_size; heads > 0; --heads) {
        for (int m_block = work.blocks.begin; m_block < work.blocks.end; ++m_block) {
          f(m_block, place + m_block);
          ring.advance();
        }
        place += dq.buffer.blocks;
      }
    }
    __syncwarp();  // the next work is not yet this one's
  }

  const BwdParams& params;
  const BwdFusedWork& work;
  const BwdFusedDq& dq;
  const BwdFusedBarriers<Config> barriers;
  RingState<Config::kTurnStages> ring;
};

}  // namespace flashattn_ext::sm90
