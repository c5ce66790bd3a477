// The producer warpgroup of the Hopper dK/dV kernel: a thread that issues every copy, and a warp
// that reads the row statistics.
#pragma once

#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "sm90/bwd_dkv_config.cuh"
#include "sm90/bwd_params.h"
#include "sm90/ring.cuh"

namespace flashattn_ext::sm90 {

template <typename Config>
class BwdDkvProducer {
  static constexpr int kBlockM = Config::kBlockM;

 public:
  __device__ __forceinline__ BwdDkvProducer(const BwdParams& params, const BwdTensorMaps& maps,
                                            const BwdDkvWork& work, uint32_t smem)
      : params(params),
        maps(maps),
        work(work),
        smem(smem),
        barriers{smem + Config::kOffsetBarriers} {}

  // One thread: every copy.
  __device__ __forceinline__ void load() {
    load_keys<Config::kChunks>(maps.k, Config::kOffsetK, barriers.k_full());
    bool first = true;
    work.for_each_step(kBlockM, [&](int m0, int head) {
      const int s = ring.stage();
      const uint32_t sQ = smem + Config::kOffsetQ + s * Config::kQBytes;
      const uint32_t sDo = smem + Config::kOffsetDo + s * Config::kDoBytes;
      // Where rows are to become zero first, the warp below says when Q and dO are there.
      const bool as_it_is = !work.has_foreign_rows(m0, kBlockM);
      ptx::mbarrier_wait(barriers.q_empty(s), ring.phase() ^ 1);  // a fresh barrier lets pass
      if (as_it_is) {
        ptx::mbarrier_arrive_expect_tx(barriers.q_full(s), Config::kQBytes);
      } else {
        ptx::mbarrier_arrive_expect_tx(barriers.landed(s), Config::kQBytes + Config::kDoBytes);
        ptx::mbarrier_arrive(barriers.q_full(s));
      }
      load_queries<Config::kChunks>(maps.q, sQ, as_it_is ? barriers.q_full(s) : barriers.landed(s),
                                    m0, head);
      if (first) load_keys<Config::kVChunks>(maps.v, Config::kOffsetV, barriers.v_full());
      first = false;
      ptx::mbarrier_wait(barriers.do_empty(s), ring.phase() ^ 1);
      if (as_it_is) ptx::mbarrier_arrive_expect_tx(barriers.do_full(s), Config::kDoBytes);
      load_queries<Config::kVChunks>(maps.dout, sDo,
                                     as_it_is ? barriers.do_full(s) : barriers.landed(s), m0, head);
      ring.advance();
    });
  }

  // One warp: lse_log2 and delta, which no copy engine can read where a sequence starts anywhere.
  // Rows behind the sequence get P = 0. And rows of Q and dO that may hold anything become zero.
  __device__ __forceinline__ void read_statistics() {
    const int lane = threadIdx.x % 32;
    work.for_each_step(kBlockM, [&](int m0, int head) {
      const int s = ring.stage();
      const int64_t offset = work.batch_idx * params.lse_batch_stride +
                             head * params.lse_head_stride + work.side_q.start + m0;
      float lse_log2[kBlockM / 32], delta[kBlockM / 32];
#pragma unroll
      for (int i = 0; i < kBlockM / 32; ++i) {
        const int row = lane + 32 * i;
        const bool valid = m0 + row < work.side_q.length;
        lse_log2[i] = valid ? params.lse_log2[offset + row] : INFINITY;
        delta[i] = valid ? params.delta[offset + row] : 0.0f;
      }
      ptx::mbarrier_wait(barriers.q_empty(s), ring.phase() ^ 1);
#pragma unroll
      for (int i = 0; i < kBlockM / 32; ++i) {
        const uint32_t row_bytes = 4 * (s * kBlockM + lane + 32 * i);
        ptx::st_shared_b32(smem + Config::kOffsetLse + row_bytes, __float_as_uint(lse_log2[i]));
        ptx::st_shared_b32(smem + Config::kOffsetDelta + row_bytes, __float_as_uint(delta[i]));
      }
      if (work.has_foreign_rows(m0, kBlockM)) {
        ptx::mbarrier_wait(barriers.landed(s), landed_phases >> s & 1);
        landed_phases ^= 1u << s;
        const int begin = min(max(work.rows.begin - m0, 0), kBlockM);
        const int end = min(max(work.rows.end - m0, begin), kBlockM);
        const uint32_t sQ = smem + Config::kOffsetQ + s * Config::kQBytes;
        const uint32_t sDo = smem + Config::kOffsetDo + s * Config::kDoBytes;
        for (const BlockRange& foreign : {BlockRange{0, begin}, BlockRange{end, kBlockM}}) {
          zero_rows<Config::kChunks>(sQ, Config::kQChunkBytes, foreign.begin, foreign.end, lane,
                                     32);
          zero_rows<Config::kVChunks>(sDo, Config::kQChunkBytes, foreign.begin, foreign.end, lane,
                                      32);
        }
        __syncwarp();  // every lane's part is zero before dO is said to be there
        if (lane == 0) ptx::mbarrier_arrive(barriers.do_full(s));
      }
      ptx::mbarrier_arrive(barriers.q_full(s));
      ring.advance();
    });
  }

 private:
  __device__ __forceinline__ int batch() const {
    return params.cu_seqlens_q == nullptr ? work.batch_idx : 0;
  }
  template <int kChunks>
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, uint32_t offset,
                                            uint32_t full) const {
    constexpr uint32_t kRowBytes = kChunks * Config::kRowChunkBytes;
    ptx::mbarrier_arrive_expect_tx(full, Config::kKeyGroups * kRowBytes);
    for (int w = 0; w < Config::kKeyGroups; ++w) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        ptx::tma_load_4d(smem + offset + w * kRowBytes + c * Config::kRowChunkBytes, &map, full,
                         64 * c, static_cast<int>(work.side_k.start) + work.n0 + 64 * w,
                         work.kv_head_idx, batch());
      }
    }
  }
  template <int kChunks>
  __device__ __forceinline__ void load_queries(const CUtensorMap& map, uint32_t dst, uint32_t bar,
                                               int m0, int head) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::tma_load_4d(dst + c * Config::kQChunkBytes, &map, bar, 64 * c,
                       static_cast<int>(work.side_q.start) + m0, head, batch());
    }
  }

  const BwdParams& params;
  const BwdTensorMaps& maps;
  const BwdDkvWork& work;
  const uint32_t smem;
  const BwdDkvBarriers<Config> barriers;
  RingState<Config::kStages> ring;
  uint32_t landed_phases = 0;  // of the statistics' warp, a bit per stage
};

}  // namespace flashattn_ext::sm90
