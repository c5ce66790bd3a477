// Hopper fused backward kernel: the dK/dV kernel (bwd_dkv_kernel.cuh) whose CTAs also add what their
// keys give of dQ to a buffer in fp32. S and dP are computed once: five products instead of the
// seven of two kernels. bwd_dq_convert.cuh makes dQ of the buffer.
//
// Grid:   one-dimensional, in the order of attention/tile_order.h. Without a mask each CTA of a head
//         starts at another query block, so that they add to different places of the buffer; with
//         kInOrder they add to each place one after the other, from the last key block to the first.
// Roles:  those of the dK/dV kernel with 64 keys to a consumer. The two consumers take turns: one
//         queues its products of a step while the other forms P and dS.
// Shared: that of the dK/dV kernel, and three stages of dS, rows being queries: dQ needs the keys of
//         both consumers. Consumer w computes the w-th piece of 64 x 64 of a step's dQ, and does it
//         a step later, when both halves of dS have been there for a while.
// Barriers beside those of the dK/dV kernel:
//         mbarrier ds_full[s]  8          both consumers' warps have written dS of stage s. To have
//                                         waited for dS of a step says as well that both are done
//                                         with dQ of two steps before, whose stage is next
//         named 1              consumers  rows behind a packed sequence's end are zero in K and V;
//                                         both are done with K, whose rows dV takes
//         named 2 + w          consumers  consumer w's turn: the other has queued its products
// Math:   as there, and dQ += dS K; times scale in bwd_dq_convert.cuh.
#pragma once

#include "ptx/reduce.cuh"
#include "sm90/bwd_dkv_consumer.cuh"
#include "sm90/bwd_dkv_producer.cuh"
#include "sm90/bwd_dq_buffer.h"

namespace flashattn_ext::sm90 {

template <typename Element, int kRow, bool kInOrder_>
struct BwdFusedConfig : BwdKeyBlockConfig<Element, kBwdFusedTiles, kRow> {
  using Base = BwdKeyBlockConfig<Element, kBwdFusedTiles, kRow>;
  static constexpr bool kRoles = false, kInOrder = kInOrder_;
  static constexpr int kDsStages = Base::kTile.ds_stages;
  static constexpr uint32_t kDsChunkBytes = chunk_bytes(Base::kBlockM);
  static constexpr uint32_t kDsBytes = Base::kKeyGroups * kDsChunkBytes;
  static_assert(Base::kBlockM * Base::kHeadDim == Base::kConsumers * BwdDqBuffer::kPieceFloats);
};

template <typename Config>
struct BwdFusedBarriers : BwdDkvBarriers<Config> {
  __device__ __forceinline__ uint32_t ds_full(int stage) const {
    return this->base + 8 * (2 + 5 * Config::kStages + stage);
  }
  // One thread; the CTA meets afterwards.
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < Config::kDsStages; ++s) {
      ptx::mbarrier_init(ds_full(s), 4 * Config::kConsumers);
    }
    BwdDkvBarriers<Config>::init();
  }
};

// The buffer as a launch has it.
struct BwdFusedDq {
  float* data;
  BwdDqBuffer buffer;
  uint32_t* turns;  // kInOrder: warps that have added to a warp's part of a block, from 0 on
};

template <typename Config>
class BwdFusedConsumer : BwdDkvConsumerBase<Config> {
  using Base = BwdDkvConsumerBase<Config>;
  using Base::kBlockM, Base::kMTiles, Base::kHeadDim;
  using Base::sQ, Base::sDo, Base::await_q, Base::await_do, Base::release, Base::start_scores;
  using Base::work, Base::band, Base::transform, Base::ring, Base::key0, Base::consumer, Base::smem;
  using typename Base::Element, typename Base::Fragments, typename Base::Gradient,
      typename Base::Scores;
  static constexpr int kBothBarrier = 1, kTurnBarrier = 2, kBothThreads = 128 * Config::kConsumers;
  // Long blocks leave no registers for P in 16 bits beside dP.
  static constexpr bool kPackLate = kBlockM > 64;

 public:
  __device__ __forceinline__ BwdFusedConsumer(const BwdParams& params,
                                              const ScoreTransform& transform,
                                              const BwdDkvWork& work, const BwdFusedDq& dq,
                                              uint32_t smem, int consumer)
      : Base(params, transform, work, smem, consumer, consumer),
        dq(dq),
        barriers{smem + Config::kOffsetBarriers},
        block(work.first_block),
        remaining(ptx::uniform(work.num_steps())) {}

  __device__ __forceinline__ void run() {
    tile::clear(acc_dk);
    tile::clear(acc_dv);
    if (remaining > 0) {
      ptx::mbarrier_wait(barriers.k_full(), 0);
      ptx::mbarrier_wait(barriers.v_full(), 0);
      zero_tail();
      await_q();
      start_scores(acc_s[0], Config::kOffsetK, sQ(ring.stage()));
      await_do();
      start_scores(acc_dp, Config::kOffsetV, sDo(ring.stage()));
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(acc_s[0]);
      if (consumer == 1) give_turn();  // the first is that of consumer 0
      walk();
    }
    // Both are done with K.
    ptx::named_barrier_sync(kBothBarrier, kBothThreads);
    this->store_dv(acc_dv);
    this->store_dk(acc_dk);
  }

 private:
  __device__ __forceinline__ void walk() {
    place_in_head = dq.buffer.first_block(this->params.cu_seqlens_q != nullptr, work.batch_idx,
                                          work.side_q.start, this->params.seqlen_q, kBlockM);
    place_in_head += work.kv_head_idx * static_cast<int64_t>(work.group_size) * dq.buffer.blocks;
    left_in_head = work.blocks.end - work.blocks.begin;
    // Steps without a mask have a loop of their own: the registers of masks are not theirs.
    while (remaining > 0) {
#pragma unroll 1
      while (remaining > 0 && is_open()) step<false>();
#pragma unroll 1
      while (remaining > 0 && !is_open()) step<true>();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_dp);
    if (consumer == 0) take_turn();  // the other's last; barriers are left as they were found
    float acc_dq[8][4];
    ptx::mbarrier_wait(barriers.ds_full(ds_ring.before().stage()), ds_ring.before().phase());
    start_dq(acc_dq);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_dq);
    await_order();
    add_dq<0, 8>(acc_dq);
    settle_order();
  }

  __device__ __forceinline__ bool is_open() const {
    return band.covers(block * kBlockM, kBlockM, key0, 64);
  }

  // S of this step is there and dP is queued; at the end both are so of the next.
  template <bool kMasked>
  __device__ __forceinline__ void step() {
    const int stage = ring.stage();
    Fragments p, ds;
    if constexpr (kMasked) this->hide(acc_s, block * kBlockM);
    this->template exponentiate<false, !kPackLate>(p, acc_s, stage);
    // Keeps the exponentials ahead of the next wait, and lets pass: a step has gone by.
    ptx::mbarrier_wait(barriers.ds_full(ds_ring.before().stage()), ds_ring.before().phase());
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_dp);
    this->form_ds(ds, acc_dp, stage, [&](int j, float(&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = acc_s[0][j][e];
      if constexpr (kPackLate) this->pack(p, j, x);
    });
    store_ds(ds);

    take_turn();
    float acc_dq[8][4];
    start_dq(acc_dq);  // in the first step of whatever lies there, and nobody reads it
    start_wz<Element>(acc_dv[0], p, sDo(stage), Config::kQChunkBytes);
    start_wz<Element>(acc_dk[0], ds, sQ(stage), Config::kQChunkBytes);
    const bool more = --remaining > 0;
    ring.advance();
    ptx::wgmma_wait<2>();
    ptx::wgmma_pin(acc_dq);
    if (gDq != nullptr) {
      await_order();
      add_dq<0, 4>(acc_dq);
    }
    if (more) await_q();
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(acc_dv[0]);
    ptx::wgmma_pin(p);
    release(barriers.do_empty(stage));
    // Behind the last step of whatever lies there, and nobody reads it; dP, too.
    start_scores(acc_s[0], Config::kOffsetK, sQ(ring.stage()));
    if (gDq != nullptr) add_dq<4, 8>(acc_dq);
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(acc_dk[0]);
    ptx::wgmma_pin(ds);
    this->signal(barriers.q_empty(stage));  // of the statistics, too
    if (more) await_do();
    start_scores(acc_dp, Config::kOffsetV, sDo(ring.stage()));
    give_turn();

    settle_order();
    set_place();
    ds_ring.advance();
    block = work.block_after(block);
    if (--left_in_head == 0) {
      left_in_head = work.blocks.end - work.blocks.begin;
      place_in_head += dq.buffer.blocks;
    }
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(acc_s[0]);
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
                                            Config::kRowBytes);
  }

  // This thread's part of the step's piece becomes the place to add to, a step later.
  __device__ __forceinline__ void set_place() {
    const int64_t place = place_in_head + block;
    gDq = dq.data + place * dq.buffer.block_floats + consumer * BwdDqBuffer::kPieceFloats +
          4 * (threadIdx.x % 128);
    if constexpr (Config::kInOrder) {
      gTurn = dq.turns + place * (4 * Config::kConsumers) + 4 * consumer + this->warp_in_group();
      rank = band.key_blocks(block * kBlockM, kBlockM, Config::kBlockN).end - 1 -
             work.n0 / Config::kBlockN;
    }
  }

  template <int kFirst, int kEnd>
  __device__ __forceinline__ void add_dq(const float (&acc)[8][4]) const {
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j) ptx::red_add_v4(gDq + 512 * j, acc[j]);
  }

  // kInOrder: the CTAs of key blocks behind this one have added to this warp's part.
  __device__ __forceinline__ void await_order() const {
    if constexpr (Config::kInOrder) ptx::wait_for_count(gTurn, rank);
  }
  // And this one has.
  __device__ __forceinline__ void settle_order() const {
    if constexpr (Config::kInOrder) {
      __syncwarp();  // every lane has added
      if (gTurn != nullptr && this->lane() == 0) ptx::red_release_add(gTurn, 1);
    }
  }

  // Packed sequences: rows of K and V behind this sequence's end belong to the next one and may
  // hold anything; dS is 0 there, and 0 * NaN is not.
  __device__ __forceinline__ void zero_tail() const {
    const BwdParams& params = this->params;
    if (params.cu_seqlens_k == nullptr && params.seqused_k == nullptr) return;
    if (work.n0 + Config::kBlockN <= work.side_k.length) return;
    const int valid = min(max(work.side_k.length - key0, 0), 64);
    for (const uint32_t offset : {Config::kOffsetK, Config::kOffsetV}) {
      zero_rows<Config::kChunks>(this->own_rows(offset), Config::kRowChunkBytes, valid, 64,
                                 threadIdx.x % 128, 128);
    }
    // Every thread's part is zero before one of them multiplies.
    ptx::named_barrier_sync(kBothBarrier, kBothThreads);
  }

  const BwdFusedDq& dq;
  const BwdFusedBarriers<Config> barriers;
  RingState<Config::kDsStages> ds_ring;
  int block;              // of its query head
  int remaining;          // steps, this one included
  int left_in_head;       // the same of this query head
  int64_t place_in_head;  // of the sequence's first block, among the buffer's blocks
  float* gDq = nullptr;   // this thread's place of the step before
  uint32_t* gTurn = nullptr;
  int rank = 0;

  Scores acc_s;  // S^T, then P^T
  float acc_dp[kMTiles][4];
  Gradient acc_dk, acc_dv;
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    flash_bwd_fused_sm90_kernel(const __grid_constant__ BwdParams params,
                                const __grid_constant__ ScoreTransform transform,
                                const __grid_constant__ TileOrder order,
                                const __grid_constant__ BwdTensorMaps maps,
                                const __grid_constant__ BwdFusedDq dq) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const TileOrder::Tile tile = order.tile(blockIdx.x);
  BwdDkvWork work(params, tile, Config::kBlockM, Config::kBlockN);
  if (work.n0 >= work.side_k.length) return;
  const bool masked = params.window_left < kUnlimited || params.window_right < kUnlimited;
  if (!Config::kInOrder && !masked) work.spread(tile.block, order.num_blocks);

  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const uint32_t smem = ptx::smem_address(dynamic_smem);
  const BwdFusedBarriers<Config> barriers{smem + Config::kOffsetBarriers};
  const int warpgroup_idx = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();  // barriers are initialised before anybody uses them

  if (warpgroup_idx == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegs>();
    BwdDkvProducer<Config> producer(params, maps, work, smem);
    if (work.num_steps() > 0) {
      if (threadIdx.x == 0) producer.load();
      if (threadIdx.x / 32 == 1) producer.read_statistics();
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegs>();
    BwdFusedConsumer<Config>(params, transform, work, dq, smem, warpgroup_idx - 1).run();
  }
#endif
}

}  // namespace flashattn_ext::sm90
