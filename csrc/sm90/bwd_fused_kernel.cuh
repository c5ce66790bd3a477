// Hopper fused backward kernel: the dK/dV kernel (bwd_dkv_kernel.cuh) whose CTAs also add what
// their keys give of dQ to a buffer in fp32 (bwd_dq_buffer.h). S and dP are computed once: five
// products instead of the seven of two kernels.
//
// Grid:   one-dimensional, in the order of attention/tile_order.h. Without a mask each CTA of a
//         head starts at another query block, so that they add to different places of the buffer,
//         which was zero; bwd_dq_convert.cuh makes dQ of it. With kInOrder they come to each query
//         block one after the other, from the first key block to the last: the first stores, others
//         add, and the last makes dQ of the sum. CTAs are launched in that order, so none waits for
//         one that has not begun; and they go from the last query block to the first, so that those
//         of a causal problem, too, meet where they begin.
// Roles:  those of the dK/dV kernel with 64 keys to a consumer (bwd_fused_consumer.cuh). The two
//         consumers take turns: one queues its products of a step while the other forms P and dS.
//         With kInOrder threads 64 and 96 wait for other CTAs and tell them (bwd_fused_turns.cuh).
// Shared: that of the dK/dV kernel, and three stages of dS, rows being queries: dQ needs the keys
//         of both consumers. Consumer w computes the w-th piece of 64 x 64 of a step's dQ a step
//         later, when both halves of dS have been there for a while. With kInOrder a block of the
//         buffer as well.
// Barriers beside those of the dK/dV kernel; mbarriers but the last two, with their arrivals:
//         ds_full[s]   8          both consumers' warps have written dS of stage s. To have waited
//                                 for dS of a step says as well that both are done with dQ of two
//                                 steps before, whose stage is next
//         turn[s]      1 + bytes  kInOrder: the key blocks before this one have been at the query
//                                 block, whose dQ is this CTA's to add to; for the last, what they
//                                 have added is in shared memory
//         added[s]     8          kInOrder: both consumers' warps have added their parts
//         told[s]      1          kInOrder: the next key block has been told so
//         named 1      consumers  rows behind a packed sequence's end are zero in K and V; both are
//                                 done with K, whose rows dV takes
//         named 2 + w  consumers  consumer w's turn: the other has queued its products
// Math:   as there, and dQ += dS K, times scale at the end.
#pragma once

#include "ptx/registers.cuh"
#include "sm90/bwd_dkv_producer.cuh"
#include "sm90/bwd_fused_consumer.cuh"
#include "sm90/bwd_fused_turns.cuh"

namespace flashattn_ext::sm90 {

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
