// Hopper forward kernel: persistent CTAs that take (query block, head, sequence) tiles. In the
// producer warpgroup (fwd_producer.cuh) one thread finds tiles, and one streams Q, K and V through
// the copy engine, into the next tile while the consumers are at the last one's end; each consumer
// warpgroup computes 64 query rows (fwd_consumer.cuh).
//
// Grid:   at most as many CTAs as run at once, ctas_per_sm per SM, one-dimensional. Tiles in the
//         order of attention/tile_order.h; a CTA that is done draws the next from a counter, where
//         there are more tiles than CTAs.
//         A kernel ahead sets the counter to 0; this one starts beside it (programmatic launch).
// Roles:  warpgroup 0: the loader (thread 0) and the scheduler (thread 32). Warpgroups
//         1 ... kConsumers: the consumers.
// Shared: Q, 64 rows per consumer; k_stages of K and v_stages of V; with tma_store O, 16 rows per
//         warp. Each is stored as chunks of 64 columns (128 bytes) with the 128-byte swizzle, chunk
//         after chunk. Then two slots for tiles on their way to loader and consumers.
// Barriers, all mbarriers but the last two; the number is that of arrivals:
//         q_full[w]      1 + bytes         Q of consumer w has landed
//         q_empty[w]     4                 every warp of consumer w is done reading Q
//         k_full[s]      1 + bytes         K of stage s has landed; v_full[s] the same for V
//         k_empty[s]     4 kConsumers      every consumer warp is done with stage s; v_empty[s] too
//         tile_full[i]   1                 the next tile is in slot i
//         tile_empty[i]  128 kConsumers+1  consumer threads and loader are done with slot i
//         near_end       1                 the loader is near the end of its tile
//         named 1        all consumers     rows behind a packed sequence's end are zero in V
//         named, turn    2 consumers       with ping_pong: the consumer's turn to queue products
// Math:   S = Q K^T; logits, mask; lazy online softmax; O += P V; O / l; lse = m + ln l.
#pragma once

#include "ptx/grid_dependency.cuh"
#include "ptx/registers.cuh"
#include "sm90/fwd_consumer.cuh"
#include "sm90/fwd_producer.cuh"

namespace flashattn_ext::sm90 {

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kTile.ctas_per_sm)
    flash_fwd_sm90_kernel(const __grid_constant__ FwdParams params,
                          const __grid_constant__ ScoreTransform transform,
                          const __grid_constant__ FwdTiles tiles,
                          const __grid_constant__ FwdTensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const uint32_t smem = ptx::smem_address(dynamic_smem);
  const FwdBarriers<Config> barriers{smem + Config::kOffsetBarriers};
  const int warpgroup_idx = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();  // barriers are initialised before anybody uses them

  if (warpgroup_idx == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegs>();
    if (threadIdx.x == 0) FwdLoader<Config>(params, maps, tiles, smem, barriers).run();
    if (threadIdx.x == 32) FwdScheduler<Config>(params, tiles, smem, barriers).run();
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegs>();
    FwdConsumer<Config>(params, transform, maps, smem, barriers, warpgroup_idx - 1).run();
  }
#endif
}

// Sets the counter of tiles to 0, ahead of the forward, which starts meanwhile and waits for it
// before it draws. Both read only what is older than this kernel: it waits for its stream.
static __global__ void flash_fwd_sm90_counter_kernel(int32_t* tile_counter) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::launch_dependents();
  *tile_counter = 0;
#endif
}

}  // namespace flashattn_ext::sm90
