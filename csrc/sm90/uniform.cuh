// What a CTA works on, as numbers that a warp's lanes share.
#pragma once

#include "attention/mask.cuh"
#include "attention/seqlen_info.cuh"
#include "ptx/registers.cuh"

namespace flashattn_ext::sm90 {

// The same, of which the compiler knows that all lanes of a warp have it: block numbers, and with
// them stages and descriptors, stay in uniform registers. Every lane calls it.
__device__ __forceinline__ SeqlenSide uniform(SeqlenSide side) {
  side.length = ptx::uniform(side.length);
  return side;
}
__device__ __forceinline__ BlockRange uniform(const BlockRange& range) {
  return {ptx::uniform(range.begin), ptx::uniform(range.end)};
}

}  // namespace flashattn_ext::sm90
