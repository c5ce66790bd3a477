"""Exact attention for PyTorch as handwritten CUDA kernels, with an executable specification.

    from flashattn_ext import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)        # q, k, v: (batch, seqlen, heads, head_dim)

On a CUDA device the kernels of `csrc/` run; on the CPU the specification in `spec.py` does, through
the same ops (`torch.ops.flashattn_ext`), options and error messages. `explain` says what runs and
why, `show_config` what was built.
"""

import torch as _torch  # noqa: F401  (loads the libraries that the native module links to)

from ._loader import build_info, load_native

__version__ = "0.1.0"

load_native()  # defines torch.ops.flashattn_ext

from . import _no_cuda, spec_ops  # noqa: E402

spec_ops.register()  # the CPU kernels
if _reason := build_info()["no_cuda_reason"]:
    _no_cuda.register(_reason)

from .block_masks import (  # noqa: E402
    block_mask_of,
    prefix_block_mask,
    segment_block_mask,
    sliding_block_mask,
)
from .config import show_config  # noqa: E402
from .dropout import dropout_mask  # noqa: E402
from .interface import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    merge,
)
from .plan import DeviceFacts, Plan, explain  # noqa: E402

__all__ = [
    "DeviceFacts",
    "Plan",
    "block_mask_of",
    "build_info",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "merge",
    "prefix_block_mask",
    "segment_block_mask",
    "show_config",
    "sliding_block_mask",
]
