// The consumer warpgroups of the Hopper fused backward kernel.
#pragma once

#include "ptx/reduce.cuh"
#include "sm90/bwd_dkv_consumer.cuh"
#include "sm90/bwd_fused_config.cuh"

namespace flashattn_ext::sm90 {

// Where a consumer is in the rings, from tile to tile.
template <typename Config>
struct BwdFusedPlace {
  RingState<Config::kStages> ring;
  RingState<Config::kDsStages> ds_ring;
  RingState<Config::kTurnStages> turn_ring;
  uint32_t kv_phase = 0;
};

// Sums dK and dV of 64 keys of a tile, and its piece of each step's dQ over both consumers' keys.
template <typename Config>
class BwdFusedConsumer : BwdDkvConsumerBase<Config> {
  using Base = BwdDkvConsumerBase<Config>;
  using Base::kBlockM, Base::kMTiles;
  using Base::sQ, Base::sDo, Base::await_q, Base::await_do, Base::release, Base::start_s,
      Base::start_dp;
  using Base::work, Base::band, Base::transform, Base::ring, Base::key0, Base::consumer, Base::smem;
  using typename Base::Element, typename Base::Fragments, typename Base::Scores;
  static constexpr int kBothBarrier = 1, kTurnBarrier = 2, kOwnBarrier = 4;
  static constexpr int kBothThreads = 128 * Config::kConsumers;
  // Long blocks leave no registers for P in 16 bits beside dP.
  static constexpr bool kPackLate = kBlockM > 64;

 public:
  __device__ __forceinline__ BwdFusedConsumer(const BwdParams& params,
                                              const ScoreTransform& transform,
                                              const BwdFusedWork& work, const BwdFusedDq& dq,
                                              uint32_t smem, int consumer)
      : Base(params, transform, work, smem, consumer, consumer),
        fused_work(work),
        dq(dq),
        barriers{smem + Config::kOffsetBarriers},
        block(work.first_block),
        remaining(ptx::uniform(work.num_steps())) {}

  __device__ __forceinline__ void run(BwdFusedPlace<Config>& place) {
    ring = place.ring, ds_ring = place.ds_ring, turn_ring = place.turn_ring;
    tile::clear(acc_dk);
    tile::clear(acc_dv);
    if (remaining > 0) {
      ptx::mbarrier_wait(barriers.k_full(), place.kv_phase);
      ptx::mbarrier_wait(barriers.v_full(), place.kv_phase);
      zero_tail();
      if (consumer == 1) give_turn();  // the first is that of consumer 0
      walk();
      this->signal(barriers.kv_empty());
      place.kv_phase ^= 1;
    }
    // Both are done with dS.
    ptx::named_barrier_sync(kBothBarrier, kBothThreads);
    const int warp = this->warp_in_group();
    const uint32_t staging = smem + Config::kOffsetScores + warp / 2 * Config::kDsBytes +
                             consumer * Config::kDsChunkBytes + warp % 2 * Config::kWarpRowBytes;
    this->store_dv(acc_dv, staging);
    this->store_dk(acc_dk, staging);
    // Its warps are done with chunks that the next tile's dS takes.
    ptx::named_barrier_sync(kOwnBarrier + consumer, 128);
    place.ring = ring, place.ds_ring = ds_ring, place.turn_ring = turn_ring;
  }

 private:
  __device__ __forceinline__ void walk() {
    head_dq = dq.data + dq.first_block(this->params, work, kBlockM) * dq.buffer.block_floats +
              consumer * BwdDqBuffer::kPieceFloats + 4 * (threadIdx.x % 128);
    left_in_head = work.blocks.end - work.blocks.begin;
    // A mask may leave the first or the last query block of a CTA to the other consumer's keys.
    // That is usual where blocks of queries are shorter than those of keys.
    int left_out = 0;
    if constexpr (kBlockM < Config::kBlockN) {
      if (remaining > 1 && !sees(block)) pass_first();
      if (remaining > 1 && !sees(work.blocks.end - 1)) left_out = 1;
    }

    await_q();
    start_s(acc_s[0], ring.stage());
    await_do();
    start_dp(acc_dp, ring.stage());
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(acc_s[0]);
    // Steps without a mask have a loop of their own: the registers of masks are not theirs. The
    // first and the last step queue less and are written out: a branch between products would
    // serialise them.
    const bool single = remaining - left_out == 1;
    step<true, true, false>(!single);
    if (!single) {
      while (remaining > 1 + left_out) {
#pragma unroll 1
        while (remaining > 1 + left_out && is_open()) step<false, false, false>();
#pragma unroll 1
        while (remaining > 1 + left_out && !is_open()) step<true, false, false>();
      }
      step<true, false, true>();
    } else {
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_dp);
    }
    if constexpr (kBlockM < Config::kBlockN) {
      if (left_out > 0) pass_last();
    }
    if (consumer == 0) take_turn();  // the other's last; barriers are left as they were found
    ptx::mbarrier_wait(barriers.ds_full(ds_ring.before().stage()), ds_ring.before().phase());
    finish_step_before();
  }

  __device__ __forceinline__ bool is_open() const {
    return band.covers(block * kBlockM, kBlockM, key0, 64);
  }
  __device__ __forceinline__ bool sees(int m_block) const {
    const BlockRange own = band.query_blocks(key0, 64, kBlockM);
    return key0 < work.side_k.length && own.begin <= m_block && m_block < own.end;
  }

  // S of this step is there and dP is queued; at the end both are so of the next. Without `more`
  // these are of whatever lies there, and nobody reads them.
  template <bool kMasked, bool kFirst, bool kLast>
  __device__ __forceinline__ void step(bool more = true) {
    const int stage = ring.stage();
    Fragments p, ds;
    if constexpr (kMasked) this->hide(acc_s, block * kBlockM);
    this->template exponentiate<false, !kPackLate>(p, acc_s, stage);
    // Keeps the exponentials ahead of the next wait, and lets pass: a step has gone by.
    ptx::mbarrier_wait(barriers.ds_full(ds_ring.before().stage()), ds_ring.before().phase());
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_dp);
    this->template form_own_ds<kPackLate>(ds, p, acc_s, acc_dp, stage);
    store_ds(ds);

    take_turn();
    float acc_dq[8][4];
    if constexpr (!kFirst) start_dq(acc_dq);
    start_wz<Element>(acc_dv[0], p, sDo(stage), Config::kQChunkBytes);
    start_wz<Element>(acc_dk[0], ds, sQ(stage), Config::kQChunkBytes);
    ring.advance();
    if constexpr (!kFirst) {
      ptx::wgmma_wait<2>();
      ptx::wgmma_pin(acc_dq);
      await_turn();
      put_dq<0>(acc_dq);
    }
    if (!kLast && more) await_q();
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(acc_dv[0]);
    ptx::wgmma_pin(p);
    release(barriers.do_empty(stage));
    if constexpr (!kLast) start_s(acc_s[0], ring.stage());
    if constexpr (!kFirst) {
      put_dq<4>(acc_dq);
      pass_turn();
    }
    ptx::wgmma_wait<kLast ? 0 : 1>();
    ptx::wgmma_pin(acc_dk[0]);
    ptx::wgmma_pin(ds);
    ptx::mbarrier_arrive(barriers.q_empty(stage));  // with the statistics: each lane
    if constexpr (!kLast) {
      if (more) await_do();
      start_dp(acc_dp, ring.stage());
    }
    give_turn();

    end_step();
    if constexpr (!kLast) {
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(acc_s[0]);
    }
  }

  __device__ __forceinline__ void end_step() {
    --remaining;
    set_place();
    ds_ring.advance();
    block = work.block_after(block);
    if (--left_in_head == 0) {
      left_in_head = work.blocks.end - work.blocks.begin;
      head_dq += dq.buffer.blocks * dq.buffer.block_floats;
    }
  }

  // A step whose query block sees none of these keys: the other consumer reads zeros of dS. The
  // first, which is that of no step before it, ends with its own dQ.
  __device__ __forceinline__ void pass_first() {
    pass_stages();
    take_turn();
    end_step();
    ptx::mbarrier_wait(barriers.ds_full(ds_ring.before().stage()), ds_ring.before().phase());
    finish_step_before();
    give_turn();
  }
  __device__ __forceinline__ void pass_last() {
    ptx::mbarrier_wait(barriers.ds_full(ds_ring.before().stage()), ds_ring.before().phase());
    pass_stages();
    take_turn();
    finish_step_before();
    give_turn();
    end_step();
  }
  __device__ __forceinline__ void pass_stages() {
    await_q();
    ptx::mbarrier_arrive(barriers.q_empty(ring.stage()));
    await_do();
    this->signal(barriers.do_empty(ring.stage()));
    ring.advance();
    store_ds(Fragments{});
  }

  // dQ of the step before, of which dS is there.
  __device__ __forceinline__ void finish_step_before() {
    float acc_dq[8][4];
    start_dq(acc_dq);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_dq);
    await_turn();
    put_dq<0>(acc_dq);
    put_dq<4>(acc_dq);
    pass_turn();
  }

  __device__ __forceinline__ void take_turn() const {
    ptx::named_barrier_sync(kTurnBarrier + consumer, kBothThreads);
  }
  __device__ __forceinline__ void give_turn() const {
    ptx::named_barrier_arrive(kTurnBarrier + 1 - consumer, kBothThreads);
  }

  // dS of these keys, whose fragments hold it keys by queries, to rows of queries.
  __device__ __forceinline__ void store_ds(const Fragments& ds) const {
    const int lane = this->lane();
    const int row = 8 * (lane >> 4) + (lane & 7);
    const int piece = 2 * this->warp_in_group() + (lane >> 3 & 1);
    const uint32_t address = smem + Config::kOffsetScores + ds_ring.stage() * Config::kDsBytes +
                             consumer * Config::kDsChunkBytes + 128 * row +
                             ((piece ^ (row & 7)) << 4);
#pragma unroll
    for (int kk = 0; kk < kMTiles / 2; ++kk) {
      ptx::stmatrix_x4_trans(address + kk * chunk_bytes(16), ds[kk]);
    }
    ptx::fence_proxy_async();  // the tensor cores read dS
    this->signal(barriers.ds_full(ds_ring.stage()));
  }

  // Starts this consumer's piece of the step before: acc = dS K.
  __device__ __forceinline__ void start_dq(float (&acc)[8][4]) const {
    const int piece_rows = consumer / Config::kChunks, piece_columns = consumer % Config::kChunks;
    const uint32_t sDs = smem + Config::kOffsetScores +
                         ds_ring.before().stage() * Config::kDsBytes + piece_rows * chunk_bytes(64);
    const uint32_t sK = smem + Config::kOffsetK + piece_columns * Config::kRowChunkBytes;
    start_xz<Element, Config::kBlockN / 16>(acc, ptx::uniform(ptx::opaque(sDs)),
                                            Config::kDsChunkBytes, ptx::uniform(ptx::opaque(sK)),
                                            Config::kKRowBytes);
  }

  // This thread's part of the step's piece becomes the place to add to, a step later.
  __device__ __forceinline__ void set_place() {
    gDq = head_dq + static_cast<int64_t>(block) * (kBlockM * Config::kHeadDim);
    is_first = Config::kInOrder && fused_work.is_first(block);
  }

  // Half of the piece: groups of columns from kFirst on.
  template <int kFirst>
  __device__ __forceinline__ void put_dq(const float (&acc)[8][4]) const {
#pragma unroll
    for (int j = kFirst; j < kFirst + 4; ++j) {
      if constexpr (Config::kInOrder) {
        ptx::store_or_add_v4(gDq + 512 * j, acc[j], is_first);
      } else {
        ptx::red_add_v4(gDq + 512 * j, acc[j]);
      }
    }
  }

  __device__ __forceinline__ void await_turn() const {
    if constexpr (Config::kInOrder) {
      ptx::mbarrier_wait(barriers.turn(turn_ring.stage()), turn_ring.phase());
    }
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (Config::kInOrder) {
      this->signal(barriers.added(turn_ring.stage()));
      turn_ring.advance();
    }
  }

  // Packed sequences: rows of K and V behind this sequence's end belong to the next one and may
  // hold anything; dS is 0 there, and 0 * NaN is not.
  __device__ __forceinline__ void zero_tail() const {
    const BwdParams& params = this->params;
    if (params.cu_seqlens_k == nullptr && params.seqused_k == nullptr) return;
    if (work.n0 + Config::kBlockN <= work.side_k.length) return;
    const int valid = min(max(work.side_k.length - key0, 0), 64);
    for (const uint32_t rows : {this->own_k(), this->own_v()}) {
      zero_rows<Config::kChunks>(rows, Config::kRowChunkBytes, valid, 64, threadIdx.x % 128, 128);
    }
    // Every thread's part is zero before one of them multiplies.
    ptx::named_barrier_sync(kBothBarrier, kBothThreads);
  }

  const BwdFusedWork& fused_work;
  const BwdFusedDq& dq;
  const BwdFusedBarriers<Config> barriers;
  RingState<Config::kDsStages> ds_ring;
  int block;         // of its query head
  int remaining;     // steps, this one included
  int left_in_head;  // the same of this query head
  float* head_dq;    // this thread's place of the head's first block
  // Of the step before, whose dQ comes a step later.
  float* gDq;
  bool is_first;  // of those that add there
  RingState<Config::kTurnStages> turn_ring;

  Scores acc_s;  // S^T, then P^T
  float acc_dp[kMTiles][4];
  typename Base::template Gradient<Config::kHeadDim> acc_dk, acc_dv;
};

}  // namespace flashattn_ext::sm90
