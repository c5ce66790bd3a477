"""The public functions: thin calls of the ops `torch.ops.flashattn_ext.*`.

Signatures begin in flash-attn 2's order, so that its callers can switch by changing an import; what
it does not have follows as keyword-only arguments. No function reshapes, copies or reads data:
packed forms pass views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dropout import dropout_mask

# Bound once: looking an op up costs as much as calling it.
_fwd = torch.ops.flashattn_ext.fwd.default
_varlen_fwd = torch.ops.flashattn_ext.varlen_fwd.default
_merge = torch.ops.flashattn_ext.merge.default


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    rel_bias: Tensor | None = None,
    sink: Tensor | None = None,
    block_mask: Tensor | None = None,
    return_lse: bool = False,
    rng_state: Tensor | None = None,
    plan: str | None = None,
) -> Any:
    """Exact attention over a batch of equally long sequences.

    For each batch entry and head, with `off = seqlen_k - seqlen_q` and `r = j - (i + off)` the
    position of key j relative to query i,

        S[i, j] = softmax_scale * q[i] . k[j]                  the scores
        S = softcap * tanh(S / softcap)                        if softcap > 0
        S += bias[i, j] - alibi_slopes * |r| + rel_bias[R + clamp(r, -R, R)]
        S = -inf where mask, window_size or causal hide key j from query i
        P = exp(S - lse),  lse[i] = log(sum_j exp(S[i, j]) + exp(sink))
        out = dropout(P) v

    S and P are never stored; the backward recomputes them (FlashAttention, Dao et al. 2022 and
    2023; `spec.py` is the same in plain torch). Memory beyond the outputs is O(tokens).
    Differentiable in q, k, v, bias, alibi_slopes, rel_bias and sink, through out and through lse.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim); heads_q must be a multiple of heads_k, and query
            head h reads key head h // (heads_q // heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v); head_dim_v may differ from head_dim.
            All three in one dtype: float16 or bfloat16 on CUDA with head dims that are multiples
            of 8 up to 256; also float32 and float64, any head dim, on the CPU. Any strides: the
            last dimension contiguous, the start 16-byte aligned and other strides multiples of 16
            bytes (0 included) are read in place, anything else is copied first.
        dropout_p: probability of dropping an entry of P, in [0, 1).
        softmax_scale: None means 1 / sqrt(head_dim).
        causal: True or "bottom_right": query i sees keys with r <= 0, so the last query sees every
            key. "top_left": the same with off = 0, so the first query sees one key.
        window_size: (left, right), inclusive: keys with -left <= r <= right; -1 is unlimited.
            The last 1024 keys and the query's own: (1024, 0).
        softcap: 0 is off.
        alibi_slopes: float32 (heads_q) or (batch, heads_q).
        deterministic: gradients equal to the bit over runs; also asked for by
            `torch.use_deterministic_algorithms(True)`. Without it dq alone may differ in its last
            bit, and only in long problems on Hopper; see docs/accuracy.md, "Repeatability".
        return_attn_probs: return (out, lse, keep mask of the dropout or None) as flash-attn does.
        bias: float32 or q's dtype, broadcastable to (batch, heads_q, seqlen_q, seqlen_k).
        mask: bool, broadcastable likewise; True = may attend. May be given beside bias.
        rel_bias: (heads_q, 2 R + 1), float32 or q's dtype.
        sink: float32 (heads_q), a logit that joins the denominator only.
        block_mask: bool (batch or 1, heads_q or 1, ceil(seqlen_q / 128), ceil(seqlen_k / 128));
            False skips a tile of 128 queries and 128 keys.
        return_lse: return (out, lse).
        rng_state: uint64 (2), (seed, offset) of the dropout; None draws from torch's generator.
        plan: name of the kernel family to use or fail ("sm90_fused", "sm90", "sm80", "spec");
            None chooses (`explain`).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in q's dtype, contiguous.
        lse (batch, heads_q, seqlen_q) in float32 (float64 for float64 inputs), natural log.
        A query that sees no key has out = 0 and lse = -inf (with a sink: lse = sink), and exactly
        zero gradients.

    Raises:
        RuntimeError: a tensor has the wrong device, dtype or shape, or a number is out of range.
        NotImplementedError: the tensors' device has no kernel for the combination; the message
            names the option. On CUDA bias, mask, alibi_slopes, rel_bias, sink, block_mask and
            dropout_p > 0 are such options now.
        ValueError: `causal` is none of the above.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        mask, rel_bias, sink, block_mask, rng_state, plan,
    )  # fmt: skip
    if bias is not None:
        options["bias"] = bias
    out, lse, rng_state = _fwd(q, k, v, **options)
    if return_attn_probs:
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        return out, lse, dropout_mask(rng_state, *shape, dropout_p) if dropout_p > 0 else None
    return (out, lse) if return_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    key_bias: Tensor | None = None,
    mask: Tensor | None = None,
    rel_bias: Tensor | None = None,
    sink: Tensor | None = None,
    block_mask: Tensor | None = None,
    return_lse: bool = False,
    rng_state: Tensor | None = None,
    plan: str | None = None,
) -> Any:
    """Exact attention over sequences of different lengths, packed one after the other.

    Sequence b owns the rows cu_seqlens_q[b] : cu_seqlens_q[b + 1] of q and
    cu_seqlens_k[b] : cu_seqlens_k[b + 1] of k and v, and attends within itself as
    `flash_attn_func` says; positions count from the start of the sequence, `off` is its own.

    Args:
        q: (total_q, heads_q, head_dim).
        k: (total_k, heads_k, head_dim).
        v: (total_k, heads_k, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1) on q's device, non-decreasing, from 0. They
            are never read on the host; on the device they are clamped to the tensors.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths: an int, or a tensor of one element
            on the CPU. Rows of a sequence beyond the bound take no part.
        seqused_q, seqused_k: int32 (batch), how many of a sequence's rows to use, or None for all.
        key_bias: (total_k) or (heads_q, total_k), added to the scores of its key; float32 or q's
            dtype. It takes the place of `bias`.
        mask, block_mask: as in `flash_attn_func`, with max_seqlen_q and max_seqlen_k for the
            lengths and positions within the sequence.
        The other arguments are those of `flash_attn_func`.

    Returns:
        out (total_q, heads_q, head_dim_v) and lse (heads_q, total_q). Rows that no sequence owns
        (beyond cu_seqlens_q[-1], beyond seqused_q) are never read; they have out = 0, lse = -inf
        and zero gradients. With return_attn_probs the keep mask of the dropout is
        (batch, heads_q, max_seqlen_q, max_seqlen_k).

    Raises: as `flash_attn_func`; also ValueError where a max_seqlen is a CUDA tensor.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        mask, rel_bias, sink, block_mask, rng_state, plan,
    )  # fmt: skip
    if key_bias is not None:
        options["key_bias"] = key_bias
    if seqused_q is not None:
        options["seqused_q"] = seqused_q
    if seqused_k is not None:
        options["seqused_k"] = seqused_k
    if isinstance(max_seqlen_q, Tensor):
        max_seqlen_q = _host_int("max_seqlen_q", max_seqlen_q)
    if isinstance(max_seqlen_k, Tensor):
        max_seqlen_k = _host_int("max_seqlen_k", max_seqlen_k)
    out, lse, rng_state = _varlen_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
    )
    if return_attn_probs:
        shape = (cu_seqlens_q.shape[0] - 1, q.shape[1], max_seqlen_q, max_seqlen_k)
        return out, lse, dropout_mask(rng_state, *shape, dropout_p) if dropout_p > 0 else None
    return (out, lse) if return_lse else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn_func` of q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim); its parts are read in place, and its gradient
            comes back in one tensor.
        options: the keyword-only arguments of `flash_attn_func`.
    """
    q, k, v = _unpack("qkv", qkv, 5, "(batch, seqlen, 3, heads, head_dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, **options,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn_func` of k and v in one tensor.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        kv: (batch, seqlen_k, 2, heads_k, head_dim), read in place.
        options: the keyword-only arguments of `flash_attn_func`.
    """
    k, v = _unpack("kv", kv, 5, "(batch, seqlen_k, 2, heads_k, head_dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, **options,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one tensor.

    Args:
        qkv: (total, 3, heads, head_dim), read in place.
        cu_seqlens: int32 (batch + 1), for queries and keys alike.
        max_seqlen: upper bound of the lengths.
        options: the keyword-only arguments of `flash_attn_varlen_func`.
    """
    q, k, v = _unpack("qkv", qkv, 4, "(total, 3, heads, head_dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **options,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn_varlen_func` of k and v in one tensor.

    Args:
        q: (total_q, heads_q, head_dim).
        kv: (total_k, 2, heads_k, head_dim), read in place.
        options: the keyword-only arguments of `flash_attn_varlen_func`.
    """
    k, v = _unpack("kv", kv, 4, "(total_k, 2, heads_k, head_dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **options,
    )  # fmt: skip


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The result over two disjoint sets of keys, from the results over each.

        lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    A state with lse = -inf is neutral: merging with it changes no bit. Differentiable in all four.

    Args:
        out_a, out_b: (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), one dtype.
        lse_a, lse_b: (batch, heads, seqlen) or (heads, tokens), as the functions above return.

    Returns:
        (out, lse) in the shapes and dtypes of out_a and lse_a.

    Raises:
        RuntimeError: devices, dtypes or shapes do not go together.
        NotImplementedError: on CUDA, a dtype other than float16 and bfloat16 or a head dim that is
            not a multiple of 8.
    """
    return _merge(out_a, lse_a, out_b, lse_b)


def _options(
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    mask, rel_bias, sink, block_mask, rng_state, plan,
) -> dict[str, Any]:  # fmt: skip
    """The op's keyword arguments that differ from their defaults: each one passed costs time."""
    options: dict[str, Any] = {}
    if causal:
        options["causal"] = True
        if isinstance(causal, str) and causal != "bottom_right":
            if causal != "top_left":
                raise ValueError(
                    "flashattn_ext: causal must be False, True, 'bottom_right' (the same as True) "
                    f"or 'top_left', got {causal!r}"
                )
            options["top_left"] = True
    left, right = window_size
    if left != -1:
        options["window_left"] = left
    if right != -1:
        options["window_right"] = right
    if softmax_scale is not None:
        options["softmax_scale"] = softmax_scale
    if softcap:
        options["softcap"] = softcap
    if dropout_p:
        options["dropout_p"] = dropout_p
    if deterministic:
        options["deterministic"] = True
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if mask is not None:
        options["mask"] = mask
    if rel_bias is not None:
        options["rel_bias"] = rel_bias
    if sink is not None:
        options["sink"] = sink
    if block_mask is not None:
        options["block_mask"] = block_mask
    if rng_state is not None:
        options["rng_state"] = rng_state
    if plan is not None:
        options["plan"] = plan
    return options


def _host_int(name: str, length: Tensor) -> int:
    """The int in a CPU tensor of one element; a CUDA tensor would have to be waited for."""
    if length.device.type != "cpu":
        raise ValueError(
            f"flashattn_ext: {name} is a tensor on {length.device}, and reading it would wait for "
            "the device; pass an int (an upper bound is enough) or a CPU tensor"
        )
    return int(length)


def _unpack(name: str, packed: Tensor, dims: int, layout: str) -> tuple[Tensor, ...]:
    """The views q, k, v (or k, v) of a packed tensor; dimension -3 tells them apart."""
    parts = 3 if name == "qkv" else 2
    if packed.dim() != dims or packed.shape[-3] != parts:
        raise ValueError(
            f"flashattn_ext: {name} must be {layout}, got the shape {tuple(packed.shape)}"
        )
    return packed.unbind(-3)
