"""Packed sequences of different lengths: each is a dense problem of batch one, nothing more."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .spec import Gradients, attention_backward, attention_forward
from .spec_scores import GRAD_OPTIONS, NO_OPTIONS, Options, accumulation_dtype, as_4d, tile_of


class Packing(NamedTuple):
    """Where the sequences lie in q (total_q, Hq, D) and in k, v (total_k, Hk, D or Dv).

    Sequence b owns rows cu_seqlens[b] to cu_seqlens[b + 1] and uses the first seqused[b] of them
    (all without seqused). Rows that no sequence uses are never read. All tensors are int32; no
    value of theirs leads outside q, k and v, or to a sequence longer than max_seqlen.
    """

    cu_seqlens_q: Tensor  # (B + 1)
    cu_seqlens_k: Tensor  # (B + 1)
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Tensor | None = None  # (B)
    seqused_k: Tensor | None = None  # (B)


def used_rows(
    total: int, max_seqlen: int, cu_seqlens: Tensor, seqused: Tensor | None
) -> list[slice]:
    """The rows that each sequence uses, of one side."""
    result = []
    for b in range(len(cu_seqlens) - 1):
        first = min(max(int(cu_seqlens[b]), 0), total)
        stop = min(max(int(cu_seqlens[b + 1]), first), total, first + max_seqlen)
        if seqused is not None:
            stop = min(stop, first + max(int(seqused[b]), 0))
        result.append(slice(first, stop))
    return result


def of_sequence(options: Options, b: int, rows: slice, keys: slice) -> Options:
    """The options of sequence b alone: its batch entry, cut to its lengths."""

    def of_batch(x: Tensor) -> Tensor:
        return x[b : b + 1] if x.shape[0] > 1 else x

    own = replace(options, first_batch=b)
    if options.bias is not None:
        own = replace(own, bias=options.bias[..., None, keys])
    if options.mask is not None:
        lengths = slice(0, rows.stop - rows.start), slice(0, keys.stop - keys.start)
        own = replace(own, mask=tile_of(of_batch(as_4d(options.mask)), *lengths))
    if options.block_mask is not None:
        own = replace(own, block_mask=of_batch(as_4d(options.block_mask)))
    if options.alibi_slopes is not None and options.alibi_slopes.dim() == 2:
        own = replace(own, alibi_slopes=of_batch(options.alibi_slopes))
    return own


def sequences(
    q: Tensor, k: Tensor, packing: Packing, options: Options
) -> Iterator[tuple[int, slice, slice, Options]]:
    """Every sequence: its index, its rows of q, its rows of k and v, its options."""
    all_rows = used_rows(q.shape[0], packing.max_seqlen_q, packing.cu_seqlens_q, packing.seqused_q)
    all_keys = used_rows(k.shape[0], packing.max_seqlen_k, packing.cu_seqlens_k, packing.seqused_k)
    for b, (rows, keys) in enumerate(zip(all_rows, all_keys)):
        yield b, rows, keys, of_sequence(options, b, rows, keys)


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: Options = NO_OPTIONS
) -> tuple[Tensor, Tensor]:
    """out (total_q, Hq, Dv) and LSE (Hq, total_q) of packed sequences, each on its own.

    Rows that no sequence uses have out = 0 and LSE = -inf. In `options`, `bias` is per key,
    (total_k) or (Hq, total_k); `mask` and `block_mask` count positions inside each sequence.
    """
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    lse_shape, dtype = (q.shape[1], q.shape[0]), accumulation_dtype(q.dtype)
    lse = torch.full(lse_shape, -math.inf, dtype=dtype, device=q.device)
    for _, rows, keys, own in sequences(q, k, packing, options):
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
    packing: Packing,
    options: Options = NO_OPTIONS,
    *,
    wanted: Collection[str] = (),
) -> Gradients:
    """Gradients of varlen_forward, given what it took and returned. Unused rows get 0."""

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    dq, dk, dv = zeros(q), zeros(k), zeros(v)
    shared = {name: zeros(getattr(options, name)) for name in wanted}
    for b, rows, keys, own in sequences(q, k, packing, options):
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
        for name, total in shared.items():
            part = getattr(grads, "d" + name)
            if name == "bias":
                total[..., keys] += part.squeeze(-2)
            elif part.shape == total.shape:
                total += part
            else:  # alibi_slopes (B, Hq): every sequence has its own
                total[b : b + 1] += part
    return Gradients(dq, dk, dv, *(shared.get(name) for name in GRAD_OPTIONS))
