// Hopper dQ kernel: a CTA per (query block, head, sequence), looping over key blocks. It is the
// forward without the online softmax: P comes from the saved LSE, nothing is rescaled, and dQ is
// summed by one CTA in a fixed order (no atomics, repeatable to the bit).
//
// Grid:   one-dimensional, in the order of attention/tile_order.h.
// Roles:  warpgroup 0: the loader (thread 0). Warpgroups 1 ... kConsumers: 64 query rows each,
// whose
//         lse_log2 and delta are registers.
// Shared: Q and dO, 64 rows per consumer; k_stages of K and v_stages of V, in chunks of 64 columns
//         (chunked_tile.cuh). dQ leaves through its consumer's rows of Q.
// Barriers, mbarriers but the last two; the number is that of arrivals:
//         q_full, do_full  1 + bytes     Q, dO of all consumers have landed
//         k_full[s]        1 + bytes     K of stage s has landed; v_full[s] the same for V
//         k_empty[s]       4 kConsumers  every consumer warp is done with stage s; v_empty[s] too
//         named 1          all consumers rows behind a packed sequence's end are zero in K and V
//         named 2 + w      consumer w    rows that see no key are zero in dO; its warps are done
//         with Q,
//                                        whose rows dQ takes
// Math:   S = Q K^T, P = exp(logit - lse), dP = dO V^T, dS = P (dP - delta), dQ = scale dS K.
#pragma once

#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/score.cuh"
#include "attention/seqlen_info.cuh"
#include "attention/tile_order.h"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "sm90/bwd_params.h"
#include "sm90/chunked_tile.cuh"
#include "sm90/ring.cuh"
#include "sm90/tiles.h"
#include "sm90/uniform.cuh"
#include "tile/gmem_copy.cuh"

namespace flashattn_ext::sm90 {

template <typename Element_, int kRow>
struct BwdDqConfig {
  using Element = Element_;
  static constexpr BwdDqTile kTile = kBwdDqTiles[kRow];
  static constexpr int kHeadDim = kTile.bucket, kHeadDimV = kTile.bucket_v;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kConsumers = kTile.consumers, kBlockM = kTile.block_m();
  static constexpr int kNumThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegs = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegs = kConsumers == 2 ? 240 : 160;
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kBlockN % 16 == 0);

  static constexpr int kChunks = kTile.chunks(), kVChunks = kTile.v_chunks();
  static constexpr uint32_t kRowChunkBytes = chunk_bytes(64);  // one consumer's rows
  static constexpr uint32_t kQRowBytes = kChunks * kRowChunkBytes;
  static constexpr uint32_t kDoRowBytes = kVChunks * kRowChunkBytes;
  static constexpr uint32_t kKvChunkBytes = chunk_bytes(kBlockN);
  static constexpr uint32_t kKBytes = kChunks * kKvChunkBytes;
  static constexpr uint32_t kVBytes = kVChunks * kKvChunkBytes;

  static constexpr uint32_t kOffsetQ = 0;
  static constexpr uint32_t kOffsetDo = kConsumers * kQRowBytes;
  static constexpr uint32_t kOffsetK = kOffsetDo + kConsumers * kDoRowBytes;
  static constexpr uint32_t kOffsetV = kOffsetK + kTile.k_stages * kKBytes;
  static constexpr uint32_t kOffsetBarriers = kOffsetV + kTile.v_stages * kVBytes;
  static constexpr uint32_t kSmemBytes = kOffsetBarriers + 8 * kTile.num_barriers();
  static_assert(kSmemBytes == kTile.smem_bytes());
};

template <typename Config>
struct BwdDqBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t q_full() const { return base; }
  __device__ __forceinline__ uint32_t do_full() const { return base + 8; }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return at(0, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return at(kK, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return at(2 * kK, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return at(2 * kK + kV, stage); }

  // One thread; the CTA meets afterwards.
  __device__ __forceinline__ void init() const {
    ptx::mbarrier_init(q_full(), 1);
    ptx::mbarrier_init(do_full(), 1);
    for (int s = 0; s < kK; ++s) {
      ptx::mbarrier_init(k_full(s), 1);
      ptx::mbarrier_init(k_empty(s), 4 * Config::kConsumers);
    }
    for (int s = 0; s < kV; ++s) {
      ptx::mbarrier_init(v_full(s), 1);
      ptx::mbarrier_init(v_empty(s), 4 * Config::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  static constexpr int kK = Config::kTile.k_stages, kV = Config::kTile.v_stages;
  __device__ __forceinline__ uint32_t at(int first, int i) const {
    return base + 8 * (2 + first + i);
  }
};

// What a CTA works on.
struct BwdDqWork {
  int32_t batch_idx, head_idx, kv_head_idx;
  int32_t m0;  // first query
  SeqlenSide side_q, side_k;
  BlockRange blocks;  // key blocks, visited from the last to the first

  __device__ __forceinline__ BwdDqWork(const BwdParams& params, const TileOrder::Tile& tile,
                                       int block_m, int block_n)
      : batch_idx(tile.head / params.num_heads_q),
        head_idx(tile.head - batch_idx * params.num_heads_q),
        kv_head_idx(head_idx / (params.num_heads_q / params.num_heads_k)),
        m0(ptx::uniform(tile.block * block_m)),
        side_q(uniform(query_side(params, batch_idx))),
        side_k(uniform(key_side(params, batch_idx))),
        blocks(
            uniform(Band(params, side_q.length, side_k.length).key_blocks(m0, block_m, block_n))) {}
};

template <typename Config>
class BwdDqLoader {
 public:
  __device__ __forceinline__ BwdDqLoader(const BwdParams& params, const BwdTensorMaps& maps,
                                         const BwdDqWork& work, uint32_t smem)
      : maps(maps),
        work(work),
        batch(params.cu_seqlens_q == nullptr ? work.batch_idx : 0),
        smem(smem),
        barriers{smem + Config::kOffsetBarriers} {}

  __device__ __forceinline__ void run() {
    int n_block = work.blocks.end - 1;
    load_k(n_block);
    load_rows<Config::kChunks>(maps.q, Config::kOffsetQ, barriers.q_full());
    load_rows<Config::kVChunks>(maps.dout, Config::kOffsetDo, barriers.do_full());
    load_v(n_block);
    while (--n_block >= work.blocks.begin) {
      load_k(n_block);
      load_v(n_block);
    }
  }

 private:
  template <int kChunks>
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, uint32_t offset,
                                            uint32_t full) const {
    constexpr uint32_t kRowBytes = kChunks * Config::kRowChunkBytes;
    ptx::mbarrier_arrive_expect_tx(full, Config::kConsumers * kRowBytes);
    for (int w = 0; w < Config::kConsumers; ++w) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        ptx::tma_load_4d(smem + offset + w * kRowBytes + c * Config::kRowChunkBytes, &map, full,
                         64 * c, static_cast<int>(work.side_q.start) + work.m0 + 64 * w,
                         work.head_idx, batch);
      }
    }
  }
  __device__ __forceinline__ void load_k(int n_block) {
    const int s = k_ring.stage();
    load<Config::kChunks>(maps.k, Config::kOffsetK + s * Config::kKBytes, barriers.k_full(s),
                          barriers.k_empty(s), k_ring.phase(), n_block);
    k_ring.advance();
  }
  __device__ __forceinline__ void load_v(int n_block) {
    const int s = v_ring.stage();
    load<Config::kVChunks>(maps.v, Config::kOffsetV + s * Config::kVBytes, barriers.v_full(s),
                           barriers.v_empty(s), v_ring.phase(), n_block);
    v_ring.advance();
  }
  template <int kChunks>
  __device__ __forceinline__ void load(const CUtensorMap& map, uint32_t offset, uint32_t full,
                                       uint32_t empty, uint32_t phase, int n_block) const {
    ptx::mbarrier_wait(empty, phase ^ 1);  // a fresh barrier lets pass
    ptx::mbarrier_arrive_expect_tx(full, kChunks * Config::kKvChunkBytes);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::tma_load_4d(smem + offset + c * Config::kKvChunkBytes, &map, full, 64 * c,
                       static_cast<int>(work.side_k.start) + n_block * Config::kBlockN,
                       work.kv_head_idx, batch);
    }
  }

  const BwdTensorMaps& maps;
  const BwdDqWork& work;
  const int batch;
  const uint32_t smem;
  const BwdDqBarriers<Config> barriers;
  RingState<Config::kTile.k_stages> k_ring;
  RingState<Config::kTile.v_stages> v_ring;
};

template <typename Config>
class BwdDqConsumer {
  using Element = typename Config::Element;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  static constexpr int kNTiles = kBlockN / 8;
  static constexpr uint32_t kWarpRowBytes = tile::SmemLayout<kHeadDim>::tile_bytes(16);
  static constexpr int kTailBarrier = 1, kRowsBarrier = 2;

 public:
  __device__ __forceinline__ BwdDqConsumer(const BwdParams& params, const ScoreTransform& transform,
                                           const BwdDqWork& work, uint32_t smem, int consumer)
      : params(params),
        transform(transform),
        work(work),
        band(params, work.side_q.length, work.side_k.length),
        smem(smem),
        consumer(consumer),
        row0(work.m0 + 64 * consumer),
        barriers{smem + Config::kOffsetBarriers} {}

  __device__ __forceinline__ void run() {
    tile::clear(acc_dq);
    const int begin = work.blocks.begin, end = work.blocks.end;
    if (end > begin) {
      load_statistics();
      // This consumer's blocks, visited from `last` to `first`; the others are for other queries.
      const int last_row = min(row0 + 63, work.side_q.length - 1);
      const int last =
          ptx::uniform(max(min((band.end_key(last_row) - 1) / kBlockN, end - 1), begin));
      const int first = ptx::uniform(min(max(band.first_key(row0) / kBlockN, begin), last));
      ptx::mbarrier_wait(barriers.q_full(), 0);
      zero_tail();
      skip(end - 1 - last);
      await_k();
      start_s();
      ptx::mbarrier_wait(barriers.do_full(), 0);
      zero_blind_rows();
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s[0]);
      if (transform.in_place) {
        walk<true>(first, last);
      } else {
        walk<false>(first, last);
      }
      skip(first - begin);
    }
    store();
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp_in_group() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ int warp_row0() const { return row0 + 16 * warp_in_group(); }
  // This consumer's rows.
  __device__ __forceinline__ uint32_t sQ() const {
    return smem + Config::kOffsetQ + consumer * Config::kQRowBytes;
  }
  __device__ __forceinline__ uint32_t sDo() const {
    return smem + Config::kOffsetDo + consumer * Config::kDoRowBytes;
  }
  __device__ __forceinline__ uint32_t sK() const {
    return smem + Config::kOffsetK + k_ring.stage() * Config::kKBytes;
  }
  __device__ __forceinline__ uint32_t sV() const {
    return smem + Config::kOffsetV + v_ring.stage() * Config::kVBytes;
  }

  __device__ __forceinline__ void load_statistics() {
    const int64_t offset = work.batch_idx * params.lse_batch_stride +
                           work.head_idx * params.lse_head_stride + work.side_q.start;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row0() + tile::acc_row(lane(), 2 * half);
      const bool valid = row < work.side_q.length;
      lse_log2[half] = valid ? params.lse_log2[offset + row] : INFINITY;
      delta[half] = valid ? params.delta[offset + row] : 0.0f;
    }
  }

  // S of the blocks [first, last] in turn; S of the last is done.
  template <bool kInPlace>
  __device__ __forceinline__ void walk(int first, int last) {
#pragma unroll 1
    for (int n_block = last; n_block >= first; --n_block) {
      ptx::mbarrier_wait(barriers.v_full(v_ring.stage()), v_ring.phase());
      start_xyt<Element, Config::kHeadDimV>(acc_dp, sDo(), Config::kRowChunkBytes, sV(),
                                            Config::kKvChunkBytes);
      form_p<kInPlace>(n_block * kBlockN);
      // Waiting here for what is needed below keeps the exponentials ahead of the next wait.
      const auto this_k = k_ring;
      k_ring.advance();
      if (n_block > first) await_k();
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_dp);
      release(barriers.v_empty(v_ring.stage()));
      v_ring.advance();

      uint32_t ds[kNTiles / 2][4];
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_s[0][j][e] *= acc_dp[j][e] - delta[e >> 1];
      }
#pragma unroll
      for (int kk = 0; kk < kNTiles / 2; ++kk) {
        tile::pack_a_fragment<Element>(ds[kk], acc_s[0], kk);
      }
      start_wz<Element>(acc_dq[0], ds, smem + Config::kOffsetK + this_k.stage() * Config::kKBytes,
                        Config::kKvChunkBytes);
      start_s();  // behind the last block of whatever lies there, and nobody reads it
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(acc_dq[0]);
      ptx::wgmma_pin(ds);
      release(barriers.k_empty(this_k.stage()));
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_s[0]);
    }
  }

  // acc_s becomes P, times the derivative of the softcap where there is one.
  template <bool kInPlace>
  __device__ __forceinline__ void form_p(int n0) {
    if constexpr (kInPlace) transform.apply(acc_s);
    if (__any_sync(0xffffffffu, !band.covers(warp_row0(), 16, n0, kBlockN))) {
      apply_mask(acc_s, band, warp_row0(), n0, lane());
    }
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float logit = acc_s[0][j][e];
        float p = transform.probability(logit, lse_log2[e >> 1]);
        if constexpr (kInPlace) {
          if (transform.softcap > 0.0f) p = transform.softcap_d_logit(p, logit);
        }
        acc_s[0][j][e] = p;
      }
  }

  __device__ __forceinline__ void start_s() {
    start_xyt<Element, kHeadDim>(acc_s[0], sQ(), Config::kRowChunkBytes, sK(),
                                 Config::kKvChunkBytes);
  }

  __device__ __forceinline__ void await_k() const {
    ptx::mbarrier_wait(barriers.k_full(k_ring.stage()), k_ring.phase());
  }
  __device__ __forceinline__ static void release(uint32_t empty) {
    if (lane() == 0) ptx::mbarrier_arrive(empty);
  }

  // Gives back, as they come, the stages of blocks that these queries do not see.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      await_k();
      release(barriers.k_empty(k_ring.stage()));
      k_ring.advance();
      ptx::mbarrier_wait(barriers.v_full(v_ring.stage()), v_ring.phase());
      release(barriers.v_empty(v_ring.stage()));
      v_ring.advance();
    }
  }

  // Packed sequences: rows of K and V behind this sequence's end belong to the next one and may
  // hold anything; dS is 0 there, and 0 * NaN is not. Only the first block can reach that far.
  __device__ __forceinline__ void zero_tail() const {
    if (params.cu_seqlens_k == nullptr && params.seqused_k == nullptr) return;
    const int valid = work.side_k.length - (work.blocks.end - 1) * kBlockN;
    if (valid >= kBlockN) return;
    await_k();
    ptx::mbarrier_wait(barriers.v_full(v_ring.stage()), v_ring.phase());
    const int thread_idx = threadIdx.x - 128, num_threads = 128 * Config::kConsumers;
    zero_rows<Config::kChunks>(sK(), Config::kKvChunkBytes, valid, kBlockN, thread_idx,
                               num_threads);
    zero_rows<Config::kVChunks>(sV(), Config::kKvChunkBytes, valid, kBlockN, thread_idx,
                                num_threads);
    // Every consumer's part is zero before one multiplies.
    ptx::named_barrier_sync(kTailBarrier, num_threads);
  }

  // Rows that see no key may hold anything in dO. P is 0 there, and 0 * NaN is not.
  __device__ __forceinline__ void zero_blind_rows() const {
    const BlockRange seeing = band.seeing_rows();
    const int begin = min(max(seeing.begin - row0, 0), 64);
    const int end = min(max(seeing.end - row0, begin), 64);
    if (!__any_sync(0xffffffffu, begin > 0 || row0 + end < min(row0 + 64, work.side_q.length))) {
      return;
    }
    const int thread_idx = threadIdx.x % 128;
    zero_rows<Config::kVChunks>(sDo(), Config::kRowChunkBytes, 0, begin, thread_idx, 128);
    zero_rows<Config::kVChunks>(sDo(), Config::kRowChunkBytes, end, 64, thread_idx, 128);
    // Every warp's part is zero before one multiplies.
    ptx::named_barrier_sync(kRowsBarrier + consumer, 128);
  }

  __device__ __forceinline__ void store() {
    // All warps of this consumer are done with its rows of Q.
    ptx::named_barrier_sync(kRowsBarrier + consumer, 128);
    Element* gDq = head_ptr(static_cast<Element*>(params.dq), params.dq_strides, work.batch_idx,
                            work.side_q.start + warp_row0(), work.head_idx);
    const uint32_t staging = sQ() + warp_in_group() * kWarpRowBytes;
    tile::store_rows<Element, 1, kHeadDim>(acc_dq, transform.softmax_scale, staging, gDq,
                                           params.dq_strides.row, work.side_q.length - warp_row0(),
                                           params.head_dim, lane());
  }

  const BwdParams& params;
  const ScoreTransform& transform;
  const BwdDqWork& work;
  const Band band;
  const uint32_t smem;
  const int consumer;
  const int row0;  // this consumer's first query
  const BwdDqBarriers<Config> barriers;
  RingState<Config::kTile.k_stages> k_ring;
  RingState<Config::kTile.v_stages> v_ring;

  float lse_log2[2], delta[2];  // of this thread's rows
  float acc_s[1][kNTiles][4];   // S, then P, then dS
  float acc_dp[kNTiles][4];
  float acc_dq[1][kHeadDim / 8][4];
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    flash_bwd_dq_sm90_kernel(const __grid_constant__ BwdParams params,
                             const __grid_constant__ ScoreTransform transform,
                             const __grid_constant__ TileOrder order,
                             const __grid_constant__ BwdTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const BwdDqWork work(params, order.tile(blockIdx.x), Config::kBlockM, Config::kBlockN);
  if (work.m0 >= work.side_q.length) return;

  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const uint32_t smem = ptx::smem_address(dynamic_smem);
  const BwdDqBarriers<Config> barriers{smem + Config::kOffsetBarriers};
  const int warpgroup_idx = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();  // barriers are initialised before anybody uses them

  if (warpgroup_idx == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegs>();
    if (threadIdx.x == 0 && work.blocks.end > work.blocks.begin) {
      BwdDqLoader<Config>(params, maps, work, smem).run();
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegs>();
    BwdDqConsumer<Config>(params, transform, work, smem, warpgroup_idx - 1).run();
  }
#endif
}

}  // namespace flashattn_ext::sm90
