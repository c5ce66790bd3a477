"""What the ops say about CUDA tensors where the native module was built without CUDA."""

from __future__ import annotations

import torch

OPS = ("fwd", "bwd", "varlen_fwd", "varlen_bwd", "merge")

_library = torch.library.Library("flashattn_ext", "IMPL")  # its kernels live as long as it does


def register(reason: str) -> None:
    """Give every op a CUDA kernel that raises, naming why there is no real one."""

    def raise_no_cuda(*args, **kwargs):
        raise NotImplementedError(
            f"flashattn_ext: this build holds the CPU path only ({reason}), and the tensors are on "
            "a CUDA device; rebuild with a CUDA toolkit (pip install --no-build-isolation .), or "
            "move the tensors to the CPU"
        )

    for op in OPS:
        _library.impl(op, raise_no_cuda, "CUDA")
