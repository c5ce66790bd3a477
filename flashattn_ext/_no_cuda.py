"""What the ops say about CUDA tensors where the native module was built without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

OPS = ("fwd", "bwd", "varlen_fwd", "varlen_bwd", "merge")

_library = torch.library.Library("flashattn_ext", "IMPL")  # its kernels live as long as it does


def refusal(reason: str) -> Callable[..., NoReturn]:
    """A kernel that raises, naming why there is no real one."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(
            f"flashattn_ext: this build holds the CPU path only ({reason}), and the tensors are on "
            "a CUDA device; rebuild with a CUDA toolkit (pip install --no-build-isolation .), or "
            "move the tensors to the CPU"
        )

    return refuse


def register(reason: str) -> None:
    """Makes `refusal(reason)` the CUDA kernel of every op."""
    for op in OPS:
        _library.impl(op, refusal(reason), "CUDA")
