// Hopper forward kernel: persistent CTAs that take (query block, head, sequence) tiles. One
// producer thread streams Q, K and V through the copy engine, into the next tile while the last one
// is being stored; each consumer warpgroup owns 64 query rows and keeps one product ahead: while
// the tensor cores multiply P(n+1) V(n+1), it computes the softmax of S(n).
//
// Grid:   at most one CTA per SM, one-dimensional. Tiles in the order of attention/tile_order.h; a
//         CTA that is done draws the next from a counter, where there are more tiles than CTAs.
// Roles:  warpgroup 0: one thread issues every copy and hands out tiles.
//         Warpgroups 1..kConsumers: the products.
// Shared: Q, 64 rows per consumer; two stages each of K and V. Each is stored as chunks of 64
//         columns (128 bytes) with the 128-byte swizzle, chunk after chunk.
// Barriers, all mbarriers but the last; the number is that of arrivals:
//         q_full[w]      1 + bytes       Q of consumer w has landed
//         q_empty[w]     4               every warp of consumer w is done reading Q
//         k_full[s]      1 + bytes       K of stage s has landed; v_full[s] the same for V
//         k_empty[s]     4 * kConsumers  every consumer warp is done with stage s; v_empty[s] too
//         tile_full[i]   1               the number of the next tile is in slot i
//         tile_empty[i]  4 * kConsumers  every consumer warp has read slot i
//         named 1        all consumers   rows behind a packed sequence's end are zero in V
// Math:   S = Q K^T; logits, mask; lazy online softmax; O += P V; O / l; lse = m + ln l.
#pragma once

#include "attention/lazy_softmax.cuh"
#include "attention/mask.cuh"
#include "attention/params.h"
#include "attention/score.cuh"
#include "attention/seqlen_info.cuh"
#include "attention/tile_order.h"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/fwd_params.h"
#include "sm90/tiles.h"
#include "tile/fragment.cuh"
#include "tile/swizzle.cuh"

namespace flashattn_ext::sm90 {

template <typename Element_, int kHeadDim_, int kBlockN_, int kConsumers_, bool kQInRegs_>
struct FwdConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr bool kQInRegs = kQInRegs_;  // Q as A fragments; else read from shared memory

  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kNumThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = FwdTile::kStages;
  static constexpr int kChunks = kHeadDim / 64;
  using ChunkLayout = tile::SmemLayout<64>;  // the copy engine's 128-byte swizzle
  static constexpr int kRowBytes = ChunkLayout::kPitchBytes;
  static_assert(kHeadDim % 64 == 0 && kBlockN % 16 == 0);
  // Registers per thread. 64K registers, a producer that needs few; measured to compile clean.
  static constexpr int kProducerRegs = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegs = kConsumers == 2 ? 232 : 160;

  static constexpr uint32_t kQChunkBytes = 64 * kRowBytes;
  static constexpr uint32_t kQBytes = kChunks * kQChunkBytes;  // one consumer's
  static constexpr uint32_t kKvChunkBytes = kBlockN * kRowBytes;
  static constexpr uint32_t kKvBytes = kChunks * kKvChunkBytes;

  static constexpr uint32_t kOffsetQ = 0;
  static constexpr uint32_t kOffsetK = kConsumers * kQBytes;
  static constexpr uint32_t kOffsetV = kOffsetK + kStages * kKvBytes;
  static constexpr uint32_t kOffsetBarriers = kOffsetV + kStages * kKvBytes;
  static constexpr int kTileSlots = 2;
  static constexpr int kNumBarriers = 2 * kConsumers + 4 * kStages + 2 * kTileSlots;
  static constexpr uint32_t kOffsetTileSlots = kOffsetBarriers + 8 * kNumBarriers;
  static constexpr uint32_t kSmemBytes = kOffsetTileSlots + 4 * kTileSlots;
};

// A position in a ring of stages: which stage, and which phase of its barriers.
template <int kStages>
struct RingState {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <typename Config>
struct FwdBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t q_full(int consumer) const { return base + 8 * consumer; }
  __device__ __forceinline__ uint32_t q_empty(int consumer) const {
    return base + 8 * (Config::kConsumers + consumer);
  }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return ring(3, stage); }
  __device__ __forceinline__ uint32_t tile_full(int slot) const { return tile_slot(0, slot); }
  __device__ __forceinline__ uint32_t tile_empty(int slot) const { return tile_slot(1, slot); }

  // One thread; the CTA meets afterwards.
  __device__ __forceinline__ void init() const {
    for (int w = 0; w < Config::kConsumers; ++w) {
      ptx::mbarrier_init(q_full(w), 1);
      ptx::mbarrier_init(q_empty(w), 4);
    }
    for (int i = 0; i < Config::kTileSlots; ++i) {
      ptx::mbarrier_init(tile_full(i), 1);
      ptx::mbarrier_init(tile_empty(i), 4 * Config::kConsumers);
    }
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(k_full(s), 1);
      ptx::mbarrier_init(v_full(s), 1);
      ptx::mbarrier_init(k_empty(s), 4 * Config::kConsumers);
      ptx::mbarrier_init(v_empty(s), 4 * Config::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t ring(int which, int stage) const {
    return base + 8 * (2 * Config::kConsumers + which * Config::kStages + stage);
  }
  __device__ __forceinline__ uint32_t tile_slot(int which, int slot) const {
    return base +
           8 * (2 * Config::kConsumers + 4 * Config::kStages + which * Config::kTileSlots + slot);
  }
};

// The tile that a CTA works on.
struct FwdTileInfo {
  int batch_idx, head_idx, kv_head_idx;
  int m0;
  SeqlenSide side_q, side_k;
  Band band;
  BlockRange blocks;  // key blocks, visited from the last to the first

  // Some query of the tile exists and sees some key. Otherwise nothing is loaded; queries that
  // exist get their zeros.
  __device__ __forceinline__ bool has_work() const {
    return m0 < side_q.length && blocks.end > blocks.begin;
  }
};

template <typename Config>
__device__ __forceinline__ FwdTileInfo fwd_tile(const FwdParams& params,
                                                const TileOrder::Tile& tile) {
  const int batch_idx = tile.head / params.num_heads_q;
  const int head_idx = tile.head - batch_idx * params.num_heads_q;
  const SeqlenSide side_q = query_side(params, batch_idx), side_k = key_side(params, batch_idx);
  const Band band(params, side_q.length, side_k.length);
  const int m0 = tile.block * Config::kBlockM;
  return {batch_idx, head_idx, head_idx / (params.num_heads_q / params.num_heads_k), m0, side_q,
          side_k,    band,     band.key_blocks(m0, Config::kBlockM, Config::kBlockN)};
}

// The producer: one thread, everything that is loaded for a tile.
template <typename Config>
class FwdProducer {
  using Ring = RingState<Config::kStages>;

 public:
  __device__ __forceinline__ FwdProducer(const FwdParams& params, const FwdTensorMaps& maps,
                                         uint32_t smem, const FwdBarriers<Config>& barriers)
      : params(params), maps(maps), smem(smem), barriers(barriers) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
  }

  // `near_end` runs once, a few blocks before the tile's last.
  template <typename NearEnd>
  __device__ __forceinline__ void load_tile(const FwdTileInfo& tile, const NearEnd& near_end) {
    // In varlen rows count through the packed tensor and the batch coordinate is 0.
    const int batch = params.cu_seqlens_q == nullptr ? tile.batch_idx : 0;
    const int q_row = static_cast<int>(tile.side_q.start) + tile.m0;
    const int k_row = static_cast<int>(tile.side_k.start);
    const auto load_kv = [&](const CUtensorMap& map, uint32_t dst, uint32_t full, uint32_t empty,
                             uint32_t phase, int n_block) {
      ptx::mbarrier_wait(empty, phase ^ 1);  // a fresh barrier lets pass
      ptx::mbarrier_arrive_expect_tx(full, Config::kKvBytes);
#pragma unroll
      for (int c = 0; c < Config::kChunks; ++c) {
        ptx::tma_load_4d(dst + c * Config::kKvChunkBytes, &map, full, 64 * c,
                         k_row + n_block * Config::kBlockN, tile.kv_head_idx, batch);
      }
    };
    const auto load_k = [&](int n_block) {
      load_kv(maps.k, smem + Config::kOffsetK + k_ring.stage * Config::kKvBytes,
              barriers.k_full(k_ring.stage), barriers.k_empty(k_ring.stage), k_ring.phase, n_block);
      k_ring.advance();
    };
    const auto load_v = [&](int n_block) {
      load_kv(maps.v, smem + Config::kOffsetV + v_ring.stage * Config::kKvBytes,
              barriers.v_full(v_ring.stage), barriers.v_empty(v_ring.stage), v_ring.phase, n_block);
      v_ring.advance();
    };

    const int first = tile.blocks.begin, last = tile.blocks.end - 1;
    load_k(last);
    for (int w = 0; w < Config::kConsumers; ++w) {
      ptx::mbarrier_wait(barriers.q_empty(w), q_phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(barriers.q_full(w), Config::kQBytes);
#pragma unroll
      for (int c = 0; c < Config::kChunks; ++c) {
        ptx::tma_load_4d(smem + Config::kOffsetQ + w * Config::kQBytes + c * Config::kQChunkBytes,
                         &maps.q, barriers.q_full(w), 64 * c, q_row + 64 * w, tile.head_idx, batch);
      }
    }
    q_phase ^= 1;
    const int near = first + min(last - first, 3);
    for (int n_block = last; n_block >= first; --n_block) {
      if (n_block == near) near_end();
      if (n_block > first) load_k(n_block - 1);
      load_v(n_block);
    }
  }

 private:
  const FwdParams& params;
  const FwdTensorMaps& maps;
  const uint32_t smem;
  const FwdBarriers<Config> barriers;
  Ring k_ring, v_ring;
  uint32_t q_phase = 0;
};

// One consumer warpgroup's products, softmax and output.
template <typename Config>
class FwdConsumer {
  using Element = typename Config::Element;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  static constexpr int kSTiles = kBlockN / 8, kOTiles = kHeadDim / 8;
  using Ring = RingState<Config::kStages>;

 public:
  __device__ __forceinline__ FwdConsumer(uint32_t smem, const FwdBarriers<Config>& barriers,
                                         int consumer, int thread_idx)
      : smem(smem),
        barriers(barriers),
        consumer(consumer),
        warp_in_group(thread_idx / 32),
        lane(thread_idx % 32),
        sQ(smem + Config::kOffsetQ + consumer * Config::kQBytes) {}

  __device__ __forceinline__ void run(const FwdParams& params, const ScoreTransform& transform,
                                      const FwdTileInfo& tile) {
    const int row0 = tile.m0 + 64 * consumer + 16 * warp_in_group;  // this warp's first query
    LazySoftmax softmax;
    float acc_o[kOTiles][4];
    tile::clear(acc_o);

    if (tile.blocks.end > tile.blocks.begin) {
      float acc_s[1][kSTiles][4];
      tile::clear(acc_s);
      uint32_t p[kSTiles / 2][4];
      load_q();
      zero_v_tail(params, tile);

      int n_block = tile.blocks.end - 1;
      start_qk(acc_s[0]);
      ptx::wgmma_wait<0>();
      finish_qk(acc_s[0]);
      softmax_step(acc_s, softmax, transform, tile.band, row0, n_block);
      pack(p, acc_s[0]);
#pragma unroll 1
      for (--n_block; n_block >= tile.blocks.begin; --n_block) {
        start_qk(acc_s[0]);
        start_pv(acc_o, p);
        ptx::wgmma_wait<1>();  // S is there; P V of the block before still runs
        finish_qk(acc_s[0]);
        softmax_step(acc_s, softmax, transform, tile.band, row0, n_block);
        ptx::wgmma_wait<0>();
        finish_pv(acc_o, p);
        pack(p, acc_s[0]);
        softmax.apply_rescale(acc_o);
      }
      // Every product with Q is done; in registers it was given back when it was loaded.
      if constexpr (!Config::kQInRegs) release_q();
      start_pv(acc_o, p);
      ptx::wgmma_wait<0>();
      finish_pv(acc_o, p);
    }
    store(params, transform, tile, softmax, acc_o, row0);
  }

 private:
  // Q as A fragments in registers, or nothing to do but wait.
  __device__ __forceinline__ void load_q() {
    ptx::mbarrier_wait(barriers.q_full(consumer), q_phase);
    q_phase ^= 1;
    if constexpr (Config::kQInRegs) {
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk) {
        const int row = 16 * warp_in_group + (lane & 15);
        const int piece = 2 * (kk % 4) + (lane >> 4);
        ptx::ldmatrix_x4(q_fragments[kk], sQ + (kk / 4) * Config::kQChunkBytes +
                                              Config::ChunkLayout::offset_bytes(row, piece));
      }
      ptx::fence_proxy_async();  // read by ldmatrix, next written by the copy engine
      __syncwarp();
      release_q();
    }
  }

  __device__ __forceinline__ void release_q() {
    if (lane == 0) ptx::mbarrier_arrive(barriers.q_empty(consumer));
  }

  // Packed sequences: rows of V behind this sequence's end belong to the next one and may hold
  // anything; P is 0 there, and 0 * NaN is not. Only the last block can reach that far.
  __device__ __forceinline__ void zero_v_tail(const FwdParams& params, const FwdTileInfo& tile) {
    const int valid = tile.side_k.length - (tile.blocks.end - 1) * kBlockN;
    if ((params.cu_seqlens_k == nullptr && params.seqused_k == nullptr) || valid >= kBlockN) return;
    ptx::mbarrier_wait(barriers.v_full(v_ring.stage), v_ring.phase);
    const int thread_idx = consumer * 128 + 32 * warp_in_group + lane;
    const uint32_t sV = smem + Config::kOffsetV + v_ring.stage * Config::kKvBytes;
    // A row of a chunk is eight 16-byte pieces; their order within the row does not matter here.
    for (int i = valid * 8 + thread_idx; i < kBlockN * 8; i += 128 * Config::kConsumers) {
#pragma unroll
      for (int c = 0; c < Config::kChunks; ++c) {
        ptx::st_shared_v4(sV + c * Config::kKvChunkBytes + 16 * i, make_float4(0, 0, 0, 0));
      }
    }
    ptx::fence_proxy_async();                              // the tensor cores read these rows next
    ptx::named_barrier_sync(1, 128 * Config::kConsumers);  // every consumer's part is zero
  }

  __device__ __forceinline__ void start_qk(float (&acc_s)[kSTiles][4]) {
    ptx::mbarrier_wait(barriers.k_full(k_ring.stage), k_ring.phase);
    const uint64_t desc_k =
        ptx::wgmma_descriptor(smem + Config::kOffsetK + k_ring.stage * Config::kKvBytes, 0);
    const uint64_t desc_q = ptx::wgmma_descriptor(sQ, 0);
    ptx::wgmma_pin(acc_s);
    if constexpr (Config::kQInRegs) ptx::wgmma_pin(q_fragments);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) {
      // Descriptors count 16-byte units: 32 bytes per step of 16 columns, then the next chunk.
      const uint64_t k_step = (kk / 4) * (Config::kKvChunkBytes >> 4) + (kk % 4) * 2;
      if constexpr (Config::kQInRegs) {
        ptx::wgmma_rs<Element, 0>(acc_s, q_fragments[kk], desc_k + k_step, kk != 0);
      } else {
        const uint64_t q_step = (kk / 4) * (Config::kQChunkBytes >> 4) + (kk % 4) * 2;
        ptx::wgmma_ss<Element>(acc_s, desc_q + q_step, desc_k + k_step, kk != 0);
      }
    }
    ptx::wgmma_commit();
  }

  // After the wait: S may be read, K's stage may be overwritten.
  __device__ __forceinline__ void finish_qk(float (&acc_s)[kSTiles][4]) {
    ptx::wgmma_pin(acc_s);
    if (lane == 0) ptx::mbarrier_arrive(barriers.k_empty(k_ring.stage));
    k_ring.advance();
  }

  __device__ __forceinline__ void start_pv(float (&acc_o)[kOTiles][4],
                                           uint32_t (&p)[kSTiles / 2][4]) {
    ptx::mbarrier_wait(barriers.v_full(v_ring.stage), v_ring.phase);
    const uint64_t desc_v = ptx::wgmma_descriptor(
        smem + Config::kOffsetV + v_ring.stage * Config::kKvBytes, Config::kKvChunkBytes);
    ptx::wgmma_pin(acc_o);
    ptx::wgmma_pin(p);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockN / 16; ++kk) {
      ptx::wgmma_rs<Element, 1>(acc_o, p[kk], desc_v + kk * ((16 * Config::kRowBytes) >> 4), 1);
    }
    ptx::wgmma_commit();
  }

  // After the wait: O and P may be touched, V's stage may be overwritten.
  __device__ __forceinline__ void finish_pv(float (&acc_o)[kOTiles][4],
                                            uint32_t (&p)[kSTiles / 2][4]) {
    ptx::wgmma_pin(acc_o);
    ptx::wgmma_pin(p);
    if (lane == 0) ptx::mbarrier_arrive(barriers.v_empty(v_ring.stage));
    v_ring.advance();
  }

  __device__ __forceinline__ void softmax_step(float (&acc_s)[1][kSTiles][4], LazySoftmax& softmax,
                                               const ScoreTransform& transform, const Band& band,
                                               int row0, int n_block) {
    transform.apply(acc_s);
    const int n0 = n_block * kBlockN;
    if (!band.covers(row0, 16, n0, kBlockN)) apply_mask(acc_s, band, row0, n0, lane);
    softmax.step(acc_s[0], transform.log2_scale);
  }

  // The accumulator layout of S is the A fragment layout of P.
  __device__ __forceinline__ void pack(uint32_t (&p)[kSTiles / 2][4],
                                       const float (&acc_s)[kSTiles][4]) {
#pragma unroll
    for (int kk = 0; kk < kSTiles / 2; ++kk) tile::pack_a_fragment<Element>(p[kk], acc_s, kk);
  }

  __device__ __forceinline__ void store(const FwdParams& params, const ScoreTransform& transform,
                                        const FwdTileInfo& tile, const LazySoftmax& softmax,
                                        const float (&acc_o)[kOTiles][4], int row0) {
    float inv_sum[2], lse[2];
    softmax.finish(inv_sum, lse, transform.log2_scale);
    const int valid_rows = tile.side_q.length - row0;
    float* gLse = params.lse + tile.batch_idx * params.lse_batch_stride +
                  tile.head_idx * params.lse_head_stride + tile.side_q.start + row0;
    Element* gO = head_ptr(static_cast<Element*>(params.out), params.out_strides, tile.batch_idx,
                           tile.side_q.start + row0, tile.head_idx);
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile::acc_row(lane, 2 * half);
      const bool valid = row < valid_rows;
      if ((lane & 3) == 0 && valid) gLse[row] = lse[half];
      // Four lanes hold a row's columns in pairs; a 4x4 transpose among them, over four 8-column
      // tiles, gives each lane 8 consecutive columns: one 16-byte store.
      Element* gRow = gO + row * params.out_strides.row + 8 * (lane & 3);
#pragma unroll
      for (int g = 0; g < kOTiles / 4; ++g) {
        uint32_t u[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u[i] = ptx::pack_x2<Element>(acc_o[4 * g + i][2 * half] * inv_sum[half],
                                       acc_o[4 * g + i][2 * half + 1] * inv_sum[half]);
        }
        const uint32_t r0 = __shfl_xor_sync(0xffffffffu, odd ? u[0] : u[1], 1);
        const uint32_t r1 = __shfl_xor_sync(0xffffffffu, odd ? u[2] : u[3], 1);
        const uint32_t ax = odd ? r0 : u[0], ay = odd ? u[1] : r0;
        const uint32_t bx = odd ? r1 : u[2], by = odd ? u[3] : r1;
        const uint32_t rx = __shfl_xor_sync(0xffffffffu, upper ? ax : bx, 2);
        const uint32_t ry = __shfl_xor_sync(0xffffffffu, upper ? ay : by, 2);
        if (valid && 32 * g + 8 * (lane & 3) < params.head_dim_v) {
          *reinterpret_cast<uint4*>(gRow + 32 * g) =
              upper ? make_uint4(rx, ry, bx, by) : make_uint4(ax, ay, rx, ry);
        }
      }
    }
  }

  const uint32_t smem;
  const FwdBarriers<Config> barriers;
  const int consumer, warp_in_group, lane;
  const uint32_t sQ;
  Ring k_ring, v_ring;
  uint32_t q_phase = 0;
  uint32_t q_fragments[Config::kQInRegs ? kHeadDim / 16 : 1][4];
};

// Which tiles a CTA takes. Static: every gridDim-th. Dynamic: the producer draws from `counter`,
// which starts at 0, and passes the numbers on through two slots in shared memory.
template <typename Config>
class TileSource {
 public:
  __device__ __forceinline__ TileSource(int32_t* counter, uint32_t smem,
                                        const FwdBarriers<Config>& barriers)
      : counter(counter), slots(smem + Config::kOffsetTileSlots), barriers(barriers) {}

  // The producer's next tile. Called a little before the current one ends, so that tiles go to
  // CTAs in the order in which these become free.
  __device__ __forceinline__ int64_t draw(int64_t tile) {
    if (counter == nullptr) return tile + gridDim.x;
    const int32_t next = static_cast<int32_t>(gridDim.x) + atomicAdd(counter, 1);
    ptx::mbarrier_wait(barriers.tile_empty(ring.stage), ring.phase ^ 1);
    ptx::st_shared_b32(slots + 4 * ring.stage, next);
    ptx::mbarrier_arrive(barriers.tile_full(ring.stage));
    ring.advance();
    return next;
  }

  // The same number, for the warps of the consumers.
  __device__ __forceinline__ int64_t follow(int64_t tile, int lane) {
    if (counter == nullptr) return tile + gridDim.x;
    ptx::mbarrier_wait(barriers.tile_full(ring.stage), ring.phase);
    const int32_t next = ptx::ld_shared_b32(slots + 4 * ring.stage);
    __syncwarp();  // every lane has read the slot before it is given back
    if (lane == 0) ptx::mbarrier_arrive(barriers.tile_empty(ring.stage));
    ring.advance();
    return next;
  }

 private:
  int32_t* const counter;
  const uint32_t slots;
  const FwdBarriers<Config> barriers;
  RingState<Config::kTileSlots> ring;
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    flash_fwd_sm90_kernel(const __grid_constant__ FwdParams params,
                          const __grid_constant__ ScoreTransform transform,
                          const __grid_constant__ TileOrder order,
                          const __grid_constant__ FwdTensorMaps maps, int32_t* tile_counter) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const uint32_t smem = ptx::smem_address(dynamic_smem);
  const FwdBarriers<Config> barriers{smem + Config::kOffsetBarriers};
  const int warpgroup_idx = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();  // barriers are initialised before anybody uses them

  TileSource<Config> source(tile_counter, smem, barriers);
  const int64_t num_tiles = order.num_tiles();
  if (warpgroup_idx == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegs>();
    if (threadIdx.x == 0) {
      FwdProducer<Config> producer(params, maps, smem, barriers);
      for (int64_t tile_idx = blockIdx.x; tile_idx < num_tiles;) {
        const FwdTileInfo tile = fwd_tile<Config>(params, order.tile(tile_idx));
        int64_t next = 0;
        if (tile.has_work()) {
          producer.load_tile(tile, [&] { next = source.draw(tile_idx); });
        } else {
          next = source.draw(tile_idx);
        }
        tile_idx = next;
      }
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegs>();
    FwdConsumer<Config> consumer(smem, barriers, warpgroup_idx - 1, threadIdx.x % 128);
    for (int64_t tile_idx = blockIdx.x; tile_idx < num_tiles;
         tile_idx = source.follow(tile_idx, threadIdx.x % 32)) {
      const FwdTileInfo tile = fwd_tile<Config>(params, order.tile(tile_idx));
      if (tile.m0 < tile.side_q.length) consumer.run(params, transform, tile);
    }
  }
#endif
}

}  // namespace flashattn_ext::sm90
