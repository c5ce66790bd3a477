"""Block masks: which tiles of 128 queries by 128 keys may attend at all.

Every function is a few operations on the inputs' device, none of which waits for it. A block mask
says where nothing can be; what is hidden inside a tile is for `mask`, `causal` or `window_size`.
A tile that is switched on although nothing in it may attend costs time and changes no result.

    flash_attn_func(q, k, v, mask=mask, block_mask=block_mask_of(mask))

Shapes: Tq = ceil(seqlen_q / 128) and Tk = ceil(seqlen_k / 128). As everywhere, the last query
stands at the last key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .spec_scores import BLOCK_MASK_TILE


def block_mask_of(mask: Tensor) -> Tensor:
    """The tiles of `mask` that hold a True.

    mask: bool (..., seqlen_q, seqlen_k), or with a dimension of 1 that broadcasts. Other dtypes
        raise.
    Returns bool (..., Tq, Tk), of a dimension of 1 again 1.
    """
    if mask.dtype != torch.bool or mask.dim() < 2:
        raise ValueError(
            "flashattn_ext: block_mask_of takes a bool mask (..., seqlen_q, seqlen_k) and got "
            f"{mask.dtype} {tuple(mask.shape)}"
        )
    return _tiles(_tiles(mask, -1, False).any(-1), -2, False).any(-1)


def segment_block_mask(segments_q: Tensor, segments_k: Tensor | None = None) -> Tensor:
    """Tiles in which a query and a key may belong to the same segment.

    segments_q: integers (batch, seqlen_q), the segment of every query, such as the number of its
        document; negative: padding, which belongs to none.
    segments_k: the same of the keys, (batch, seqlen_k); default: segments_q.
    Returns bool (batch, 1, Tq, Tk): the tiles whose ranges of numbers overlap. With the same
    numbers on both sides, none below the one before it, that is exact; otherwise it may hold more.

    Together with the mask of pairs, `(segments_q[:, :, None] == segments_k[:, None, :])[:, None]`.
    """
    segments_k = segments_q if segments_k is None else segments_k
    for name, segments in (("segments_q", segments_q), ("segments_k", segments_k)):
        if segments.dim() != 2 or segments.is_floating_point() or segments.dtype == torch.bool:
            raise ValueError(
                f"flashattn_ext: {name} must be integers (batch, seqlen) and is "
                f"{segments.dtype} {tuple(segments.shape)}"
            )
    low_q, high_q = _range_of_tiles(segments_q)
    low_k, high_k = _range_of_tiles(segments_k)
    overlap = (low_q[:, :, None] <= high_k[:, None]) & (low_k[:, None] <= high_q[:, :, None])
    return overlap[:, None]


def prefix_block_mask(prefix_lengths: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Tiles of a prefix mask: keys of the prefix for every query, and the others causally.

    prefix_lengths: integers (batch), how many keys of each sequence every query sees.
    Returns bool (batch, 1, Tq, Tk), exact.

    Together with the mask of pairs, in which query i sees key j where `j < prefix_length` or
    `j <= i + seqlen_k - seqlen_q`.
    """
    if prefix_lengths.dim() != 1 or prefix_lengths.is_floating_point():
        raise ValueError(
            "flashattn_ext: prefix_lengths must be integers (batch) and is "
            f"{prefix_lengths.dtype} {tuple(prefix_lengths.shape)}"
        )
    device = prefix_lengths.device
    last_row = (_first_of_tiles(seqlen_q, device) + BLOCK_MASK_TILE).clamp(max=seqlen_q) - 1
    first_key = _first_of_tiles(seqlen_k, device)
    causal = first_key[None, :] <= last_row[:, None] + seqlen_k - seqlen_q
    prefix = first_key[None, :] < prefix_lengths[:, None]
    return (causal[None] | prefix[:, None, :])[:, None]


def sliding_block_mask(
    seqlen_q: int,
    seqlen_k: int,
    left: int,
    right: int = 0,
    *,
    first: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """A window that moves in whole tiles.

    left, right: how many tiles of keys before its own, and behind it, a tile of queries attends;
        its own always. The last tile of queries stands at the last tile of keys.
    first: so many of the first tiles of keys are for every query (attention sinks).
    Returns bool (1, 1, Tq, Tk) on `device`.
    """
    if left < 0 or right < 0 or first < 0:
        raise ValueError(
            "flashattn_ext: left, right and first count tiles and are "
            f"{left}, {right} and {first}; none may be negative"
        )
    tile_k = torch.arange(_num_tiles(seqlen_k), device=device)
    num_q = _num_tiles(seqlen_q)
    own = torch.arange(num_q, device=device)[:, None] + len(tile_k) - num_q
    window = (tile_k >= own - left) & (tile_k <= own + right)
    return (window | (tile_k < first))[None, None]


def _num_tiles(length: int) -> int:
    return -(-length // BLOCK_MASK_TILE)


def _first_of_tiles(length: int, device: torch.device) -> Tensor:
    return torch.arange(_num_tiles(length), device=device) * BLOCK_MASK_TILE


def _tiles(x: Tensor, dim: int, fill: bool | int) -> Tensor:
    """`dim` in tiles: (..., T, ..., 128) with the tile's elements last; a dimension of 1 stays."""
    x = x.movedim(dim, -1)
    length = x.shape[-1]
    if length != 1:
        x = pad(x, (0, _num_tiles(length) * BLOCK_MASK_TILE - length), value=fill)
        x = x.unflatten(-1, (-1, BLOCK_MASK_TILE))
    else:
        x = x.unsqueeze(-1)
    return x.movedim(-2, dim - 1)


def _range_of_tiles(segments: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest number of every tile, (batch, T); of padding alone, no range."""
    tiles = _tiles(segments.long(), -1, -1)
    lowest = tiles.masked_fill(tiles < 0, torch.iinfo(torch.int64).max).amin(-1)
    return lowest, tiles.amax(-1)
