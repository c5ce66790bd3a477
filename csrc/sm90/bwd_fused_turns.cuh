// How the CTAs of the Hopper fused backward kernel add to dQ one after the other (kInOrder). Two
// threads of the producer warpgroup see to it, so that consumers meet nothing but mbarriers.
#pragma once

#include "ptx/reduce.cuh"
#include "ptx/tma.cuh"
#include "sm90/bwd_fused_config.cuh"
#include "sm90/ring.cuh"

namespace flashattn_ext::sm90 {

// When the CTA may add to a query block's dQ, and that it has. A thread each.
template <typename Config>
class BwdFusedTurns {
  static constexpr int kBlockM = Config::kBlockM;

 public:
  __device__ __forceinline__ BwdFusedTurns(const BwdParams& params, const BwdDkvWork& work,
                                           const BwdFusedDq& dq, uint32_t smem)
      : params(params),
        work(work),
        dq(dq),
        barriers{smem + Config::kOffsetBarriers},
        sum(smem + Config::kOffsetSum),
        band(params, work.side_q.length, work.side_k.length) {}

  __device__ __forceinline__ void await() {
    const int n_block = work.n0 / Config::kBlockN;
    work.for_each_step(kBlockM, [&](int m0, int head) {
      const int64_t place = place_of(m0, head);
      const BlockRange keys = band.key_blocks(m0, kBlockM, Config::kBlockN);
      const uint32_t turn = barriers.turn(ring.stage());
      ptx::wait_for_count(dq.turns + place, n_block - keys.begin);
      // The parts of the step before have been added, and shared memory is free for another sum;
      // and who tells others of it has seen the last phase of this stage. Fresh barriers let pass.
      ptx::mbarrier_wait(barriers.added(ring.before().stage()), ring.before().phase());
      ptx::mbarrier_wait(barriers.told(ring.stage()), ring.phase() ^ 1);
      if (n_block > keys.begin && n_block == keys.end - 1) {
        ptx::fence_proxy_async_global();  // others' additions before the copy engine's reading
        ptx::mbarrier_arrive_expect_tx(turn, Config::kSumBytes);
        ptx::bulk_load(sum, dq.data + place * dq.buffer.block_floats, Config::kSumBytes, turn);
      } else {
        ptx::mbarrier_arrive(turn);
      }
      ring.advance();
    });
  }

  __device__ __forceinline__ void pass_on() {
    work.for_each_step(kBlockM, [&](int m0, int head) {
      ptx::mbarrier_wait(barriers.added(ring.stage()), ring.phase());
      ptx::red_release_add(dq.turns + place_of(m0, head), 1);
      ptx::mbarrier_arrive(barriers.told(ring.stage()));
      ring.advance();
    });
  }

 private:
  __device__ __forceinline__ int64_t place_of(int m0, int head) const {
    return dq.first_block(params, work, head, kBlockM) + m0 / kBlockM;
  }

  const BwdParams& params;
  const BwdDkvWork& work;
  const BwdFusedDq& dq;
  const BwdFusedBarriers<Config> barriers;
  const uint32_t sum;
  const Band band;
  RingState<Config::kTurnStages> ring;
};

}  // namespace flashattn_ext::sm90
