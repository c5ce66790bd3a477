"""Packed sequences of different lengths: each is a dense problem of batch one, nothing more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .spec import Gradients, attention_backward, attention_forward
from .spec_scores import NO_OPTIONS, Options, accumulation_dtype, as_4d, tile_of


def sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: Options,
    key_bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Iterator[tuple[slice, slice, Options]]:
    """Each packed sequence as (its rows of q, its rows of k and v, the options of a batch of one).

    Sequence b owns rows cu_seqlens[b] to cu_seqlens[b + 1], of which it uses the first seqused[b].
    Lengths are clamped so that no value of theirs leads outside the tensors.
    """

    def used_rows(total: int, cu_seqlens: list[int], used: list[int] | None, b: int) -> slice:
        first = min(max(cu_seqlens[b], 0), total)
        stop = min(max(cu_seqlens[b + 1], first), total)
        return slice(first, stop if used is None else min(stop, first + max(used[b], 0)))

    def of_batch(x: Tensor | None, b: int) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[b : b + 1]

    def up_to(x: Tensor | None, b: int, length_q: int, length_k: int) -> Tensor | None:
        x = of_batch(None if x is None else as_4d(x), b)
        return x if x is None else tile_of(x, slice(0, length_q), slice(0, length_k))

    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    used_q, used_k = (None if x is None else x.tolist() for x in (seqused_q, seqused_k))
    slopes = options.alibi_slopes
    for b in range(len(starts_q) - 1):
        rows = used_rows(q.shape[0], starts_q, used_q, b)
        keys = used_rows(k.shape[0], starts_k, used_k, b)
        length_q, length_k = rows.stop - rows.start, keys.stop - keys.start
        yield (
            rows,
            keys,
            replace(
                options,
                bias=None if key_bias is None else key_bias[..., None, keys],
                mask=up_to(options.mask, b, length_q, length_k),
                block_mask=of_batch(options.block_mask, b),
                alibi_slopes=of_batch(slopes, b)
                if slopes is not None and slopes.dim() == 2
                else slopes,
                first_batch=b,
            ),
        )


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: Options = NO_OPTIONS,
    *,
    key_bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (total_q, Hq, Dv) and LSE (Hq, total_q) of packed sequences, each on its own.

    cu_seqlens_q, cu_seqlens_k: (B + 1) where each sequence begins. seqused_q, seqused_k: (B) how
    many of its rows count. Rows that no sequence uses are never read; out is 0, LSE -inf there.
    key_bias: (total_k) or (Hq, total_k), added to every score of that key. In `options`, `mask` and
    `block_mask` are indexed by positions inside each sequence.
    """
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    lse_shape, dtype = (q.shape[1], q.shape[0]), accumulation_dtype(q.dtype)
    lse = torch.full(lse_shape, -math.inf, dtype=dtype, device=q.device)
    for rows, keys, own in sequences(
        q, k, cu_seqlens_q, cu_seqlens_k, options, key_bias, seqused_q, seqused_k
    ):
        o, part = attention_forward(q[None, rows], k[None, keys], v[None, keys], own)
        out[rows], lse[:, rows] = o[0], part[0]
    return out, lse


def varlen_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: Options = NO_OPTIONS,
    *,
    key_bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    wanted: Iterable[str] = (),
) -> Gradients:
    """Gradients of varlen_forward; "bias" in `wanted` stands for key_bias. Unused rows get 0."""
    wanted = set(wanted)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    shared = {
        name: torch.zeros_like(key_bias if name == "bias" else getattr(options, name))
        for name in wanted
    }
    for b, (rows, keys, own) in enumerate(
        sequences(q, k, cu_seqlens_q, cu_seqlens_k, options, key_bias, seqused_q, seqused_k)
    ):
        grads = attention_backward(
            dout[None, rows],
            None if dlse is None else dlse[None, :, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            lse[None, :, rows],
            own,
            wanted=wanted,
        )
        dq[rows], dk[keys], dv[keys] = grads.dq[0], grads.dk[0], grads.dv[0]
        for name in wanted:
            part = getattr(grads, "d" + name)
            if name == "bias":
                shared[name][..., keys] += part.squeeze(-2)
            elif name == "alibi_slopes" and part.dim() == 2:
                shared[name][b if shared[name].shape[0] > 1 else 0] += part[0]
            else:
                shared[name] += part
    return Gradients(
        dq, dk, dv, *(shared.get(name) for name in ("bias", "alibi_slopes", "rel_bias", "sink"))
    )
