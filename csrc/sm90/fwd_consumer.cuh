// A consumer warpgroup of the Hopper forward: the products, the softmax and the output of 64 query
// rows. While the tensor cores multiply P(n+1) V(n+1), it computes the softmax of S(n).
#pragma once

#include "attention/lazy_softmax.cuh"
#include "attention/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/chunked_tile.cuh"
#include "sm90/fwd_config.cuh"
#include "sm90/fwd_params.h"
#include "tile/fragment.cuh"

namespace flashattn_ext::sm90 {

// Every branch is the same for all lanes of a warp, and votes tell the compiler so: rings and
// descriptors stay in uniform registers, from which products take them.
template <typename Config>
class FwdConsumer {
  using Element = typename Config::Element;
  static constexpr FwdTile kTile = Config::kTile;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr bool kSkips = Config::kSkips;
  // Where CTAs share an SM, they overlap each other's products and softmax. None has the registers
  // to do so by itself: P V runs alone, so that P may lie where S does.
  static constexpr bool kSerial = kTile.ctas_per_sm > 1;
  // Masked blocks behind the first, too, take the short step.
  static constexpr bool kShortMasked = kTile.fixed_reference && !kSerial;
  static constexpr int kSTiles = kBlockN / 8, kOTiles = kHeadDimV / 8;
  // Named barriers: one for all consumers; each one's turn to queue products.
  static constexpr int kVTailBarrier = 1, kTurnBarrier = 2;

 public:
  __device__ __forceinline__ FwdConsumer(const FwdParams& params, const ScoreTransform& transform,
                                         const FwdTensorMaps& maps, uint32_t smem,
                                         const FwdBarriers<Config>& barriers, int consumer)
      : params(params),
        transform(transform),
        maps(maps),
        smem(smem),
        barriers(barriers),
        queue(smem, barriers),
        consumer(consumer) {}

  __device__ __forceinline__ void run() {
    if (kTile.ping_pong && consumer == 0) pass_turn_to(0);
    tile::clear(acc_s[0]);
    KeyBlocks keys{};
    bool more = take(keys);
    if (more) await_first_operands(keys);
    issue_qk();  // where there is no tile, of whatever lies there, and nobody reads it
    if (more) release_q_fragments();
    while (more) {
      if constexpr (!kSkips) keys = queue.keys(consumer);
      start_softmax();
      tile::clear(acc_o);
      zero_v_tail();
      skip_v(keys.before);
      const FwdTileInfo first_tile = queue.tile();
      ptx::wgmma_wait<0>();
      if (transform.in_place) {
        attend<true>(keys, first_tile);
      } else {
        attend<false>(keys, first_tile);
      }
      skip_k(keys.behind);
      const int v_behind = keys.behind;
      const FwdTileInfo tile = queue.tile();
      queue.release();
      // The last product runs while the next tile is found, and that one's first product while this
      // one's output leaves: queued behind the last product, or once that is done.
      start_pv();
      more = take(keys);
      if (more) await_first_operands(keys);
      if constexpr (!kTile.cross_tile) {
        ptx::wgmma_wait<0>();
        finish_pv();
      }
      issue_qk();
      if (more) release_q_fragments();
      float inv_sum[2], lse[2];
      softmax.finish(inv_sum, lse);
      if constexpr (kTile.cross_tile) {
        ptx::wgmma_wait<1>();
        finish_pv();
      }
      skip_v(v_behind);
      store(tile, inv_sum, lse);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc_s[0]);
    if constexpr (kTile.tma_store) {
      if (lane() == 0) ptx::bulk_wait_read();  // the CTA's shared memory lasts until then
    }
  }

 private:
  // Waits for the next tile with something to do; false at the end. Queries that see no key get
  // their zeros on the way. Only where blocks may be skipped are `keys` needed, and found, so
  // early.
  __device__ __forceinline__ bool take(KeyBlocks& keys) {
    while (true) {
      const FwdTileInfo tile = queue.wait();
      if (__all_sync(0xffffffffu, tile.has_work())) {
        if constexpr (kSkips) keys = queue.keys(consumer);
        return true;
      }
      if (__any_sync(0xffffffffu, tile.batch_idx < 0)) return false;
      store_empty(tile);
      queue.release();
    }
  }

  // Every key block of a tile but the last product: from S of the last block, which is done, to P
  // of the first. kInPlace is that of the ScoreTransform: its code stays out of the usual case's.
  template <bool kInPlace>
  __device__ __forceinline__ void attend(const KeyBlocks& keys, const FwdTileInfo& first_tile) {
    int n_block = keys.last;
    ptx::wgmma_pin(acc_s[0]);
    release(n_block == keys.first);
    exact_softmax<kInPlace, true>(first_tile, n_block);
    pack();
    --n_block;

    // Blocks down to masked_begin take exact steps, with a mask where they need one. Short steps
    // wait until every row has a reference (none has where all its logits so far are -inf) and,
    // once a row grew, until none does: the worst case costs little more than a maximum per block.
    int masked_begin = keys.open_end;
    if (kInPlace || (kTile.fixed_reference && !softmax.all_have_reference())) {
      masked_begin = keys.first;
    }
    while (true) {
#pragma unroll 1
      for (; n_block >= masked_begin; --n_block) {
        exact_step<kInPlace, true>(keys, n_block);
        if constexpr (!kInPlace && kTile.fixed_reference) {
          const bool calm = !softmax.must_rescale && softmax.all_have_reference();
          masked_begin = calm && n_block > short_end(keys) ? keys.open_end : keys.first;
        }
      }
      if (kInPlace || n_block < keys.first) break;
      bool settled = true;
#pragma unroll 1
      for (; n_block >= keys.open_begin; --n_block) {
        if constexpr (kTile.fixed_reference) {
          settled = short_step<false>(n_block);
          if (!settled) break;  // the rare case, out of this loop's way
          release(n_block == keys.first);
        } else {
          exact_step<false, false>(keys, n_block);
        }
      }
      if constexpr (kShortMasked) {
#pragma unroll 1
        for (; settled && n_block >= short_end(keys); --n_block) {  // at a window's left edge
          settled = short_step<true>(n_block);
          if (!settled) break;
          release(n_block == keys.first);
        }
      }
      if (!settled) {
        softmax.settle(acc_s[0], p, acc_o, transform.log2_scale,
                       [&](int j, float(&logits)[4]) { recompute_logits(j, logits); });
        release(n_block == keys.first);
        --n_block;
      }
      masked_begin = keys.first;
    }
  }

  // A block with its maxima.
  template <bool kInPlace, bool kMasked>
  __device__ __forceinline__ void exact_step(const KeyBlocks& keys, int n_block) {
    start_products();
    await_scores();
    release(n_block == keys.first);
    exact_softmax<kInPlace, kMasked>(queue.tile(), n_block);
    await_output();
    pack();
    softmax.apply_rescale(acc_o);
  }

  // A block by the references as they stand. False where a row outgrew its own: `settle` is to
  // follow, for which K stays; then, or else at once, `release`.
  template <bool kMasked>
  __device__ __forceinline__ bool short_step(int n_block) {
    start_products();
    await_scores();
    if constexpr (kMasked) mask(queue.tile(), n_block);
    float part[2];
    softmax.step_fixed(part, acc_s[0], transform.log2_scale);
    await_output();
    pack();
    return softmax.take_sums(part);
  }

  // Where short steps end. Q in shared memory is given up to the next tile with the first block.
  __device__ __forceinline__ static int short_end(const KeyBlocks& keys) {
    if constexpr (!kShortMasked) return keys.open_begin;
    return keys.first + (kTile.q_in_regs ? 0 : 1);
  }

  // Rows behind the sequence's end hold another's queries, or anything.
  __device__ __forceinline__ void start_softmax() {
    softmax = {};
    const FwdTileInfo tile = queue.tile();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row(tile.m0) + tile::acc_row(lane(), 2 * half);
      if (row >= tile.seqlen_q) softmax.ignore_row(half);
    }
  }

  template <bool kInPlace, bool kMasked>
  __device__ __forceinline__ void exact_softmax(const FwdTileInfo& tile, int n_block) {
    if constexpr (kInPlace) transform.apply(acc_s);
    if constexpr (kMasked) mask(tile, n_block);
    softmax.step(acc_s[0], transform.log2_scale);
  }

  __device__ __forceinline__ void mask(const FwdTileInfo& tile, int n_block) {
    const Band band(params, tile.seqlen_q, tile.seqlen_k);
    const int row0 = first_row(tile.m0), n0 = n_block * kBlockN;
    if (__any_sync(0xffffffffu, !band.covers(row0, 16, n0, kBlockN))) {
      apply_mask(acc_s, band, row0, n0, lane());
    }
  }

  // Read where needed rather than kept in registers.
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp_in_group() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ uint32_t sQ() const {
    return smem + Config::kOffsetQ + consumer * Config::kQBytes;
  }

  // This warp's first query.
  __device__ __forceinline__ int first_row(int m0) const {
    return m0 + 64 * consumer + 16 * warp_in_group();
  }

  // ---- Loads ----

  // The operands of a tile's first product: Q, which becomes A fragments or stays where it is, and
  // K.
  __device__ __forceinline__ void await_first_operands(const KeyBlocks& keys) {
    ptx::mbarrier_wait(barriers.q_full(consumer), q_phase);
    q_phase ^= 1;
    if constexpr (kTile.q_in_regs) {
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk) load_q_fragment(q_fragments[kk], kk);
    }
    skip_k(keys.before);
    await_k();
  }

  // Gives back, as they come, the stages of blocks that these queries do not see. Consumers take as
  // many turns as the tile has blocks, or the order of turns would be lost.
  __device__ __forceinline__ void skip_k(int count) {
    if constexpr (kSkips) {
#pragma unroll 1
      for (; count > 0; --count) {
        await_k();
        take_turn();
        pass_turn();
        release(false);
      }
    }
  }
  __device__ __forceinline__ void skip_v(int count) {
    if constexpr (kSkips) {
#pragma unroll 1
      for (; count > 0; --count) {
        await_v();
        release_v();
      }
    }
  }

  // Q's place in shared memory is free. To be called when the first product is on its way: the
  // fence waits for every earlier access to memory.
  __device__ __forceinline__ void release_q_fragments() {
    if constexpr (kTile.q_in_regs) {
      ptx::fence_proxy_async();  // read by ldmatrix, next written by the copy engine
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(barriers.q_empty(consumer));
    }
  }

  __device__ __forceinline__ void await_k() const {
    ptx::mbarrier_wait(barriers.k_full(k_ring.stage()), k_ring.phase());
  }
  __device__ __forceinline__ void await_v() const {
    ptx::mbarrier_wait(barriers.v_full(v_ring.stage()), v_ring.phase());
  }

  // The A fragment of columns [16 kk, 16 kk + 16).
  __device__ __forceinline__ void load_q_fragment(uint32_t (&a)[4], int kk) const {
    const int row = 16 * warp_in_group() + (lane() & 15);
    ptx::ldmatrix_x4(a, sQ() + chunk_offset(kk, Config::kQChunkBytes, row, lane() >> 4));
  }

  // Packed sequences: rows of V behind this sequence's end belong to the next one and may hold
  // anything; P is 0 there, and 0 * NaN is not. Only the tile's first block can reach that far.
  __device__ __forceinline__ void zero_v_tail() {
    if (params.cu_seqlens_k == nullptr && params.seqused_k == nullptr) return;
    const FwdTileInfo tile = queue.tile();
    const int valid = tile.seqlen_k - (tile.blocks.end - 1) * kBlockN;
    if (valid >= kBlockN) return;
    await_v();
    const int thread_idx = consumer * 128 + 32 * warp_in_group() + lane();
    zero_rows<Config::kVChunks>(smem + Config::kOffsetV + v_ring.stage() * Config::kVBytes,
                                Config::kKvChunkBytes, valid, kBlockN, thread_idx,
                                128 * Config::kConsumers);
    // Every consumer's part is zero before one multiplies.
    ptx::named_barrier_sync(kVTailBarrier, 128 * Config::kConsumers);
  }

  // ---- Products ----

  __device__ __forceinline__ void take_turn() const {
    if constexpr (kTile.ping_pong) ptx::named_barrier_sync(kTurnBarrier + consumer, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    pass_turn_to(consumer == Config::kConsumers - 1 ? 0 : consumer + 1);
  }
  __device__ __forceinline__ void pass_turn_to(int other) const {
    if constexpr (kTile.ping_pong) ptx::named_barrier_arrive(kTurnBarrier + other, 256);
  }

  // S = Q K^T of the next block, and O += P V of the one before: behind it, or before it and alone.
  __device__ __forceinline__ void start_products() {
    if constexpr (kSerial) {
      start_pv();
      ptx::wgmma_wait<0>();
      finish_pv();
      await_k();
      issue_qk();
    } else {
      await_k();
      take_turn();
      issue_qk();
      start_pv();
      pass_turn();
    }
  }

  // S is there; P V of the block before may still run.
  __device__ __forceinline__ void await_scores() {
    ptx::wgmma_wait<kSerial ? 0 : 1>();
    ptx::wgmma_pin(acc_s[0]);
  }

  // P V of the block before is done.
  __device__ __forceinline__ void await_output() {
    if constexpr (!kSerial) {
      ptx::wgmma_wait<0>();
      finish_pv();
    }
  }

  __device__ __forceinline__ void issue_qk() {
    const uint64_t desc_k =
        ptx::wgmma_descriptor(smem + Config::kOffsetK + k_ring.stage() * Config::kKBytes, 0);
    // Where O leaves few registers, what follows from sQ is not to be kept in any.
    const uint64_t desc_q =
        ptx::wgmma_descriptor(kHeadDim > 128 ? ptx::uniform(ptx::opaque(sQ())) : sQ(), 0);
    ptx::wgmma_pin(acc_s[0]);
    if constexpr (kTile.q_in_regs) ptx::wgmma_pin(q_fragments);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) {
      const uint64_t k = ptx::wgmma_advance(desc_k, column_step(kk, Config::kKvChunkBytes));
      if constexpr (kTile.q_in_regs) {
        ptx::wgmma_rs<Element, 0>(acc_s[0], q_fragments[kk], k, kk != 0);
      } else {
        const uint64_t q = ptx::wgmma_advance(desc_q, column_step(kk, Config::kQChunkBytes));
        ptx::wgmma_ss<Element, 0>(acc_s[0], q, k, kk != 0);
      }
    }
    ptx::wgmma_commit();
  }

  // After the product with K of a block: K's stage may be overwritten, and after the tile's first
  // block Q, too (in registers it was given back when it was loaded).
  __device__ __forceinline__ void release(bool last_product) {
    if (lane() == 0) ptx::mbarrier_arrive(barriers.k_empty(k_ring.stage()));
    k_ring.advance();
    if constexpr (!kTile.q_in_regs) {
      if (lane() == 0 && last_product) ptx::mbarrier_arrive(barriers.q_empty(consumer));
    }
  }

  __device__ __forceinline__ void start_pv() {
    await_v();
    const uint64_t desc_v = ptx::wgmma_descriptor(
        smem + Config::kOffsetV + v_ring.stage() * Config::kVBytes, Config::kKvChunkBytes);
    ptx::wgmma_pin(acc_o);
    ptx::wgmma_pin(p);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockN / 16; ++kk) {
      ptx::wgmma_rs<Element, 1>(acc_o, p[kk], ptx::wgmma_advance(desc_v, kk * Config::kVStepBytes),
                                1);
    }
    ptx::wgmma_commit();
  }

  // After the wait: O and P may be touched, V's stage may be overwritten.
  __device__ __forceinline__ void finish_pv() {
    ptx::wgmma_pin(acc_o);
    ptx::wgmma_pin(p);
    release_v();
  }
  __device__ __forceinline__ void release_v() {
    if (lane() == 0) ptx::mbarrier_arrive(barriers.v_empty(v_ring.stage()));
    v_ring.advance();
  }

  // The accumulator layout of S is the A fragment layout of P.
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int kk = 0; kk < kSTiles / 2; ++kk) tile::pack_a_fragment<Element>(p[kk], acc_s[0], kk);
  }

  // The rare case of probabilities that overflowed: this block's logits of 8-key tile j once more,
  // by mma.sync from K as it lies in shared memory. wgmma would need all four warps.
  __device__ __forceinline__ void recompute_logits(int j, float (&logits)[4]) const {
    const uint32_t sK = smem + Config::kOffsetK + k_ring.stage() * Config::kKBytes;
#pragma unroll
    for (int e = 0; e < 4; ++e) logits[e] = 0.0f;
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; kk += 2) {
      uint32_t b[4];  // 8 keys by 32 columns
      ptx::ldmatrix_x4(
          b, sK + chunk_offset(kk, Config::kKvChunkBytes, 8 * j + (lane() & 7), lane() >> 3));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (kTile.q_in_regs) {
          ptx::mma_m16n8k16<Element>(logits, q_fragments[kk + i], b[2 * i], b[2 * i + 1]);
        } else {
          uint32_t a[4];
          load_q_fragment(a, kk + i);
          ptx::mma_m16n8k16<Element>(logits, a, b[2 * i], b[2 * i + 1]);
        }
      }
    }
    ptx::fence_proxy_async();  // read by ldmatrix, next written by the copy engine
    __syncwarp();              // ... once lane 0 has given the stage back
  }

  // Byte offset, in a tile of 64-column chunks, of 16-byte piece 2 * kk + `piece` of a row.
  __device__ __forceinline__ static uint32_t chunk_offset(int kk, uint32_t chunk_bytes, int row,
                                                          int piece) {
    return (kk / 4) * chunk_bytes + Config::ChunkLayout::offset_bytes(row, 2 * (kk % 4) + piece);
  }

  // ---- Output ----

  __device__ __forceinline__ void store(const FwdTileInfo& tile, const float (&inv_sum)[2],
                                        const float (&lse)[2]) {
    const int row0 = first_row(tile.m0);
    // In varlen, rows behind the sequence's end are another's.
    const bool whole =
        params.cu_seqlens_q == nullptr ? params.seqused_q == nullptr : row0 + 16 <= tile.seqlen_q;
    if (kTile.tma_store && __all_sync(0xffffffffu, whole)) {
      store_by_tma(tile, row0, inv_sum);
    } else {
      store_from_registers(tile, row0, inv_sum);
    }
    store_lse(tile, row0, lse);  // behind the fence, which would wait for it
  }

  // Queries that see no key: each warp its 16 rows, 16 bytes per lane.
  __device__ __forceinline__ void store_empty(const FwdTileInfo& tile) const {
    const int row0 = first_row(tile.m0), pieces = params.head_dim_v / 8;
    const float lse[2] = {-INFINITY, -INFINITY};
    store_lse(tile, row0, lse);
    for (int i = lane(); i < 16 * pieces; i += 32) {
      const int row = row0 + i / pieces;
      if (row < tile.seqlen_q) {
        *reinterpret_cast<uint4*>(out_row(tile, row) + 8 * (i % pieces)) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ Element* out_row(const FwdTileInfo& tile, int row) const {
    return head_ptr(static_cast<Element*>(params.out), params.out_strides, tile.batch_idx,
                    tile.q_start, tile.head_idx) +
           row * params.out_strides.row;
  }

  __device__ __forceinline__ void store_lse(const FwdTileInfo& tile, int row0,
                                            const float (&lse)[2]) const {
    float* gLse = params.lse + tile.batch_idx * params.lse_batch_stride +
                  tile.head_idx * params.lse_head_stride + tile.q_start;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + tile::acc_row(lane(), 2 * half);
      if ((lane() & 3) == 0 && row < tile.seqlen_q) gLse[row] = lse[half];
    }
  }

  // Each warp stages and sends its own 16 rows: no barrier between warps.
  __device__ __forceinline__ void store_by_tma(const FwdTileInfo& tile, int row0,
                                               const float (&inv_sum)[2]) {
    const uint32_t sO =
        smem + Config::kOffsetO + (4 * consumer + warp_in_group()) * Config::kOBytes;
    if (lane() == 0) ptx::bulk_wait_read();  // the tile before has left
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_o[j][e] *= inv_sum[e / 2];
#pragma unroll
    for (int kk = 0; kk < kHeadDimV / 16; ++kk) {
      uint32_t o[4];
      tile::pack_a_fragment<Element>(o, acc_o, kk);
      ptx::stmatrix_x4(sO + chunk_offset(kk, Config::kOChunkBytes, lane() & 15, lane() >> 4), o);
    }
    ptx::fence_proxy_async();  // written by stmatrix, next read by the copy engine
    __syncwarp();
    if (lane() == 0) {
      const bool varlen = params.cu_seqlens_q != nullptr;
#pragma unroll
      for (int c = 0; c < Config::kVChunks; ++c) {
        ptx::tma_store_4d(&maps.out, sO + c * Config::kOChunkBytes, 64 * c, tile.q_start + row0,
                          tile.head_idx, varlen ? 0 : tile.batch_idx);
      }
      ptx::bulk_commit();
    }
  }

  __device__ __forceinline__ void store_from_registers(const FwdTileInfo& tile, int row0,
                                                       const float (&inv_sum)[2]) const {
    const bool odd = lane() & 1, upper = lane() & 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + tile::acc_row(lane(), 2 * half);
      // Four lanes hold a row's columns in pairs; a 4x4 transpose among them, over four 8-column
      // tiles, gives each lane 8 consecutive columns: one 16-byte store.
      Element* gRow = out_row(tile, row) + 8 * (lane() & 3);
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
        if (row < tile.seqlen_q && 32 * g + 8 * (lane() & 3) < params.head_dim_v) {
          *reinterpret_cast<uint4*>(gRow + 32 * g) =
              upper ? make_uint4(rx, ry, bx, by) : make_uint4(ax, ay, rx, ry);
        }
      }
    }
  }

  const FwdParams& params;
  const ScoreTransform& transform;
  const FwdTensorMaps& maps;
  const uint32_t smem;
  const FwdBarriers<Config> barriers;
  TileQueue<Config> queue;
  const int consumer;
  RingState<kTile.k_stages> k_ring;
  RingState<kTile.v_stages> v_ring;
  uint32_t q_phase = 0;

  LazySoftmax<Element> softmax;
  float acc_s[1][kSTiles][4];  // S, then P in fp32
  uint32_t p[kSTiles / 2][4];  // P as A fragments
  float acc_o[kOTiles][4];     // unnormalised O
  uint32_t q_fragments[kTile.q_in_regs ? kHeadDim / 16 : 1][4];
};

}  // namespace flashattn_ext::sm90
