// Hopper fused backward kernel: the dK/dV kernel (bwd_dkv_kernel.cuh) whose CTAs also add what
// their keys give of dQ to a buffer in fp32 (bwd_dq_buffer.h). S and dP are computed once: five
// products instead of the seven of two kernels.
//
// Grid:   one-dimensional. Tiles (key block, KV head) in the order of attention/tile_order.h.
//         At most as many CTAs as run at once, which draw tiles from a counter: K and V of the next
//         are on their way while dK and dV of one leave through dS. Without a mask each tile of a
//         head starts at another query block, so that they add to different places of the buffer,
//         which was zero; bwd_dq_convert.cuh makes dQ of it.
//         With kInOrder a CTA per tile. They come to each query block one after the other, from the
//         first key block to the last: the first stores, others add, and the last makes dQ of the
//         sum. CTAs start in the order of the grid, so none waits for one that cannot start before
//         it ends; and they go from the last query block to the first, so that those of a causal
//         problem, too, meet where they begin. (Drawn ahead, tiles would keep others waiting.)
// Roles:  warpgroup 0: the loader (warp 0) and the reader of row statistics (warp 1), both those of
//         the dK/dV kernel, tile after tile. With kInOrder warps 2 and 3 wait for other CTAs and
//         tell them (bwd_fused_turns.cuh). Warpgroups 1 and 2, the consumers, have 64 keys each and
//         take turns: one queues its products of a step while the other forms P and dS
//         (bwd_fused_consumer.cuh).
// Shared: that of the dK/dV kernel, and three stages of dS, rows being queries: dQ needs the keys
//         of both consumers. Consumer w computes the w-th piece of 64 x 64 of a step's dQ a step
//         later, when both halves of dS have been there for a while. With kInOrder a block of the
//         buffer as well.
// Barriers beside those of the dK/dV kernel; mbarriers but the last three, with their arrivals:
//         tile_full[i]   1        the next tile's number is in slot i
//         tile_empty[i]  8 + 1    consumer warps and the statistics' have read it; with kInOrder
//                        or 3     warps 2 and 3, too
//         kv_empty     8          every consumer warp is done with K and V
//         ds_full[s]   8          both consumers' warps have written dS of stage s. To have waited
//                                 for dS of a step says as well that both are done with dQ of two
//                                 steps before, whose stage is next
//         turn[s]      1 + bytes  kInOrder: the key blocks before this one have been at the query
//                                 block, whose dQ is this CTA's to add to; for the last, what they
//                                 have added is in shared memory
//         added[s]     8          kInOrder: both consumers' warps have added their parts
//         told[s]      1          kInOrder: the next key block has been told so
//         named 1      consumers  rows behind a packed sequence's end are zero in K and V; both are
//                                 done with dS, whose chunks dK and dV take
//         named 2 + w  consumers  consumer w's turn: the other has queued its products
//         named 4 + w  consumer w  its warps are done with chunks that the next tile's dS takes
// Math:   as there, and dQ += dS K, times scale at the end.
#pragma once

#include "ptx/registers.cuh"
#include "sm90/bwd_dkv_producer.cuh"
#include "sm90/bwd_fused_consumer.cuh"
#include "sm90/bwd_fused_turns.cuh"

namespace flashattn_ext::sm90 {

// Draws the CTA's tiles, tells the others, and loads K, V, Q and dO. One warp, of which one lane
// does it: all of them together know what is uniform.
template <typename Config>
__device__ __forceinline__ void load_tiles(const BwdParams& params, const BwdTensorMaps& maps,
                                           const BwdFusedTiles& tiles, uint32_t smem) {
  const BwdFusedBarriers<Config> barriers{smem + Config::kOffsetBarriers};
  const bool leads = threadIdx.x % 32 == 0;
  BwdFusedQueue<Config> queue(smem);
  auto work = BwdFusedWork::of<Config>(params, tiles, 0);
  BwdDkvProducer<Config> producer(params, maps, work, smem);
  uint32_t kv_phase = 0;
  const int num_tiles = static_cast<int>(tiles.order.num_tiles());
  const auto draw = [&] {
    const int drawn = leads ? static_cast<int>(atomicAdd(tiles.counter, 1u)) : 0;
    return __shfl_sync(0xffffffffu, drawn, 0);
  };
  for (int tile = Config::kInOrder ? blockIdx.x : draw(); tile < num_tiles;
       tile = Config::kInOrder ? num_tiles : draw()) {
    work = BwdFusedWork::of<Config>(params, tiles, tile);
    if (leads) queue.push(tile);
    if (work.num_steps() == 0) continue;
    if (leads) {
      ptx::mbarrier_wait(barriers.kv_empty(), kv_phase ^ 1);  // a fresh barrier lets pass
      producer.load();
    }
    __syncwarp();  // the next work is not yet this one's
    kv_phase ^= 1;
  }
  if (leads) queue.push(-1);
}

// The row statistics of the CTA's tiles. One warp.
template <typename Config>
__device__ __forceinline__ void read_statistics_of_tiles(const BwdParams& params,
                                                         const BwdTensorMaps& maps,
                                                         const BwdFusedTiles& tiles,
                                                         uint32_t smem) {
  BwdFusedQueue<Config> queue(smem);
  auto work = BwdFusedWork::of<Config>(params, tiles, 0);
  BwdDkvProducer<Config> producer(params, maps, work, smem);
  for (int tile = queue.next(); tile >= 0; tile = queue.next()) {
    work = BwdFusedWork::of<Config>(params, tiles, tile);
    producer.read_statistics();
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    flash_bwd_fused_sm90_kernel(const __grid_constant__ BwdParams params,
                                const __grid_constant__ ScoreTransform transform,
                                const __grid_constant__ BwdFusedTiles tiles,
                                const __grid_constant__ BwdTensorMaps maps,
                                const __grid_constant__ BwdFusedDq dq) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const uint32_t smem = ptx::smem_address(dynamic_smem);
  const BwdFusedBarriers<Config> barriers{smem + Config::kOffsetBarriers};
  const int warpgroup_idx = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();  // barriers are initialised before anybody uses them

  if (warpgroup_idx == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegs>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) load_tiles<Config>(params, maps, tiles, smem);
    if (warp == 1) read_statistics_of_tiles<Config>(params, maps, tiles, smem);
    if constexpr (Config::kInOrder) {
      if (warp == 2) BwdFusedTurns<Config>(params, tiles, dq, smem).await();
      if (warp == 3) BwdFusedTurns<Config>(params, tiles, dq, smem).pass_on();
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegs>();
    BwdFusedQueue<Config> queue(smem);
    BwdFusedPlace<Config> place;
    for (int tile = queue.next(); tile >= 0; tile = queue.next()) {
      const auto work = BwdFusedWork::of<Config>(params, tiles, tile);
      if (work.n0 >= work.side_k.length) continue;
      BwdFusedConsumer<Config>(params, transform, work, dq, smem, warpgroup_idx - 1).run(place);
    }
  }
#endif
}

}  // namespace flashattn_ext::sm90
