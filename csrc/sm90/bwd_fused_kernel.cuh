// Hopper fused backward kernel: the dK/dV kernel (bwd_dkv_kernel.cuh) whose CTAs also add what
// their keys give of dQ to a buffer in fp32 (bwd_dq_buffer.h). S and dP are computed once: five
// products instead of the seven of two kernels.
//
// Grid:   one-dimensional, at most as many CTAs as run at once. They draw tiles (key block, KV
// head)
//         from a counter, in the order of attention/tile_order.h; K and V of the next are on their
//         way while dK and dV of one leave through dS.
//         dQ is summed in a buffer, of which bwd_dq_convert.cuh makes rows of 16 bits.
//         In no order: the buffer was zero, and without a mask each tile of a head starts at
//         another query block, so that they add to different places. With kInOrder the tiles of a
//         head come to each query block one after the other, from the last key block to the first:
//         the first stores, the others add. Tiles are drawn in that order, so that none waits for
//         one that nobody has; and they go from the first query block to the last, so that those of
//         a causal problem that are drawn together are each a block behind the one they wait for.
// Roles:  warpgroup 0: the loader (warp 0), which draws tiles as well, and the reader of row
//         statistics (warp 1), both those of the dK/dV kernel. With kInOrder warps 2 and 3 wait for
//         other CTAs and tell them (bwd_fused_turns.cuh). Warpgroups 1 and 2, the consumers, have
//         64 keys each and take turns: one queues its products of a step while the other forms P
//         and dS (bwd_fused_consumer.cuh).
// Shared: that of the dK/dV kernel; three stages of dS, rows being queries, for dQ needs the keys
// of
//         both consumers; what to do for a tile. Consumer w computes the w-th piece of 64 x 64 of a
//         step's dQ a step later, when both halves of dS have been there for a while.
// Barriers beside those of the dK/dV kernel; mbarriers but the last three, with their arrivals:
//         tile_full[i]   1        the next tile is in slot i
//         tile_empty[i]  256 + 32 each lane of the consumers, of the statistics' warp and with
//                        or 96    kInOrder of warps 2 and 3 has read it
//         kv_empty     8          every consumer warp is done with K and V
//         ds_full[s]   8          both consumers' warps have written dS of stage s. To have waited
//                                 for dS of a step says as well that both are done with dQ of two
//                                 steps before, whose stage is next
//         turn[s]      1          kInOrder: whoever is before this tile has been at the query
//         block,
//                                 whose dQ is this tile's to add to
//         added[s]     8          kInOrder: both consumers' warps have added their parts
//         told[s]      1          kInOrder: the next tile has been told so
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
                                           const BwdFusedTiles& tiles, unsigned char* smem) {
  const uint32_t address = ptx::smem_address(smem);
  const BwdFusedBarriers<Config> barriers{address + Config::kOffsetBarriers};
  const bool leads = threadIdx.x % 32 == 0;
  BwdFusedQueue<Config> queue(smem);
  auto work = BwdFusedWork::of<Config>(params, tiles, 0);
  BwdDkvProducer<Config> producer(params, maps, work, address);
  uint32_t kv_phase = 0;
  const int num_tiles = static_cast<int>(tiles.order.num_tiles());
  for (;;) {
    const int drawn = leads ? static_cast<int>(atomicAdd(tiles.counter, 1u)) : 0;
    const int tile = __shfl_sync(0xffffffffu, drawn, 0);
    if (tile < num_tiles) {
      work = BwdFusedWork::of<Config>(params, tiles, tile);
    } else {
      work.rank = -1;
    }
    if (leads) queue.push(work);
    if (work.is_end()) return;
    if (work.num_steps() == 0) continue;
    if (leads) {
      ptx::mbarrier_wait(barriers.kv_empty(), kv_phase ^ 1);  // a fresh barrier lets pass
      producer.load();
    }
    __syncwarp();  // the next work is not yet this one's
    kv_phase ^= 1;
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

  BwdFusedQueue<Config> queue(dynamic_smem);
  if (warpgroup_idx == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegs>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      load_tiles<Config>(params, maps, tiles, dynamic_smem);
    } else if (warp == 1) {
      auto work = queue.next();
      BwdDkvProducer<Config> producer(params, maps, work, smem);
      for (; !work.is_end(); work = queue.next()) producer.read_statistics();
    } else if constexpr (Config::kInOrder) {
      auto work = queue.next();
      BwdFusedTurns<Config> turns(params, work, dq, smem);
      if (warp == 2) {
        for (; !work.is_end(); work = queue.next()) turns.await();
      } else {
        for (; !work.is_end(); work = queue.next()) turns.pass_on();
      }
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegs>();
    BwdFusedPlace<Config> place;
    for (auto work = queue.next(); !work.is_end(); work = queue.next()) {
      if (work.n0 >= work.side_k.length) continue;
      BwdFusedConsumer<Config>(params, transform, work, dq, smem, warpgroup_idx - 1).run(place);
    }
  }
#endif
}

}  // namespace flashattn_ext::sm90
