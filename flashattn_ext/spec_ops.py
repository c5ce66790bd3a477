"""The CPU kernels of torch.ops.flashattn_ext.*: the functions of spec.py behind the ops' schemas.

Every kernel starts with the op's Meta kernel on the same CPU tensors: that runs all argument checks
and allocates the outputs with the shapes, types and strides promised on every device. The results
of the specification are then copied into them.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from . import spec, spec_varlen
from .dropout import draw_rng_state
from .spec_scores import Options

META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
# The order of `wanted` and of the last four outputs of the backward ops.
GRAD_OPTIONS = ("bias", "alibi_slopes", "rel_bias", "sink")
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


# What the varlen kernels need from their keyword arguments beyond the options.
VARLEN_NAMES = ("key_bias", "seqused_q", "seqused_k")


def varlen_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **arguments):
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    out, lse, rng_state = outputs_of(
        torch.ops.flashattn_ext.varlen_fwd, *inputs, max_seqlen_q, max_seqlen_k, **arguments
    )
    take_rng_state(arguments, rng_state)
    lengths = {name: arguments.get(name) for name in VARLEN_NAMES}
    fill((out, lse), spec_varlen.varlen_forward(*inputs, options_of(arguments), **lengths))
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
    inputs = (dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
    asked = {"wanted": wanted} if wanted else {}
    grads = outputs_of(
        torch.ops.flashattn_ext.varlen_bwd,
        *inputs,
        max_seqlen_q,
        max_seqlen_k,
        **arguments,
        **asked,
    )
    lengths = {name: arguments.get(name) for name in VARLEN_NAMES}
    results = spec_varlen.varlen_backward(
        *inputs, options_of(arguments), wanted=wanted_names(wanted), **lengths
    )
    fill(grads, results)
    return grads


def merge(out_a, lse_a, out_b, lse_b):
    outputs = outputs_of(torch.ops.flashattn_ext.merge, out_a, lse_a, out_b, lse_b)
    fill(outputs, spec.merge(out_a, lse_a, out_b, lse_b))
    return outputs


def register() -> None:
    """Attaches the kernels to the CPU. The ops must be defined, and this runs once per process."""
    for kernel in (fwd, bwd, varlen_fwd, varlen_bwd, merge):
        torch.library.impl(f"flashattn_ext::{kernel.__name__}", "cpu", kernel)
