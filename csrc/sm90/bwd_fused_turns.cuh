// How the CTAs of the Hopper fused backward kernel add to dQ one after the other (kInOrder). Two
// warps of the producer warpgroup see to it, so that consumers meet nothing but mbarriers.
#pragma once

#include "ptx/reduce.cuh"
#include "ptx/tma.cuh"
#include "sm90/bwd_fused_config.cuh"
#include "sm90/ring.cuh"

namespace flashattn_ext::sm90 {

// When the CTA may add to a query block's dQ, and that it has. A warp each, of which one lane
// does it.
template <typename Config>
class BwdFusedTurns {
  static constexpr int kBlockM = Config::kBlockM;

 public:
  __device__ __forceinline__ BwdFusedTurns(const BwdParams& params, const BwdFusedTiles& tiles,
                                           const BwdFusedDq& dq, uint32_t smem)
      : params(params),
        tiles(tiles),
        dq(dq),
        barriers{smem + Config::kOffsetBarriers},
        sum(smem + Config::kOffsetSum),
        queue(smem) {}

  __device__ __forceinline__ void await() {
    for_each_step([&](const BwdFusedWork& work, int m_block, int64_t place) {
      const uint32_t turn = barriers.turn(ring.stage());
      const bool is_first = work.is_first(m_block);
      if (!is_first) ptx::wait_for_count(dq.turns + place, work.n_block);
      // The parts of the step before have been added, and shared memory is free for another sum;
      // and who tells others of it has seen the last phase of this stage. Fresh barriers let pass.
      ptx::mbarrier_wait(barriers.added(ring.before().stage()), ring.before().phase());
      ptx::mbarrier_wait(barriers.told(ring.stage()), ring.phase() ^ 1);
      if (!is_first && work.is_last(m_block)) {
        ptx::fence_proxy_async_global();  // others' additions before the copy engine's reading
        ptx::mbarrier_arrive_expect_tx(turn, Config::kSumBytes);
        ptx::bulk_load(sum, dq.data + place * dq.buffer.block_floats, Config::kSumBytes, turn);
      } else {
        ptx::mbarrier_arrive(turn);
      }
    });
  }

  __device__ __forceinline__ void pass_on() {
    for_each_step([&](const BwdFusedWork& work, int, int64_t place) {
      ptx::mbarrier_wait(barriers.added(ring.stage()), ring.phase());
      ptx::st_release(dq.turns + place, work.n_block + 1);
      ptx::mbarrier_arrive(barriers.told(ring.stage()));
    });
  }

 private:
  // Calls f(work, query block, its place in the buffer) for every step of every tile of the CTA.
  template <typename Function>
  __device__ __forceinline__ void for_each_step(const Function& f) {
    for (int tile = queue.next(); tile >= 0; tile = queue.next()) {
      const auto work = BwdFusedWork::of<Config>(params, tiles, tile);
      const int head = work.kv_head_idx * work.group_size;
      int64_t place = dq.first_block(params, work, head, kBlockM);
      if (threadIdx.x % 32 == 0) {
        for (int heads = work.group_size; heads > 0; --heads) {
          for (int m_block = work.blocks.end - 1; m_block >= work.blocks.begin; --m_block) {
            f(work, m_block, place + m_block);
            ring.advance();
          }
          place += dq.buffer.blocks;
        }
      }
      __syncwarp();  // the next work is not yet this one's
    }
  }

  const BwdParams& params;
  const BwdFusedTiles& tiles;
  const BwdFusedDq& dq;
  const BwdFusedBarriers<Config> barriers;
  const uint32_t sum;
  BwdFusedQueue<Config> queue;
  RingState<Config::kTurnStages> ring;
};

}  // namespace flashattn_ext::sm90
