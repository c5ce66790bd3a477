// The consumer warpgroups of the Hopper dK/dV kernel. Scores are transposed: rows are keys, columns
// queries.
#pragma once

#include "attention/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "sm90/bwd_dkv_config.cuh"
#include "sm90/ring.cuh"
#include "tile/gmem_copy.cuh"

namespace flashattn_ext::sm90 {

// What every consumer does: waiting for query blocks, forming P and dS, storing a gradient.
template <typename Config>
class BwdDkvConsumerBase {
 protected:
  using Element = typename Config::Element;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM;
  static constexpr int kMTiles = kBlockM / 8;  // of queries, the columns of S^T
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kRowsBarrier = 1;
  using Scores = float[1][kMTiles][4];
  using Fragments = uint32_t[kMTiles / 2][4];
  template <int kDim>
  using Gradient = float[1][kDim / 8][4];

  __device__ __forceinline__ BwdDkvConsumerBase(const BwdParams& params,
                                                const ScoreTransform& transform,
                                                const BwdDkvWork& work, uint32_t smem, int consumer,
                                                int key_group)
      : params(params),
        transform(transform),
        work(work),
        band(params, work.side_q.length, work.side_k.length),
        smem(smem),
        consumer(consumer),
        key_group(key_group),
        key0(work.n0 + 64 * key_group),
        barriers{smem + Config::kOffsetBarriers} {}

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp_in_group() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ int warp_key0() const { return key0 + 16 * warp_in_group(); }
  __device__ __forceinline__ uint32_t sQ(int stage) const {
    return smem + Config::kOffsetQ + stage * Config::kQBytes;
  }
  __device__ __forceinline__ uint32_t sDo(int stage) const {
    return smem + Config::kOffsetDo + stage * Config::kDoBytes;
  }
  // These 64 keys' rows.
  __device__ __forceinline__ uint32_t own_k() const {
    return smem + Config::kOffsetK + key_group * Config::kKRowBytes;
  }
  __device__ __forceinline__ uint32_t own_v() const {
    return smem + Config::kOffsetV + key_group * Config::kVRowBytes;
  }

  // Q of the ring's stage is there, and so are the statistics.
  __device__ __forceinline__ void await_q() const {
    ptx::mbarrier_wait(barriers.q_full(ring.stage()), ring.phase());
  }
  __device__ __forceinline__ void await_do() const {
    ptx::mbarrier_wait(barriers.do_full(ring.stage()), ring.phase());
  }

  // Of a stage that the tensor cores read: this warp's products with it are done.
  __device__ __forceinline__ static void release(uint32_t empty) {
    if (lane() == 0) ptx::mbarrier_arrive(empty);
  }
  // Of what lanes wrote: all of it is there.
  __device__ __forceinline__ static void signal(uint32_t full) {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(full);
  }

  // Accumulator tile j as its half of an A fragment.
  __device__ __forceinline__ static void pack(Fragments& a, int j, const float (&x)[4]) {
    a[j / 2][2 * (j & 1)] = ptx::pack_x2<Element>(x[0], x[1]);
    a[j / 2][2 * (j & 1) + 1] = ptx::pack_x2<Element>(x[2], x[3]);
  }

  // `s`, raw products, becomes P times the derivative of the softcap where there is one; `p` is P
  // in 16 bits, with kPack.
  template <bool kInPlace, bool kPack = true>
  __device__ __forceinline__ void form_p(Fragments& p, Scores& s, int stage, int m0) const {
    if constexpr (kInPlace) transform.apply(s);
    if (__any_sync(0xffffffffu, !band.covers(m0, kBlockM, warp_key0(), 16))) hide(s, m0);
    exponentiate<kInPlace, kPack>(p, s, stage);
  }

  // What the band hides in scores of queries from m0 on becomes -inf.
  __device__ __forceinline__ void hide(Scores& s, int m0) const {
    apply_mask_transposed(s, band, warp_key0(), m0, lane());
  }

  // The same of logits that are masked already.
  template <bool kInPlace, bool kPack>
  __device__ __forceinline__ void exponentiate(Fragments& p, Scores& s, int stage) const {
    const uint32_t sLse =
        smem + Config::kOffsetLse + 4 * (stage * kBlockM + tile::acc_col(lane(), 0));
#pragma unroll
    for (int j = 0; j < kMTiles; ++j) {
      const float2 lse_log2 = ptx::ld_shared_v2(sLse + 32 * j);
      float d_logit[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float logit = s[0][j][e];
        s[0][j][e] = transform.probability(logit, (e & 1) ? lse_log2.y : lse_log2.x);
        if constexpr (kInPlace) {
          d_logit[e] =
              transform.softcap > 0.0f ? transform.softcap_d_logit(s[0][j][e], logit) : s[0][j][e];
        }
      }
      if constexpr (kPack) pack(p, j, s[0][j]);
      if constexpr (kInPlace) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[0][j][e] = d_logit[e];
      }
    }
  }

  // dS in 16 bits from dP; p_of(j, p) gives form_p's result for accumulator tile j.
  template <typename POf>
  __device__ __forceinline__ void form_ds(Fragments& ds, const float (&dp)[kMTiles][4], int stage,
                                          const POf& p_of) const {
    const uint32_t sDelta =
        smem + Config::kOffsetDelta + 4 * (stage * kBlockM + tile::acc_col(lane(), 0));
#pragma unroll
    for (int j = 0; j < kMTiles; ++j) {
      const float2 delta = ptx::ld_shared_v2(sDelta + 32 * j);
      float x[4];
      p_of(j, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= dp[j][e] - ((e & 1) ? delta.y : delta.x);
      pack(ds, j, x);
    }
  }

  // The same from P of this consumer, in `s`; with kPackLate `p` becomes P in 16 bits as well.
  template <bool kPackLate>
  __device__ __forceinline__ void form_own_ds(Fragments& ds, Fragments& p, const Scores& s,
                                              const float (&dp)[kMTiles][4], int stage) const {
    form_ds(ds, dp, stage, [&](int j, float(&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = s[0][j][e];
      if constexpr (kPackLate) pack(p, j, x);
    });
  }

  // Starts S^T or dP^T (64 keys, kBlockM queries) of a stage.
  __device__ __forceinline__ void start_s(float (&acc)[kMTiles][4], int stage) const {
    start_scores<kHeadDim>(acc, own_k(), sQ(stage));
  }
  __device__ __forceinline__ void start_dp(float (&acc)[kMTiles][4], int stage) const {
    start_scores<kHeadDimV>(acc, own_v(), sDo(stage));
  }

  // dV leaves through these keys' rows of K, and dK through those of V and, where they are shorter,
  // what follows, once all warps of the consumer are done with them: where consumers share keys,
  // the one that sums dV alone reads K, and is done with Q when P is there.
  __device__ __forceinline__ void store_dv(Gradient<kHeadDimV>& acc) const {
    store_dv(acc, own_k() + warp_in_group() * kWarpBytes<kHeadDimV>);
  }
  __device__ __forceinline__ void store_dk(Gradient<kHeadDim>& acc) const {
    static_assert(Config::kRoles || kHeadDimV == kHeadDim);
    store_dk(acc, own_v() + warp_in_group() * kWarpBytes<kHeadDim>);
  }
  // Through 16 rows of shared memory, this warp's.
  __device__ __forceinline__ void store_dv(Gradient<kHeadDimV>& acc, uint32_t staging) const {
    store<kHeadDimV>(acc, 1.0f, staging, params.dv, params.dv_strides, params.head_dim_v);
  }
  __device__ __forceinline__ void store_dk(Gradient<kHeadDim>& acc, uint32_t staging) const {
    store<kHeadDim>(acc, transform.softmax_scale, staging, params.dk, params.dk_strides,
                    params.head_dim);
  }
  __device__ __forceinline__ void await_rows() const {
    ptx::named_barrier_sync(kRowsBarrier + consumer, 128);
  }

 private:
  template <int kDim>
  static constexpr uint32_t kWarpBytes = tile::SmemLayout<kDim>::tile_bytes(16);

  template <int kDim>
  __device__ __forceinline__ void start_scores(float (&acc)[kMTiles][4], uint32_t rows,
                                               uint32_t queries) const {
    // Of unknown origin: the descriptors of its sixteenths are made here and not kept in registers.
    start_xyt<Element, kDim>(acc, ptx::uniform(ptx::opaque(rows)), Config::kRowChunkBytes, queries,
                             Config::kQChunkBytes);
  }

  template <int kDim>
  __device__ __forceinline__ void store(Gradient<kDim>& acc, float factor, uint32_t staging,
                                        void* gradient, const Strides& strides,
                                        int valid_cols) const {
    Element* to = head_ptr(static_cast<Element*>(gradient), strides, work.batch_idx,
                           work.side_k.start + warp_key0(), work.kv_head_idx);
    tile::store_rows<Element, 1, kDim>(acc, factor, staging, to, strides.row,
                                       work.side_k.length - warp_key0(), valid_cols, lane());
  }

 protected:
  const BwdParams& params;
  const ScoreTransform& transform;
  const BwdDkvWork& work;
  const Band band;
  const uint32_t smem;
  const int consumer, key_group;
  const int key0;  // first key
  const BwdDkvBarriers<Config> barriers;
  RingState<Config::kStages> ring;
};

// Sums dK and dV of 64 keys of its own. P and dS never leave its registers, and no consumer waits
// for the other.
template <typename Config>
class BwdDkvConsumer : BwdDkvConsumerBase<Config> {
  using Base = BwdDkvConsumerBase<Config>;
  using Base::kBlockM, Base::kMTiles;
  using Base::sQ, Base::sDo, Base::await_q, Base::await_do, Base::release, Base::start_s,
      Base::start_dp;
  using Base::work, Base::band, Base::transform, Base::barriers, Base::ring, Base::key0;
  using typename Base::Element, typename Base::Fragments, typename Base::Scores;

 public:
  __device__ __forceinline__ BwdDkvConsumer(const BwdParams& params,
                                            const ScoreTransform& transform, const BwdDkvWork& work,
                                            uint32_t smem, int consumer)
      : Base(params, transform, work, smem, consumer, consumer),
        own(uniform(key0 < work.side_k.length ? band.query_blocks(key0, 64, kBlockM)
                                              : BlockRange{0, 0})),
        block(ptx::uniform(work.blocks.end - 1)),
        remaining(ptx::uniform(work.num_steps())) {}

  __device__ __forceinline__ void run() {
    tile::clear(acc_dk);
    tile::clear(acc_dv);
    if (next_own()) {
      ptx::mbarrier_wait(barriers.k_full(), 0);
      start_s(acc_s[0], ring.stage());
      ptx::mbarrier_wait(barriers.v_full(), 0);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s[0]);
      if (transform.in_place) {
        walk<true>();
      } else {
        walk<false>();
      }
    }
    this->await_rows();
    this->store_dv(acc_dv);
    this->store_dk(acc_dk);
  }

 private:
  // From the first block of these keys' own, whose S is done, to the last.
  template <bool kInPlace>
  __device__ __forceinline__ void walk() {
    bool more = true;
    Fragments p, ds;
#pragma unroll 1
    while (more) {
      const int stage = ring.stage();
      await_do();
      const auto start_dv = [&] {
        start_wz<Element>(acc_dv[0], p, sDo(stage), Config::kQChunkBytes);
      };
      // Long blocks leave no registers for P in 16 bits beside dP; with a softcap P and its
      // derivative are two things, and dP waits until dV has taken P.
      constexpr bool kPackLate = !kInPlace && kBlockM > 64;
      if constexpr (!kInPlace) start_dp(acc_dp, stage);
      this->template form_p<kInPlace, !kPackLate>(p, acc_s, stage, block * kBlockM);
      if constexpr (kInPlace) {
        start_dv();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(acc_dv[0]);
        ptx::wgmma_pin(p);
        start_dp(acc_dp, stage);
      }
      // The next block, whose S is the last product of this step. Waiting for it here keeps the
      // exponentials ahead of the next wait.
      ring.advance();
      more = next_own();
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_dp);
      this->template form_own_ds<kPackLate>(ds, p, acc_s, acc_dp, stage);
      if constexpr (!kInPlace) start_dv();
      start_wz<Element>(acc_dk[0], ds, sQ(stage), Config::kQChunkBytes);
      // Behind the last block of whatever lies there, and nobody reads it.
      start_s(acc_s[0], ring.stage());
      if constexpr (!kInPlace) {
        ptx::wgmma_wait<2>();
        ptx::wgmma_pin(acc_dv[0]);
        ptx::wgmma_pin(p);
      }
      release(barriers.do_empty(stage));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_dk[0]);
      ptx::wgmma_pin(ds);
      ptx::wgmma_pin(acc_s[0]);
      ptx::mbarrier_arrive(barriers.q_empty(stage));  // with the statistics: each lane
    }
  }

  // Goes to the next of the CTA's blocks that sees something of these keys and waits for its Q;
  // false where none is left. Stages of the others are given back as they come.
  __device__ __forceinline__ bool next_own() {
    while (remaining > 0) {
      --remaining;
      block = work.block_after(block);
      await_q();
      if (block >= own.begin && block < own.end) return true;
      ptx::mbarrier_arrive(barriers.q_empty(ring.stage()));
      await_do();
      release(barriers.do_empty(ring.stage()));
      ring.advance();
    }
    return false;
  }

  const BlockRange own;  // of the CTA's query blocks, those that see something of these keys
  int block;             // of its query head
  int remaining;         // blocks behind this one, over the group

  Scores acc_s;  // S^T, then P^T
  float acc_dp[kMTiles][4];
  typename Base::template Gradient<Config::kHeadDim> acc_dk;
  typename Base::template Gradient<Config::kHeadDimV> acc_dv;
};

// One of two consumers with the same 64 keys: a query block is a product of (64 keys, kBlockM)
// scores and one that adds to the gradient, the next block's scores running behind it. P changes
// hands in fp32, in accumulator order, through a stage of shared memory. kDim: of the gradient.
template <typename Config, int kDim>
class BwdDkvRoleConsumer : protected BwdDkvConsumerBase<Config> {
 protected:
  using Base = BwdDkvConsumerBase<Config>;
  using Base::kBlockM, Base::kMTiles;
  using Base::sQ, Base::sDo, Base::await_q, Base::await_do, Base::release, Base::start_s,
      Base::start_dp;
  using Base::work, Base::transform, Base::barriers, Base::ring;
  using typename Base::Element, typename Base::Fragments, typename Base::Scores;

  __device__ __forceinline__ BwdDkvRoleConsumer(const BwdParams& params,
                                                const ScoreTransform& transform,
                                                const BwdDkvWork& work, uint32_t smem, int consumer)
      : Base(params, transform, work, smem, consumer, 0) {
    tile::clear(acc);
  }

  // This lane's four elements of accumulator tile j of P.
  __device__ __forceinline__ uint32_t p_address(int stage, int j) const {
    return this->smem + Config::kOffsetScores + stage * Config::kPBytes +
           16 * (128 * j + threadIdx.x % 128);
  }

  Scores acc_s;  // S^T, then P^T; or dP^T
  typename Base::template Gradient<kDim> acc;
};

// Forms P and sums dV.
template <typename Config>
class BwdDvConsumer : BwdDkvRoleConsumer<Config, Config::kHeadDimV> {
  using Base = BwdDkvRoleConsumer<Config, Config::kHeadDimV>;
  using Base::kBlockM, Base::kMTiles;
  using Base::sQ, Base::sDo, Base::await_q, Base::await_do, Base::release, Base::start_s,
      Base::start_dp;
  using Base::work, Base::transform, Base::barriers, Base::ring, Base::acc_s, Base::acc;
  using typename Base::Element, typename Base::Fragments;

 public:
  __device__ __forceinline__ BwdDvConsumer(const BwdParams& params, const ScoreTransform& transform,
                                           const BwdDkvWork& work, uint32_t smem)
      : Base(params, transform, work, smem, 0) {}

  __device__ __forceinline__ void run() {
    if (work.num_steps() > 0) {
      ptx::mbarrier_wait(barriers.k_full(), 0);
      await_q();
      start_s(acc_s[0], ring.stage());
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s[0]);
      if (transform.in_place) {
        walk<true>();
      } else {
        walk<false>();
      }
    }
    this->await_rows();
    this->store_dv(acc);
  }

 private:
  template <bool kInPlace>
  __device__ __forceinline__ void walk() {
    int block = work.blocks.begin;
#pragma unroll 1
    for (int steps = work.num_steps(); steps > 0; --steps) {
      const int stage = ring.stage();
      Fragments p;
      this->template form_p<kInPlace>(p, acc_s, stage, block * kBlockM);
      ptx::mbarrier_wait(barriers.p_empty(stage), ring.phase() ^ 1);  // fresh barriers let pass
#pragma unroll
      for (int j = 0; j < kMTiles; ++j) {
        const float(&x)[4] = acc_s[0][j];
        ptx::st_shared_v4(this->p_address(stage, j), make_float4(x[0], x[1], x[2], x[3]));
      }
      ptx::mbarrier_arrive(barriers.p_full(stage));
      ptx::mbarrier_arrive(barriers.q_empty(stage));  // the other consumer is the last to need Q
      await_do();
      start_wz<Element>(acc[0], p, sDo(stage), Config::kQChunkBytes);
      ring.advance();
      block = work.block_after(block);
      if (steps > 1) await_q();
      // Behind the last block of whatever lies there, and nobody reads it.
      start_s(acc_s[0], ring.stage());
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(acc[0]);
      ptx::wgmma_pin(p);
      release(barriers.do_empty(stage));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s[0]);
    }
  }
};

// Forms dS from the other's P and sums dK.
template <typename Config>
class BwdDkConsumer : BwdDkvRoleConsumer<Config, Config::kHeadDim> {
  using Base = BwdDkvRoleConsumer<Config, Config::kHeadDim>;
  using Base::sQ, Base::sDo, Base::await_q, Base::await_do, Base::release, Base::start_s,
      Base::start_dp;
  using Base::work, Base::barriers, Base::ring, Base::acc_s, Base::acc;
  using typename Base::Element, typename Base::Fragments;

 public:
  __device__ __forceinline__ BwdDkConsumer(const BwdParams& params, const ScoreTransform& transform,
                                           const BwdDkvWork& work, uint32_t smem)
      : Base(params, transform, work, smem, 1) {}

  __device__ __forceinline__ void run() {
    if (work.num_steps() > 0) {
      ptx::mbarrier_wait(barriers.v_full(), 0);
      await_q();
      await_do();
      start_dp(acc_s[0], ring.stage());
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s[0]);
      walk();
    }
    this->await_rows();
    this->store_dk(acc);
  }

 private:
  __device__ __forceinline__ void walk() {
#pragma unroll 1
    for (int steps = work.num_steps(); steps > 0; --steps) {
      const int stage = ring.stage();
      Fragments ds;
      ptx::mbarrier_wait(barriers.p_full(stage), ring.phase());
      this->form_ds(ds, acc_s[0], stage, [&](int j, float(&x)[4]) {
        const float4 p = ptx::ld_shared_v4(this->p_address(stage, j));
        x[0] = p.x, x[1] = p.y, x[2] = p.z, x[3] = p.w;
      });
      ptx::mbarrier_arrive(barriers.p_empty(stage));
      release(barriers.do_empty(stage));  // the other consumer is the last to need dO
      start_wz<Element>(acc[0], ds, sQ(stage), Config::kQChunkBytes);
      ring.advance();
      if (steps > 1) {
        await_q();
        await_do();
      }
      // Behind the last block of whatever lies there, and nobody reads it.
      start_dp(acc_s[0], ring.stage());
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(acc[0]);
      ptx::wgmma_pin(ds);
      ptx::mbarrier_arrive(barriers.q_empty(stage));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s[0]);
    }
  }
};

}  // namespace flashattn_ext::sm90
