"""Exact attention, tile by tile: the executable specification of flashattn_ext.

This file says what every operation of the library computes, in plain torch. It is what runs on the
CPU, and what the CUDA kernels are compared with. Here are the two loops over tiles, forward and
backward, and the merging of results; beside it `spec_scores.py` defines the options and the score
of one tile, `dropout.py` the dropout mask, `spec_varlen.py` packed sequences, and `spec_ops.py`
puts them behind the ops.

**The problem.** For one head with N queries and N keys of length d, attention is

    S = scale * Q K^T        scores, N x N: how much query i wants key j
    P = softmax(S)           each row of S turned into weights that sum to one
    O = P V                  each output row a weighted mean of the values

Inputs and output are N x d; only S and P are N x N. Writing those two to memory and reading them
back costs far more than the arithmetic, so here they never exist whole. The queries are cut into
blocks Q_i of Br rows, keys and values into blocks K_j, V_j of Bc rows, and only one Br x Bc tile
S_ij is alive at a time (FlashAttention: Dao, Fu, Ermon, Rudra and Re 2022, algorithm 1; the loop
order is that of FlashAttention-2, Dao 2023, algorithm 1).

**The forward: the online softmax.** A softmax needs the maximum and the sum of the whole row, a
tile shows Bc of its scores. So a row carries three running values from tile to tile (Milakov and
Gimelshein 2018, extended to O by FlashAttention): m, its largest score so far; l, the sum of
exp(score - m) so far; O, the sum of exp(score - m) * value so far, not yet divided. A new tile
that raises the maximum makes the old sums too large by exp(m_new - m): one factor repairs both.

    m_new = max(m, rowmax(S_ij))         alpha = exp(m - m_new)         P_ij = exp(S_ij - m_new)
    l     = alpha l + rowsum(P_ij)       O     = alpha O + P_ij V_j     m    = m_new

After the last tile O / l is the softmax-weighted mean, exactly; the division happens once. Kept
for the backward are O / l and one number per row, LSE = m + log(l), the log of the row's sum of
exponentials. `online_softmax_steps` is this recurrence and nothing else.

By hand, with scale 1 and two keys to a block: the query [1, 0] scores the keys [1, 0], [0, 1] |
[3, 1], [-1, 1] as 1, 0 | 3, -1; the values are [1, 2], [3, 4] | [5, 6], [7, 8].

    start        m = -inf  l = 0                                    O = [0, 0]
    block one    m = 1     l = 1 + exp(-1)               = 1.3679   O = [2.1036, 3.4715]
    block two    m = 3     l = exp(-2) 1.3679 + 1.01832  = 1.20344  O = [5.4129, 6.6164]
    out = O / l = [4.49786861, 5.49786861], what one block of four keys gives too

**The backward: compute P again.** P was never stored, but P_ij = exp(S_ij - LSE_i) needs only Q_i,
K_j and the saved LSE: one more product per tile instead of an N x N matrix in memory. With dO the
gradient of O, and dLSE that of LSE where somebody uses it (FlashAttention-2, algorithm 2):

    dV_j += P_ij^T dO_i                  dP_ij = dO_i V_j^T
    delta_i = rowsum(dO_i * O_i) - dLSE_i
    dS_ij = P_ij * (dP_ij - delta_i)
    dQ_i += scale dS_ij K_j              dK_j += scale dS_ij^T Q_i

delta is the derivative of the division by l, written with what is at hand: rowsum(P * dP) equals
rowsum(dO * O). Each key block makes one pass over the query blocks that see it.

**The order of the options**: scale, softcap, biases, masks, softmax (with the sink), dropout; the
backward goes through them the other way. `Options` says what each means, `Scores` computes them.

**Precision.** fp64 inputs are computed in fp64, all others in fp32; LSE has that type too, outputs
and gradients the type of their input. **Layouts** are the library's: q (B, Sq, Hq, D),
k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), LSE (B, Hq, Sq); packed, without the batch
dimension: q (total_q, Hq, D), LSE (Hq, total_q). Inside, heads come before rows. Query heads that
share a key head (GQA: Hq = G * Hk) are stacked as rows of one product.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .spec_scores import (
    GRAD_OPTIONS,
    NO_OPTIONS,
    Options,
    Scores,
    blocks,
    heads_first,
    sum_over_queries,
    times_keys,
)

# Default block sizes: as many rows as keep one score tile of all heads near this many elements,
# 1 MB in fp32, so that it stays in cache. Chosen by timing at (1, 1024, 8, 64).
DEFAULT_BLOCK_K = 256
TILE_ELEMENTS = 2**18
# Beyond this |LSE| its spacing in fp32 (6e-5 here) is no longer small against 1.
COARSE_LSE = 1024.0


class Gradients(NamedTuple):
    """What a backward returns, in the types of the inputs; None = not wanted."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dalibi_slopes: Tensor | None
    drel_bias: Tensor | None
    dsink: Tensor | None


def block_sizes(scores: Scores, block_q: int | None, block_k: int | None) -> tuple[int, int]:
    """(Br, Bc): what the caller asked for, else the defaults above."""
    Bc = block_k or min(DEFAULT_BLOCK_K, max(scores.seqlen_k, 1))
    per_row = max(scores.batch * scores.heads_q * Bc, 1)
    Br = block_q or min(max(TILE_ELEMENTS // per_row, 32), 512)
    return Br, Bc


# --- Forward -------------------------------------------------------------------------------------


class State(NamedTuple):
    """What a block of rows carries from tile to tile."""

    m: Tensor  # (B, Hq, Br, 1) the largest score so far
    l: Tensor  # (B, Hq, Br, 1) sum of exp(score - m)
    O: Tensor  # (B, Hq, Br, Dv) sum of exp(score - m) * value


def initial_state(scores: Scores, rows: int, head_dim_v: int) -> State:
    """Nothing seen: m = -inf, l = 0, O = 0. A sink is a key seen before all: m = sink, l = 1."""
    shape = (scores.batch, scores.heads_q, rows, 1)
    O = torch.zeros((*shape[:3], head_dim_v), dtype=scores.dtype, device=scores.device)
    if scores.sink is None:
        return State(torch.full_like(O[..., :1], -math.inf), torch.zeros_like(O[..., :1]), O)
    m = scores.sink.expand(shape)
    return State(m, (m > -math.inf).to(scores.dtype), O)


def online_softmax_steps(
    tiles: Iterable[tuple[Tensor, Tensor, Tensor | None]], state: State
) -> Iterator[State]:
    """The recurrence: yields `state` as it is, then the state after each tile.

    tiles: (S_ij (B, Hq, Br, Bc), V_j (B, Hk, Bc, Dv), dropout factors Z_ij or None), in any order.
    """
    yield state
    m, l, O = state
    for S, V_j, Z in tiles:
        m_new = torch.maximum(m, S.amax(dim=-1, keepdim=True))
        # A row that has seen no key yet subtracts 0, because -inf - (-inf) would be NaN.
        shift = m_new.masked_fill(m_new == -math.inf, 0.0)
        alpha = torch.exp(m - shift)
        P = torch.exp(S - shift)
        l = alpha * l + P.sum(dim=-1, keepdim=True)
        O = alpha * O + times_keys(P if Z is None else P * Z, V_j)
        m = m_new
        yield State(m, l, O)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options = NO_OPTIONS,
    *,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and LSE (B, Hq, Sq). The block sizes Br, Bc change nothing but rounding.

    A row that sees no key has out = 0 and LSE = -inf (with a sink: LSE = sink).
    """
    scores = Scores(q, k, options)
    Br, Bc = block_sizes(scores, block_q, block_k)
    Q, K, V = (heads_first(x, scores.dtype) for x in (q, k, v))
    Q = Q * scores.scale
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=scores.dtype, device=q.device)

    def tiles_of(rows: slice):
        for cols in blocks(*scores.keys_of(rows), Bc):
            S, _ = scores.logits(Q[:, :, rows], K[:, :, cols], rows, cols)
            if S is not None:
                yield S, V[:, :, cols], scores.dropout_factor(rows, cols)

    for rows in blocks(0, scores.seqlen_q, Br):
        state = initial_state(scores, rows.stop - rows.start, v.shape[3])
        m, l, O = deque(online_softmax_steps(tiles_of(rows), state), maxlen=1).pop()
        out[:, rows] = (O / l.masked_fill(l == 0, 1.0)).transpose(1, 2)
        lse[:, :, rows] = (m + torch.log(l)).squeeze(-1)
    return out, lse


# --- Backward ------------------------------------------------------------------------------------


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options = NO_OPTIONS,
    *,
    wanted: Collection[str] = (),
    block_q: int | None = None,
    block_k: int | None = None,
) -> Gradients:
    """Gradients of attention_forward, given what it took and returned.

    dlse:   gradient of LSE, or None.
    wanted: which of GRAD_OPTIONS get a gradient too.
    """
    scores = Scores(q, k, options, [name for name in wanted if name != "sink"])
    Br, Bc = block_sizes(scores, block_q, block_k)
    if wanted and out.dtype != scores.dtype:
        # A gradient that sums dS over whole rows meets terms that nearly cancel, but the rounding
        # of a 16-bit out, one number per row through delta, does not: take O before rounding.
        q32, k32, v32 = (x.to(scores.dtype) for x in (q, k, v))
        out, _ = attention_forward(q32, k32, v32, options, block_q=block_q, block_k=block_k)
    Q, K, V = (heads_first(x, scores.dtype) for x in (q, k, v))
    Q = Q * scores.scale
    dO, delta, L = row_terms(scores, dout, dlse, out, lse)
    correction = coarse_correction(scores, Q, K, L, Br, Bc)

    dQ = torch.zeros_like(Q)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    for cols in blocks(0, scores.seqlen_k, Bc):
        K_j, V_j = K[:, :, cols], V[:, :, cols]
        dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
        for rows in blocks(*scores.queries_of(cols), Br):
            Q_i, dO_i = Q[:, :, rows], dO[:, :, rows]
            S, softcap_slope = scores.logits(Q_i, K_j, rows, cols)
            if S is None:
                continue
            P = torch.exp(S - L[:, :, rows])
            if correction is not None:
                P = P / correction[:, :, rows]
            dP = times_keys(dO_i, V_j.mT)
            Z = scores.dropout_factor(rows, cols)
            if Z is not None:
                dP = dP * Z
            dV_j += sum_over_queries(P if Z is None else P * Z, dO_i, k.shape[2])
            dS = P * (dP - delta[:, :, rows])
            scores.backward(dS, rows, cols)
            if softcap_slope is not None:
                dS = dS * softcap_slope
            dQ[:, :, rows] += times_keys(dS, K_j)
            dK_j += sum_over_queries(dS, Q_i, k.shape[2])  # Q_i carries the scale
        dk[:, cols] = dK_j.transpose(1, 2)
        dv[:, cols] = dV_j.transpose(1, 2)
    dq = (dQ * scores.scale).transpose(1, 2).to(q.dtype).contiguous()

    grads = scores.grads
    if scores.sink is not None and "sink" in wanted:
        # The sink is a key without a value: dP = 0, so dS = P * (0 - delta), summed over all rows.
        P = sink_probability(scores.sink, L)
        P = P if correction is None else P / correction
        grads["sink"] = -(P * delta).sum(dim=(0, 2, 3))
    rounded = {name: grad.to(getattr(options, name).dtype) for name, grad in grads.items()}
    return Gradients(dq, dk, dv, *(rounded.get(name) for name in GRAD_OPTIONS))


def row_terms(
    scores: Scores, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dO (B, Hq, Sq, Dv), delta and L = LSE (B, Hq, Sq, 1), in the accumulation type.

    An empty row takes no part, whatever its dout and dlse hold: all three are 0 there, and
    P = exp(-inf - 0) = 0.
    """
    empty = (lse == -math.inf).unsqueeze(-1)
    L = lse.to(scores.dtype).unsqueeze(-1).masked_fill(empty, 0.0)
    dO = heads_first(dout, scores.dtype).masked_fill(empty, 0.0)
    delta = (dO * heads_first(out, scores.dtype)).sum(dim=-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(scores.dtype).unsqueeze(-1).masked_fill(empty, 0.0)
    return dO, delta, L


def sink_probability(sink: Tensor, L: Tensor) -> Tensor:
    """exp(sink - LSE), (B, Hq, Sq, 1): the share of the row that went to the sink."""
    return torch.exp(sink - L)


def coarse_correction(
    scores: Scores, Q: Tensor, K: Tensor, L: Tensor, Br: int, Bc: int
) -> Tensor | None:
    """rowsum(exp(S - LSE)) for rows whose LSE is too large to hold log(l), 1 for all others.

    LSE = m + log(l) rounds log(l) away once m is huge: with a bias of fp32's finfo.min for a whole
    row, LSE = m and exp(S - LSE) is 1 for each of n keys, not 1/n. What the rounding lost is the
    row's sum, so dividing by the sum restores P. None when there is no such row (the usual case).
    """
    coarse = L.abs() > COARSE_LSE
    if not coarse.any():
        return None
    total = torch.zeros_like(L)
    if scores.sink is not None:
        total += sink_probability(scores.sink, L)
    for rows in blocks(0, scores.seqlen_q, Br):
        if coarse[:, :, rows].any():
            for cols in blocks(*scores.keys_of(rows), Bc):
                S, _ = scores.logits(Q[:, :, rows], K[:, :, cols], rows, cols)
                if S is not None:
                    total[:, :, rows] += torch.exp(S - L[:, :, rows]).sum(dim=-1, keepdim=True)
    return torch.where(coarse, total, 1.0)


# --- Merging -------------------------------------------------------------------------------------


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the results over each.

    The online softmax once more, with m = LSE, l = 1 and O already divided. LSE = -inf is a set
    without keys and changes nothing, bit for bit. Layouts: dense or packed, as the forwards return.
    """
    m = torch.maximum(lse_a, lse_b)
    shift = m.masked_fill(m == -math.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    l = weight_a + weight_b
    lse = m + torch.log(l)

    def per_row(x: Tensor) -> Tensor:
        """(..., Hq, Sq) -> (..., Sq, Hq, 1), to go with out."""
        return x.transpose(-1, -2).unsqueeze(-1)

    a, b = out_a.to(lse.dtype), out_b.to(lse.dtype)
    out = (per_row(weight_a) * a + per_row(weight_b) * b) / per_row(l)
    out = torch.where(per_row(lse_b) == -math.inf, a, out)
    out = torch.where(per_row(lse_a) == -math.inf, b, out)
    return out.to(out_a.dtype), lse
