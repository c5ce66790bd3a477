"""Calls the specification with the options of the public functions, as dicts like `reference`'s."""

import torch
from cases import lse_type

from flashattn_ext import spec, spec_varlen
from flashattn_ext.dropout import dropout_mask
from flashattn_ext.spec_scores import Options

GRAD_OPTIONS = ("bias", "alibi_slopes", "rel_bias", "sink")
RNG_STATE = torch.tensor([2**63 + 12345, 2**40 + 4], dtype=torch.uint64)


def spec_options(*, causal=False, window_size=(-1, -1), **rest) -> Options:
    return Options(
        causal=bool(causal),
        top_left=causal == "top_left",
        window_left=window_size[0],
        window_right=window_size[1],
        **rest,
    )


def named(grads, names) -> dict:
    return {"d" + name: getattr(grads, "d" + name) for name in names}


def run(q, k, v, dout=None, dlse=None, *, block_q=None, block_k=None, **options):
    """out, lse and, with `dout`, the gradients of q, k, v and of every tensor option."""
    chosen = spec_options(**options)
    sizes = {"block_q": block_q, "block_k": block_k}
    out, lse = spec.attention_forward(q, k, v, chosen, **sizes)
    result = {"out": out, "lse": lse}
    if dout is not None:
        wanted = [name for name in GRAD_OPTIONS if options.get(name) is not None]
        grads = spec.attention_backward(
            dout, dlse, q, k, v, out, lse, chosen, wanted=wanted, **sizes
        )
        result.update(named(grads, ["q", "k", "v", *wanted]))
    return result


def run_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    dout=None,
    dlse=None,
    *,
    key_bias=None,
    seqused_q=None,
    seqused_k=None,
    **options,
):
    """`run` for packed sequences; the key bias's gradient is `dkey_bias`."""
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    chosen = spec_options(**options, bias=key_bias)
    longest = [int(x.diff().clamp(min=0).max()) if len(x) > 1 else 0 for x in cu_seqlens]
    packing = spec_varlen.Packing(*cu_seqlens, *longest, seqused_q, seqused_k)
    out, lse = spec_varlen.varlen_forward(q, k, v, packing, chosen)
    result = {"out": out, "lse": lse}
    if dout is not None:
        wanted = [name for name in GRAD_OPTIONS if getattr(chosen, name) is not None]
        grads = spec_varlen.varlen_backward(
            dout, dlse, q, k, v, out, lse, packing, chosen, wanted=wanted
        )
        result.update(named(grads, ["q", "k", "v", *wanted]))
        if key_bias is not None:
            result["dkey_bias"] = result.pop("dbias")
    return result


def for_reference(options, batch, heads_q, seqlen_q, seqlen_k):
    """The same options for `reference`: it takes the dropout mask where the spec takes its seed."""
    options = dict(options)
    state = options.pop("rng_state", None)
    if state is not None:
        options["dropout_mask"] = dropout_mask(
            state, batch, heads_q, seqlen_q, seqlen_k, options["dropout_p"]
        )
    return options


def make_inputs(batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v, dtype):
    """q, k, v, dout, dlse: randn, rounded to dtype (dlse to LSE's type)."""
    return (
        torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_k, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_k, head_dim_v).to(dtype),
        torch.randn(batch, seqlen_q, heads_q, head_dim_v).to(dtype),
        torch.randn(batch, heads_q, seqlen_q, dtype=lse_type(dtype)),
    )
