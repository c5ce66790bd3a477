// Hopper dK/dV kernel: a CTA per (key block, KV head, sequence), looping over the query heads of
// the group and their query blocks. Scores are transposed, keys by queries, so that P^T and dS^T
// are A operands as they stand. dK and dV stay in registers until the end: no atomics, no fp32
// buffer, repeatable to the bit, and no copies of K and V per query head.
//
// Grid:   one-dimensional, in the order of attention/tile_order.h.
// Roles:  warpgroup 0: the loader (thread 0) and the reader of row statistics (threads 32-63).
//         Warpgroups 1 and 2, the consumers: up to head dim 128 each sums dK and dV of 64 keys of
//         its own; above, where registers hold one of the two, both have the same 64 keys, one
//         forms P and sums dV, the other forms dS and sums dK (bwd_dkv_consumer.cuh).
// Shared: K and V; kStages of Q and dO, in chunks of 64 columns (chunked_tile.cuh), of lse_log2 and
//         delta and, where consumers share keys, of P. dV leaves through rows of K, dK of V.
// Barriers, mbarriers but the last two; the number is that of arrivals:
//         k_full, v_full  1 + bytes       K, V have landed
//         q_full[s]       1 + bytes + 32  Q of stage s and its statistics are there
//         do_full[s]      1 + bytes       dO of stage s has landed
//         q_empty[s]      128 kConsumers  each lane of the consumers is done with Q and the
//                                         statistics of stage s
//         do_empty[s]     4 kConsumers    every consumer warp is done with dO of stage s
//         p_full[s], p_empty[s]  128      each lane has written P of stage s, has read it
//         landed[s]       1 + bytes       Q and dO of stage s have landed, and some of their rows
//                                         are to become zero before q_full and do_full say so
//         named 1 + w     consumer w      its warps are done with the rows of K or V that dV or dK
//                                         takes
// Math:   S^T = K Q^T, P = exp(logit - lse), dP^T = V dO^T, dS = P (dP - delta), dV += P^T dO,
//         dK += dS^T Q; dK times scale at the end.
#pragma once

#include "ptx/registers.cuh"
#include "sm90/bwd_dkv_consumer.cuh"
#include "sm90/bwd_dkv_producer.cuh"

namespace flashattn_ext::sm90 {

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    flash_bwd_dkv_sm90_kernel(const __grid_constant__ BwdParams params,
                              const __grid_constant__ ScoreTransform transform,
                              const __grid_constant__ TileOrder order,
                              const __grid_constant__ BwdTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const BwdDkvWork work(params, order.tile(blockIdx.x), Config::kBlockM, Config::kBlockN);
  if (work.n0 >= work.side_k.length) return;

  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const uint32_t smem = ptx::smem_address(dynamic_smem);
  const BwdDkvBarriers<Config> barriers{smem + Config::kOffsetBarriers};
  const int warpgroup_idx = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();  // barriers are initialised before anybody uses them

  if (warpgroup_idx == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegs>();
    BwdDkvProducer<Config> producer(params, maps, work, smem);
    if (work.blocks.end > work.blocks.begin) {
      if (threadIdx.x == 0) producer.load();
      if (threadIdx.x / 32 == 1) producer.read_statistics();
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegs>();
    const int consumer = warpgroup_idx - 1;
    if constexpr (!Config::kRoles) {
      BwdDkvConsumer<Config>(params, transform, work, smem, consumer).run();
    } else if (consumer == 0) {
      BwdDvConsumer<Config>(params, transform, work, smem).run();
    } else {
      BwdDkConsumer<Config>(params, transform, work, smem).run();
    }
  }
#endif
}

}  // namespace flashattn_ext::sm90
