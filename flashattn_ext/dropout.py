"""The dropout mask: a pure function of (seed, offset, batch, head, query, key).

A mask that depends on positions alone comes out the same for every tiling, for the transposed
tiles of the backward and on every device, so it is never stored: whoever needs a piece computes it.

The generator is Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
as easy as 1, 2, 3", 2011). One call serves query row i and the 16 keys of column block J:

    counter = (i, J, b * Hq + h, offset_lo)        key = (seed_lo, seed_hi xor offset_hi)

and byte c of its 128 output bits (little-endian) decides key 16 J + c: kept iff byte <= T, where
T = round(256 (1 - p)) - 1. Kept probabilities are scaled by 256 / (T + 1), the inverse of the true
keep rate, so the expectation is exact although p itself is rounded to a multiple of 1/256.
In varlen, i and j count inside the sequence and b is the sequence's index.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEYS_PER_CALL = 16
ROUNDS = 7

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW32 = 0xFFFFFFFF


def philox4x32(counter, key, rounds: int = ROUNDS) -> list[Tensor]:
    """Four random 32-bit words for every counter.

    counter: four int64 tensors that broadcast together, each value in [0, 2**32).
    key:     two Python ints in [0, 2**32).
    Returns four int64 tensors with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # An int64 product wraps modulo 2**64, which leaves both 32-bit halves right.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW32, (product1 >> 32) & _LOW32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW32, high0 ^ c3 ^ k1, product0 & _LOW32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def kept_of_256(p: float) -> int:
    """How many of the 256 byte values mean "keep": T + 1."""
    return round(256 * (1.0 - p))


def keep_scale(p: float) -> float:
    """What a kept probability is multiplied with; 0 when nothing is kept."""
    kept = kept_of_256(p)
    return 256 / kept if kept else 0.0


def keep_tile(
    rng_state: Tensor, p: float, batch_heads: Tensor, rows: Tensor, cols: slice
) -> Tensor:
    """The keep mask of one tile.

    rng_state:   uint64 (2): seed, offset.
    batch_heads: int64 (...): b * Hq + h of every head in the tile.
    rows:        int64 (Br): the query positions.
    cols:        the key positions, as a slice with start and stop.
    Returns bool (..., Br, Bc).
    """
    seed, offset = (value & (2**64 - 1) for value in rng_state.view(torch.int64).tolist())
    first_block = cols.start // KEYS_PER_CALL
    end_block = -(-cols.stop // KEYS_PER_CALL)
    column_blocks = torch.arange(first_block, end_block, device=rows.device)
    counter = (
        rows[:, None],
        column_blocks[None, :],
        batch_heads[..., None, None],
        torch.tensor(offset & _LOW32, device=rows.device),
    )
    words = philox4x32(counter, (seed & _LOW32, (seed >> 32) ^ (offset >> 32)))
    octets = torch.stack(words, dim=-1).to(torch.int32).view(torch.uint8)
    keep = octets.flatten(-2).to(torch.int16) < kept_of_256(p)  # 256 does not fit a byte
    skipped = first_block * KEYS_PER_CALL
    return keep[..., cols.start - skipped : cols.stop - skipped]


def dropout_mask(
    rng_state: Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, p: float
) -> Tensor:
    """The dropout mask of a call, (batch, heads, seqlen_q, seqlen_k) bool, True = kept.

    rng_state: uint64 (2): seed, offset, as the ops take and return it. Read on the host.
    heads:     the number of query heads.
    p:         the call's dropout_p.
    Builds the whole matrix: meant for tests and for looking at, not for training.
    """
    device = rng_state.device
    batch_heads = torch.arange(batch * heads, device=device).view(batch, heads)
    rows = torch.arange(seqlen_q, device=device)
    return keep_tile(rng_state, p, batch_heads, rows, slice(0, seqlen_k))


def draw_rng_state() -> Tensor:
    """A fresh uint64 (2) state on the CPU: a seed from torch's default generator, offset 0."""
    seed = torch.empty((), dtype=torch.int64).random_()
    return torch.stack([seed, torch.zeros_like(seed)]).view(torch.uint64)
