// dQ from the buffer of the fused backward kernel: fp32 in accumulator order, times scale, to rows
// of 16 bits. One CTA per (query block, query head, sequence), a warpgroup per piece.
#pragma once

#include "attention/params.h"
#include "attention/seqlen_info.cuh"
#include "sm90/bwd_fused_config.cuh"
#include "tile/gmem_copy.cuh"

namespace flashattn_ext::sm90 {

template <typename Config>
__global__ void __launch_bounds__(128 * Config::kConsumers)
    flash_bwd_dq_convert_sm90_kernel(const __grid_constant__ BwdParams params,
                                     const __grid_constant__ BwdFusedDq dq, int num_blocks) {
  constexpr int kBlockM = Config::kBlockM;
  constexpr uint32_t kWarpRowBytes = tile::SmemLayout<64>::tile_bytes(16);
  const int head = blockIdx.x / num_blocks, block = blockIdx.x - head * num_blocks;
  const int batch_idx = head / params.num_heads_q;
  const int head_idx = head - batch_idx * params.num_heads_q;
  const SeqlenSide side = query_side(params, batch_idx);
  if (block * kBlockM >= side.length) return;

  __shared__ __align__(16) unsigned char staging[4 * Config::kConsumers * kWarpRowBytes];
  const int thread_idx = threadIdx.x % 128, piece = threadIdx.x / 128;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t place = dq.first_block(params, batch_idx, side.start, head_idx, kBlockM) + block;
  // In order no key block has come to a query block that sees no key, whose rows are zero already.
  if (Config::kInOrder && dq.turns[place] == 0) return;
  const float4* gPiece = reinterpret_cast<const float4*>(dq.data + place * dq.buffer.block_floats +
                                                         piece * BwdDqBuffer::kPieceFloats);
  float acc[1][8][4];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 x = __ldcs(gPiece + 128 * j + thread_idx);
    acc[0][j][0] = x.x, acc[0][j][1] = x.y, acc[0][j][2] = x.z, acc[0][j][3] = x.w;
  }
  const int row = block * kBlockM + 64 * (piece / Config::kChunks) + 16 * (warp % 4);
  const int col = 64 * (piece % Config::kChunks);
  using Element = typename Config::Element;
  Element* gDq = head_ptr(static_cast<Element*>(params.dq), params.dq_strides, batch_idx,
                          side.start + row, head_idx);
  tile::store_rows<Element, 1, 64>(
      acc, params.softmax_scale, ptx::smem_address(staging + warp * kWarpRowBytes), gDq + col,
      params.dq_strides.row, side.length - row, params.head_dim - col, lane);
}

}  // namespace flashattn_ext::sm90
