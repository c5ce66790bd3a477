// The producer warpgroup of the Hopper forward: a thread that finds the CTA's tiles, and one that
// issues every load.
#pragma once

#include "ptx/grid_dependency.cuh"
#include "ptx/tma.cuh"
#include "sm90/fwd_config.cuh"
#include "sm90/fwd_params.h"

namespace flashattn_ext::sm90 {

// Finds tiles, one ahead of the loader.
template <typename Config>
class FwdScheduler {
 public:
  __device__ __forceinline__ FwdScheduler(const FwdParams& params, const FwdTiles& tiles,
                                          uint32_t smem, const FwdBarriers<Config>& barriers)
      : params(params), tiles(tiles), barriers(barriers), queue(smem, barriers) {}

  __device__ __forceinline__ void run() {
    const int32_t num_tiles = static_cast<int32_t>(tiles.order.num_tiles());
    uint32_t phase = 0;
    for (int32_t tile_idx = blockIdx.x; tile_idx < num_tiles; tile_idx = draw(tile_idx)) {
      const FwdTileInfo tile = describe(tiles.order.tile(tile_idx));
      if (tile.m0 >= tile.seqlen_q) continue;
      KeyBlocks keys[Config::kConsumers];
#pragma unroll
      for (int c = 0; c < Config::kConsumers; ++c) keys[c] = key_blocks(tile, c);
      queue.push(tile, keys);
      // The next one's number is drawn when this tile is nearly loaded, so that tiles go to CTAs in
      // the order in which these become free.
      ptx::mbarrier_wait(barriers.near_end(), phase);
      phase ^= 1;
    }
    queue.push_end();
  }

 private:
  __device__ __forceinline__ FwdTileInfo describe(const TileOrder::Tile& tile) const {
    const int batch_idx = tiles.by_heads_q.divide(tile.head);
    const SeqlenSide side_q = query_side(params, batch_idx), side_k = key_side(params, batch_idx);
    const Band band(params, side_q.length, side_k.length);
    const int m0 = tile.block * Config::kBlockM;
    return {batch_idx,
            tile.head - batch_idx * params.num_heads_q,
            m0,
            static_cast<int32_t>(side_q.start),
            static_cast<int32_t>(side_k.start),
            side_q.length,
            side_k.length,
            band.key_blocks(m0, Config::kBlockM, Config::kBlockN)};
  }

  __device__ __forceinline__ KeyBlocks key_blocks(const FwdTileInfo& tile, int consumer) const {
    constexpr int kBlockN = Config::kBlockN;
    const Band band(params, tile.seqlen_q, tile.seqlen_k);
    const int row0 = tile.m0 + 64 * consumer;
    int first = tile.blocks.begin, last = tile.blocks.end - 1;
    if constexpr (Config::kSkips) {
      // At least one block is these queries' own, although they may see nothing of it.
      const int last_row = min(row0 + 63, tile.seqlen_q - 1);
      last = max(min((band.end_key(last_row) - 1) / kBlockN, last), first);
      first = min(max(band.first_key(row0) / kBlockN, first), last);
    }
    // Q in shared memory is given up to the next tile with the first block: no recomputation there.
    const int begin = first + (Config::kTile.fixed_reference && !Config::kTile.q_in_regs ? 1 : 0);
    const int open_begin = max((band.first_key(row0 + 63) + kBlockN - 1) / kBlockN, begin);
    return {first,
            last,
            tile.blocks.end - 1 - last,
            first - tile.blocks.begin,
            open_begin,
            max((band.end_key(row0) - 1) / kBlockN, first)};
  }

  // The number of the next tile: every grid-th, or what the counter says.
  __device__ __forceinline__ int32_t draw(int32_t tile_idx) const {
    const int32_t grid = static_cast<int32_t>(gridDim.x);
    if (tiles.counter == nullptr) return tile_idx + grid;
    ptx::wait_for_dependency();  // the counter starts at 0
    return grid + atomicAdd(tiles.counter, 1);
  }

  const FwdParams& params;
  const FwdTiles& tiles;
  const FwdBarriers<Config> barriers;
  TileQueue<Config> queue;
};

// Streams Q, K and V. K is one block ahead of V, across tiles, and Q comes with a tile's first K:
// what the next tile starts with is on its way before the last V of this one.
template <typename Config>
class FwdLoader {
 public:
  __device__ __forceinline__ FwdLoader(const FwdParams& params, const FwdTensorMaps& maps,
                                       const FwdTiles& tiles, uint32_t smem,
                                       const FwdBarriers<Config>& barriers)
      : params(params),
        maps(maps),
        tiles(tiles),
        smem(smem),
        barriers(barriers),
        queue(smem, barriers) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
  }

  __device__ __forceinline__ void run() {
    FwdTileInfo tile = queue.wait();
    Source source{};
    bool started = false;  // the tile is located, its first K and Q are on their way
    while (tile.batch_idx >= 0) {
      if (!tile.has_work()) {
        ptx::mbarrier_arrive(barriers.near_end());
        queue.release();
        tile = queue.wait();
        continue;
      }
      const int first = tile.blocks.begin, last = tile.blocks.end - 1;
      if (!started) {
        source = locate(tile);
        load_k(source, last);
        load_q(tile, source);
      }
      const int near_end = first + min(last - first, 3);
      for (int n_block = last; n_block >= first; --n_block) {
        if (n_block == near_end) ptx::mbarrier_arrive(barriers.near_end());
        if (n_block == first) break;
        load_k(source, n_block - 1);
        load_v(source, n_block);
      }
      queue.release();
      tile = queue.wait();
      started = tile.batch_idx >= 0 && tile.has_work();
      const Source next = locate(tile);
      if (started) load_k(next, tile.blocks.end - 1);
      // Q in shared memory has no room before the consumers are past this tile's last product.
      if (started && Config::kTile.q_in_regs) load_q(tile, next);
      load_v(source, first);
      if (started && !Config::kTile.q_in_regs) load_q(tile, next);
      source = next;
    }
  }

 private:
  // Where a tile's inputs lie in the tensor maps.
  struct Source {
    int32_t batch;  // 0 in varlen, where rows are packed rows
    int32_t kv_head;
    int32_t k_start;
  };

  __device__ __forceinline__ Source locate(const FwdTileInfo& tile) const {
    return {params.cu_seqlens_q == nullptr ? tile.batch_idx : 0,
            tiles.by_group.divide(tile.head_idx), tile.k_start};
  }

  __device__ __forceinline__ void load_q(const FwdTileInfo& tile, const Source& source) {
    for (int w = 0; w < Config::kConsumers; ++w) {
      load<Config::kQkChunks, Config::kQChunkBytes>(
          maps.q, smem + Config::kOffsetQ + w * Config::kQBytes, barriers.q_full(w),
          barriers.q_empty(w), q_phase, tile.q_start + tile.m0 + 64 * w, tile.head_idx,
          source.batch);
    }
    q_phase ^= 1;
  }

  __device__ __forceinline__ void load_k(const Source& source, int n_block) {
    const int stage = k_ring.stage();
    load<Config::kQkChunks, Config::kKvChunkBytes>(
        maps.k, smem + Config::kOffsetK + stage * Config::kKBytes, barriers.k_full(stage),
        barriers.k_empty(stage), k_ring.phase(), source.k_start + n_block * Config::kBlockN,
        source.kv_head, source.batch);
    k_ring.advance();
  }

  __device__ __forceinline__ void load_v(const Source& source, int n_block) {
    const int stage = v_ring.stage();
    load<Config::kVChunks, Config::kKvChunkBytes>(
        maps.v, smem + Config::kOffsetV + stage * Config::kVBytes, barriers.v_full(stage),
        barriers.v_empty(stage), v_ring.phase(), source.k_start + n_block * Config::kBlockN,
        source.kv_head, source.batch);
    v_ring.advance();
  }

  // The rows from `row` on, chunk by chunk, once their place is free.
  template <int kChunks, uint32_t kChunkBytes>
  __device__ __forceinline__ static void load(const CUtensorMap& map, uint32_t dst, uint32_t full,
                                              uint32_t empty, uint32_t phase, int row, int head,
                                              int batch) {
    ptx::mbarrier_wait(empty, phase ^ 1);  // a fresh barrier lets pass
    ptx::mbarrier_arrive_expect_tx(full, kChunks * kChunkBytes);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::tma_load_4d(dst + c * kChunkBytes, &map, full, 64 * c, row, head, batch);
    }
  }

  const FwdParams& params;
  const FwdTensorMaps& maps;
  const FwdTiles& tiles;
  const uint32_t smem;
  const FwdBarriers<Config> barriers;
  TileQueue<Config> queue;
  RingState<Config::kTile.k_stages> k_ring;
  RingState<Config::kTile.v_stages> v_ring;
  uint32_t q_phase = 0;
};

}  // namespace flashattn_ext::sm90
