// Hopper fused backward kernel: the dK/dV kernel (bwd_dkv_kernel.cuh) whose CTAs also add what their
// keys give of dQ to a buffer in fp32. S and dP are computed once: five products instead of the
// seven of two kernels.
//
// Grid:   one-dimensional, in the order of attention/tile_order.h. Without a mask each CTA of a head
//         starts at another query block, so that they add to different places of the buffer, which
//         was zero, and bwd_dq_convert.cuh makes dQ of it. With kInOrder they come to each query
//         block one after the other, from the first key block to the last: the first stores, others
//         add, and the last makes dQ of the sum. CTAs are launched in that order, so none waits for
//         one that has not begun; and they go from the last query block to the first, so that those
//         of a causal problem, too, meet where they begin.
// Roles:  those of the dK/dV kernel with 64 keys to a consumer. The two consumers take turns: one
//         queues its products of a step while the other forms P and dS. With kInOrder, threads 64
//         and 96 wait for other CTAs and tell them.
// Shared: that of the dK/dV kernel, a block of the buffer, and three stages of dS, rows being queries: dQ needs the keys of
//         both consumers. Consumer w computes the w-th piece of 64 x 64 of a step's dQ, and does it
//         a step later, when both halves of dS have been there for a while.
// Barriers beside those of the dK/dV kernel:
//         mbarrier ds_full[s]  8          both consumers' warps have written dS of stage s. To have
//                                         waited for dS of a step says as well that both are done
//                                         with dQ of two steps before, whose stage is next
//         turn[s]              1 [+ bytes]  kInOrder: the key blocks before this one have been at
//                                         the query block, whose dQ is this CTA's to add to; for the
//                                         last, what they have added is in shared memory
//         added[s]             8          kInOrder: both consumers' warps have added their parts
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
  // One thread; the CTA meets afterwards.
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < Config::kDsStages; ++s) {
      ptx::mbarrier_init(ds_full(s), 4 * Config::kConsumers);
    }
    for (int s = 0; s < Config::kTurnStages; ++s) {
      ptx::mbarrier_init(turn(s), 1);
      ptx::mbarrier_init(added(s), 4 * Config::kConsumers);
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
    return head * buffer.blocks +
           buffer.first_block(params.cu_seqlens_q != nullptr, work.batch_idx, work.side_q.start,
                              params.seqlen_q, block_m);
  }
};

// kInOrder: when the CTA may add to a query block's dQ, and that it has. A thread each.
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
      // The parts of the step before have been added, and shared memory is free for another sum. A
      // fresh barrier lets pass.
      ptx::mbarrier_wait(barriers.added(ring.before().stage()), ring.before().phase());
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
    head = work.kv_head_idx * work.group_size;
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
    await_turn();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_dq);
    put_dq<0>(acc_dq);
    put_dq<4>(acc_dq);
    pass_turn();
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
      await_turn();
      put_dq<0>(acc_dq);
    }
    if (more) await_q();
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(acc_dv[0]);
    ptx::wgmma_pin(p);
    release(barriers.do_empty(stage));
    // Behind the last step of whatever lies there, and nobody reads it; dP, too.
    start_scores(acc_s[0], Config::kOffsetK, sQ(ring.stage()));
    if (gDq != nullptr) {
      put_dq<4>(acc_dq);
      pass_turn();
    }
    ptx::wgmma_wait<1>();
    ptx::wgmma_pin(acc_dk[0]);
    ptx::wgmma_pin(ds);
    this->signal(barriers.q_empty(stage));  // of the statistics, too
    if (more) await_do();
    start_scores(acc_dp, Config::kOffsetV, sDo(ring.stage()));
    give_turn();

    set_place();
    ds_ring.advance();
    block = work.block_after(block);
    if (--left_in_head == 0) {
      left_in_head = work.blocks.end - work.blocks.begin;
      ++head;
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
    const int64_t place = dq.first_block(this->params, work, head, kBlockM) + block;
    gDq = dq.data + place * dq.buffer.block_floats + consumer * BwdDqBuffer::kPieceFloats +
          4 * (threadIdx.x % 128);
    if constexpr (Config::kInOrder) {
      const BlockRange keys = band.key_blocks(block * kBlockM, kBlockM, Config::kBlockN);
      const int n_block = work.n0 / Config::kBlockN;
      is_first = n_block == keys.begin;
      is_last = n_block == keys.end - 1;
      put_block = block;
      put_head = head;
    }
  }

  // Half of the piece: groups of columns from kFirst on.
  template <int kFirst>
  __device__ __forceinline__ void put_dq(float (&acc)[8][4]) const {
    if (Config::kInOrder && is_last) {
      finish_dq<kFirst>(acc);
    } else {
#pragma unroll
      for (int j = kFirst; j < kFirst + 4; ++j) {
        if (Config::kInOrder && is_first) {
          *group(j) = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
        } else {
          ptx::red_add_v4(gDq + 512 * j, acc[j]);
        }
      }
    }
  }

  // The sum is complete with these columns: to rows of 16 bits.
  template <int kFirst>
  __device__ __forceinline__ void finish_dq(float (&acc)[8][4]) const {
    if (!is_first) {
      const uint32_t sum = smem + Config::kOffsetSum + 4 * consumer * BwdDqBuffer::kPieceFloats +
                           16 * (threadIdx.x % 128);
#pragma unroll
      for (int j = kFirst; j < kFirst + 4; ++j) {
        const float4 x = ptx::ld_shared_v4(sum + 2048 * j);
        acc[j][0] += x.x, acc[j][1] += x.y, acc[j][2] += x.z, acc[j][3] += x.w;
      }
    }
    const BwdParams& params = this->params;
    const int lane = this->lane();
    const int col = 64 * (consumer % Config::kChunks) + 8 * (kFirst + lane % 4);
    const float scale = transform.softmax_scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float(&pair)[4] = acc[kFirst + j];
        x[j] = ptx::pack_x2<Element>(scale * pair[2 * half], scale * pair[2 * half + 1]);
      }
      tile::transpose_quad(x, lane);
      const int row = put_block * kBlockM + 64 * (consumer / Config::kChunks) +
                      16 * this->warp_in_group() + tile::acc_row(lane, 2 * half);
      if (row < work.side_q.length && col < params.head_dim) {
        Element* to = head_ptr(static_cast<Element*>(params.dq), params.dq_strides, work.batch_idx,
                               work.side_q.start + row, put_head);
        *reinterpret_cast<uint4*>(to + col) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }

  // This thread's four elements of a group of columns.
  __device__ __forceinline__ float4* group(int j) const {
    return reinterpret_cast<float4*>(gDq + 512 * j);
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
  int head;               // of the queries
  float* gDq = nullptr;   // this thread's place of the step before
  // kInOrder, of the step before: this is the first or the last CTA at its query block.
  bool is_first = false, is_last = false;
  int put_block = 0, put_head = 0;
  RingState<Config::kTurnStages> turn_ring;

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
  if (Config::kInOrder) {
    work.go_down();
  } else if (!masked) {
    work.spread(tile.block, order.num_blocks);
  }

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
      if constexpr (Config::kInOrder) {
        BwdFusedTurns<Config> turns(params, work, dq, smem);
        if (threadIdx.x == 64) turns.await();
        if (threadIdx.x == 96) turns.pass_on();
      }
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegs>();
    BwdFusedConsumer<Config>(params, transform, work, dq, smem, warpgroup_idx - 1).run();
  }
#endif
}

}  // namespace flashattn_ext::sm90
