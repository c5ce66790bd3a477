"""The CPU kernels of torch.ops.flashattn_ext.*: the functions of spec.py behind the ops' schemas.

Every kernel starts with the op's Meta kernel on the same CPU tensors: that runs all argument checks
and allocates the outputs with the shapes, types and strides promised on every device. The results
of the specification are then copied into them.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from . import spec, spec_varlen
from .dropout import draw_rng_state
from .spec_scores import GRAD_OPTIONS, Options

META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
OPTION_NAMES = {field.name for field in fields(Options)}


def outputs_of(op, *args, **kwargs):
    """Checks the arguments and returns the op's outputs, not yet filled."""
    return op.default.redispatch(META, *args, **kwargs)


def options_of(arguments: dict) -> Options:
    """The ops' keyword arguments that say what to compute; `plan` and `deterministic` do not."""
    return Options(**{name: x for name, x in arguments.items() if name in OPTION_NAMES})


def take_rng_state(arguments: dict, rng_state: Tensor) -> None:
    """Fills the op's output rng_state, which is empty without dropout, and uses it from now on."""
    if rng_state.numel():
        given = arguments.get("rng_state")
        rng_state.copy_(draw_rng_state() if given is None else given)
        arguments["rng_state"] = rng_state


def fill(outputs, results) -> None:
    for output, result in zip(outputs, results):
        if result is not None:
            output.copy_(result)


def wanted_names(wanted) -> list[str]:
    return [name for name, is_wanted in zip(GRAD_OPTIONS, wanted) if is_wanted]


def fwd(q, k, v, **arguments):
    out, lse, rng_state = outputs_of(torch.ops.flashattn_ext.fwd, q, k, v, **arguments)
    take_rng_state(arguments, rng_state)
    fill((out, lse), spec.attention_forward(q, k, v, options_of(arguments)))
    return out, lse, rng_state


def bwd(dout, dlse, q, k, v, out, lse, wanted=(), **arguments):
    inputs = (dout, dlse, q, k, v, out, lse)
    asked = {"wanted": wanted} if wanted else {}
    grads = outputs_of(torch.ops.flashattn_ext.bwd, *inputs, **arguments, **asked)
    names = wanted_names(wanted)
    fill(grads, spec.attention_backward(*inputs, options_of(arguments), wanted=names))
    return grads


# The varlen ops have the bias's place for a bias per key; from here on it is the bias.


def packed_options_of(arguments: dict) -> Options:
    return replace(options_of(arguments), bias=arguments.get("key_bias"))


def packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, arguments: dict):
    used = arguments.get("seqused_q"), arguments.get("seqused_k")
    return spec_varlen.Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *used)


def varlen_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **arguments):
    inputs = (q, k, v)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse, rng_state = outputs_of(
        torch.ops.flashattn_ext.varlen_fwd, *inputs, *lengths, **arguments
    )
    take_rng_state(arguments, rng_state)
    options, packing = packed_options_of(arguments), packing_of(*lengths, arguments)
    fill((out, lse), spec_varlen.varlen_forward(*inputs, packing, options))
    return out, lse, rng_state


def varlen_bwd(
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    wanted=(),
    **arguments,
):
    inputs = (dout, dlse, q, k, v, out, lse)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    asked = {"wanted": wanted} if wanted else {}
    grads = outputs_of(torch.ops.flashattn_ext.varlen_bwd, *inputs, *lengths, **arguments, **asked)
    options, packing = packed_options_of(arguments), packing_of(*lengths, arguments)
    names = wanted_names(wanted)
    fill(grads, spec_varlen.varlen_backward(*inputs, packing, options, wanted=names))
    return grads


def merge(out_a, lse_a, out_b, lse_b):
    outputs = outputs_of(torch.ops.flashattn_ext.merge, out_a, lse_a, out_b, lse_b)
    fill(outputs, spec.merge(out_a, lse_a, out_b, lse_b))
    return outputs


def register() -> None:
    """Attaches the kernels to the CPU. The ops must be defined, and this runs once per process."""
    for kernel in (fwd, bwd, varlen_fwd, varlen_bwd, merge):
        torch.library.impl(f"flashattn_ext::{kernel.__name__}", "cpu", kernel)
