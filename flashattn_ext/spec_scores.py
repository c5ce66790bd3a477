"""What the options mean for one tile of scores: the definition of every option but dropout.

`spec.py` walks over the tiles; this file says which pairs (query i, key j) of a tile may attend,
what their logits are, and how a gradient of the logits flows back into the options' own tensors.
Nothing here depends on how the tiles were cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .dropout import keep_scale, keep_tile

# Side of the tiles that `block_mask` switches on and off.
BLOCK_MASK_TILE = 128


@dataclass(frozen=True)
class Options:
    """What a call asks for beyond q, k and v. i is a query's position, j a key's.

    Positions compare as r = j - (i + off), with off = Sk - Sq (the last query is aligned with the
    last key, so that a query decoded alone and the same query in a long prefill agree), or off = 0
    with `top_left`.
    """

    # Factor on Q K^T; None means 1 / sqrt(D).
    softmax_scale: float | None = None
    # c > 0 squashes the scaled score to c * tanh(score / c) (Gemma 2, 2024); 0 = off.
    softcap: float = 0.0
    # Query i sees key j only if r <= 0.
    causal: bool = False
    top_left: bool = False
    # Query i sees key j only if -window_left <= r <= window_right; -1 = unlimited.
    window_left: int = -1
    window_right: int = -1
    # Added to the score; broadcastable to (B, Hq, Sq, Sk). Float, any dtype. Packed: per key.
    bias: Tensor | None = None
    # True = may attend; broadcastable to (B, Hq, Sq, Sk). Bool.
    mask: Tensor | None = None
    # (Hq) or (B, Hq): adds -slope * |r| (Press, Smith and Lewis 2021).
    alibi_slopes: Tensor | None = None
    # (Hq, 2R + 1): adds rel_bias[h, R + clamp(r, -R, R)] (relative positions as in T5, unbinned).
    rel_bias: Tensor | None = None
    # (Hq): the logit of one more key whose value is zero: it joins l and LSE, never O.
    sink: Tensor | None = None
    # (B or 1, Hq or 1, ceil(Sq/128), ceil(Sk/128)) bool: True = this 128 x 128 tile may attend.
    block_mask: Tensor | None = None
    # Probability of dropping an entry of P, after the softmax: l and LSE never see it.
    dropout_p: float = 0.0
    # uint64 (2): seed and offset of the dropout mask (see dropout.py).
    rng_state: Tensor | None = None
    # Index of the first batch entry in that mask; packed sequences are computed one by one.
    first_batch: int = 0


NO_OPTIONS = Options()
# The options that can get a gradient, in the order of the backward ops' `wanted` and outputs.
GRAD_OPTIONS = ("bias", "alibi_slopes", "rel_bias", "sink")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, S, H, D) of any type and strides -> contiguous (B, H, S, D) of the given type."""
    return x.transpose(1, 2).to(dtype).contiguous()


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """[start, stop) cut into slices of `size`; the last may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def per_key_head(x: Tensor, heads_k: int) -> Tensor:
    """(B, Hq, R, C) -> (B, Hk, G R, C): the heads that share a key head stacked as rows."""
    batch, heads_q, rows, cols = x.shape
    return x.reshape(batch, heads_k, heads_q // heads_k * rows, cols)


def times_keys(x: Tensor, y: Tensor) -> Tensor:
    """x y for query-head x (B, Hq, R, C) and key-head y (B, Hk, C, N): (B, Hq, R, N)."""
    return (per_key_head(x, y.shape[1]) @ y).view(*x.shape[:3], y.shape[3])


def sum_over_queries(x: Tensor, y: Tensor, heads_k: int) -> Tensor:
    """x^T y, summed over a group, for x (B, Hq, R, N) and y (B, Hq, R, C): (B, Hk, N, C)."""
    return per_key_head(x, heads_k).mT @ per_key_head(y, heads_k)


def as_4d(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]


def tile_of(x: Tensor, rows: slice, cols: slice) -> Tensor:
    """The tile of a tensor that broadcasts to (B, Hq, Sq, Sk); dimensions of size 1 stay."""
    return x[:, :, rows if x.shape[2] > 1 else slice(None), cols if x.shape[3] > 1 else slice(None)]


class Scores:
    """From Q_i and K_j to the logits of a tile, and from dS_ij back to the options' gradients.

    Forward and backward both ask this class: an option is defined once. `wanted` names the options
    whose gradients `backward` accumulates, in the accumulation type, in `self.grads`.
    """

    def __init__(self, q: Tensor, k: Tensor, options: Options, wanted: Iterable[str] = ()):
        self.batch, self.seqlen_q, self.heads_q, head_dim = q.shape
        self.seqlen_k = k.shape[1]
        self.options = options
        self.dtype = accumulation_dtype(q.dtype)
        self.device = q.device
        scale = options.softmax_scale
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.off = 0 if options.top_left else self.seqlen_k - self.seqlen_q
        # No |r| reaches the sum of both lengths: an unlimited side is a window that wide.
        unlimited = self.seqlen_q + self.seqlen_k
        self.left = options.window_left if options.window_left >= 0 else unlimited
        self.right = options.window_right if options.window_right >= 0 else unlimited
        if options.causal:
            self.right = 0
        # The per-head options in the accumulation type, shaped to meet a (B, Hq, Br, Bc) tile.
        self.slopes: Tensor | None = None
        self.sink: Tensor | None = None
        self.rel_bias: Tensor | None = None
        if options.alibi_slopes is not None:
            self.slopes = options.alibi_slopes.to(self.dtype).view(-1, self.heads_q, 1, 1)
        if options.sink is not None:
            self.sink = options.sink.to(self.dtype).view(1, self.heads_q, 1, 1)
        if options.rel_bias is not None:
            self.rel_bias = options.rel_bias.to(self.dtype)
        if options.dropout_p > 0 and options.rng_state is None:
            raise ValueError("dropout_p > 0 needs rng_state: a uint64 tensor of (seed, offset)")
        self.grads = {
            name: torch.zeros(getattr(options, name).shape, dtype=self.dtype, device=q.device)
            for name in wanted
        }

    # The first and one-past-last key that causal and window let a block of queries see, and the
    # reverse. Blocks outside are never visited.

    def keys_of(self, rows: slice) -> tuple[int, int]:
        first = rows.start + self.off - self.left
        last = rows.stop - 1 + self.off + self.right
        return max(0, first), min(self.seqlen_k, last + 1)

    def queries_of(self, cols: slice) -> tuple[int, int]:
        first = cols.start - self.off - self.right
        last = cols.stop - 1 - self.off + self.left
        return max(0, first), min(self.seqlen_q, last + 1)

    def relative_position(self, rows: slice, cols: slice) -> Tensor:
        """r = j - (i + off) of a tile, (Br, Bc) int64."""
        i = torch.arange(rows.start, rows.stop, device=self.device)[:, None]
        j = torch.arange(cols.start, cols.stop, device=self.device)[None, :]
        return j - (i + self.off)

    def visible(self, rows: slice, cols: slice) -> Tensor | None:
        """Which pairs of a tile may attend, broadcastable to (B, Hq, Br, Bc); None = all."""
        conditions = []
        smallest_r = cols.start - (rows.stop - 1 + self.off)
        largest_r = cols.stop - 1 - (rows.start + self.off)
        if smallest_r < -self.left or largest_r > self.right:
            r = self.relative_position(rows, cols)
            conditions.append((r >= -self.left) & (r <= self.right))
        if self.options.mask is not None:
            conditions.append(tile_of(as_4d(self.options.mask), rows, cols))
        if self.options.block_mask is not None:
            conditions.append(self.block_mask_tile(as_4d(self.options.block_mask), rows, cols))
        visible = None
        for condition in conditions:
            visible = condition if visible is None else visible & condition
        return visible

    def block_mask_tile(self, block_mask: Tensor, rows: slice, cols: slice) -> Tensor:
        """The block mask at every pair of a tile, broadcastable to (B, Hq, Br, Bc)."""
        i = torch.arange(rows.start, rows.stop, device=self.device) // BLOCK_MASK_TILE
        j = torch.arange(cols.start, cols.stop, device=self.device) // BLOCK_MASK_TILE
        last_i, last_j = block_mask.shape[2] - 1, block_mask.shape[3] - 1  # 0 where it broadcasts
        return block_mask[:, :, i.clamp(max=last_i)][:, :, :, j.clamp(max=last_j)]

    def logits(
        self, Q_i: Tensor, K_j: Tensor, rows: slice, cols: slice
    ) -> tuple[Tensor | None, Tensor | None]:
        """The tile S_ij (B, Hq, Br, Bc) with everything applied, -inf where a pair may not attend.

        Q_i is already scaled. Also returns the softcap's derivative (None without softcap).
        Returns (None, None) when no pair of the tile may attend.
        """
        visible = self.visible(rows, cols)
        if visible is not None and not visible.any():
            return None, None
        S = times_keys(Q_i, K_j.mT)
        slope = None
        if self.options.softcap > 0:
            T = torch.tanh(S / self.options.softcap)
            S = self.options.softcap * T
            slope = 1 - T * T
        if self.options.bias is not None:
            S = S + tile_of(as_4d(self.options.bias), rows, cols).to(self.dtype)
        if self.slopes is not None:
            S = S - self.slopes * self.relative_position(rows, cols).abs()
        if self.rel_bias is not None:
            S = S + self.rel_bias[:, self.rel_bias_index(self.rel_bias, rows, cols)]
        if visible is not None:
            S = S.masked_fill(~visible, -math.inf)
        return S, slope

    def rel_bias_index(self, table: Tensor, rows: slice, cols: slice) -> Tensor:
        """R + clamp(r, -R, R), (Br, Bc): the column of the table that each pair reads."""
        reach = table.shape[1] // 2
        return reach + self.relative_position(rows, cols).clamp(-reach, reach)

    def dropout_factor(self, rows: slice, cols: slice) -> Tensor | None:
        """Z_ij: 0 where P is dropped, 1 / (keep rate) where it is kept; None without dropout."""
        p, rng_state = self.options.dropout_p, self.options.rng_state
        if p <= 0 or rng_state is None:
            return None
        first = self.options.first_batch * self.heads_q
        batch_heads = torch.arange(first, first + self.batch * self.heads_q, device=self.device)
        batch_heads = batch_heads.view(self.batch, self.heads_q)
        i = torch.arange(rows.start, rows.stop, device=self.device)
        return keep_tile(rng_state, p, batch_heads, i, cols).to(self.dtype) * keep_scale(p)

    def backward(self, dS: Tensor, rows: slice, cols: slice) -> None:
        """Adds a tile's share to the wanted gradients.

        What was added to S has dS for its gradient, summed over what it was broadcast over.
        """
        if "bias" in self.grads:
            tile = tile_of(as_4d(self.grads["bias"]), rows, cols)
            tile += dS.sum_to_size(tile.shape)
        if "alibi_slopes" in self.grads:
            distance = self.relative_position(rows, cols).abs().to(self.dtype)
            share = dS.flatten(2) @ distance.flatten()
            self.grads["alibi_slopes"] -= share.sum_to_size(self.grads["alibi_slopes"].shape)
        if "rel_bias" in self.grads:
            table = self.grads["rel_bias"]
            index = self.rel_bias_index(table, rows, cols).flatten().expand(self.heads_q, -1)
            table.scatter_add_(1, index, dS.sum(0).flatten(1))
