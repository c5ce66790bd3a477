// Programmatic dependent launch: a kernel launched with that attribute may start before the kernel
// ahead of it in the stream is done (sm_90+). PTX ISA, "griddepcontrol".
#pragma once

namespace flashattn_ext::ptx {

// The dependent kernel may start once every CTA of this one has come here or ended.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

// Waits until the kernel ahead is done and its writes are visible; returns at once where this one
// was launched in the ordinary way.
__device__ __forceinline__ void wait_for_dependency() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

}  // namespace flashattn_ext::ptx
