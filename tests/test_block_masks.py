"""Block masks against the pairs that they stand for, and in calls."""

import pytest
import torch

from flashattn_ext import (
    block_mask_of,
    flash_attn_func,
    flash_attn_varlen_func,
    prefix_block_mask,
    segment_block_mask,
    sliding_block_mask,
)

TILE = 128
LENGTHS = [(1, 1), (127, 129), (128, 256), (300, 500), (500, 300)]


def tiles_with_a_pair(pairs):
    """The tiles of `pairs` (batch, seqlen_q, seqlen_k) that hold a True, one by one."""
    rows = [
        torch.stack([tile.flatten(1).any(1) for tile in row.split(TILE, 2)], -1)
        for row in pairs.split(TILE, 1)
    ]
    return torch.stack(rows, 1)


def documents(batch, seqlen, seed):
    """Numbers of documents in a row, none below the one before it; some padding at the end."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(batch, seqlen, generator=generator) < 0.01
    numbers = starts.long().cumsum(1)
    numbers[:, seqlen - seqlen // 7 :] = -1
    return numbers


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_tiles_of_a_mask(seqlen_q, seqlen_k):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(3, seqlen_q, seqlen_k, generator=generator) < 3 / (TILE * TILE)
    mask[0] = False
    mask[1, -1, -1] = True
    actual = block_mask_of(mask)
    assert torch.equal(actual, tiles_with_a_pair(mask))
    assert torch.equal(block_mask_of(mask[:, None])[:, 0], actual)


def test_a_mask_that_broadcasts_stays_small():
    mask = torch.zeros(2, 1, 1, 300, dtype=torch.bool)
    mask[1, 0, 0, 299] = True
    assert block_mask_of(mask).tolist() == [[[[False] * 3]], [[[False, False, True]]]]
    assert block_mask_of(mask.mT).shape == (2, 1, 3, 1)
    assert block_mask_of(torch.ones(1, 1, dtype=torch.bool)).tolist() == [[True]]


@pytest.mark.parametrize("seqlen", [1, 128, 500, 1000])
def test_documents_in_a_row(seqlen):
    segments = documents(3, seqlen, seed=seqlen)
    pairs = (segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, :, None]
    assert torch.equal(segment_block_mask(segments)[:, 0], tiles_with_a_pair(pairs))
    assert torch.equal(segment_block_mask(segments.int(), segments)[:, 0], tiles_with_a_pair(pairs))


def test_segments_in_any_order_lose_no_pair():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-1, 40, (4, length), generator=generator) for length in (300, 700))
    pairs = (q[:, :, None] == k[:, None]) & (q >= 0)[:, :, None]
    allowed = segment_block_mask(q, k)[:, 0]
    assert not (tiles_with_a_pair(pairs) & ~allowed).any()
    nothing = torch.full((2, 200), -1)
    assert not segment_block_mask(nothing).any()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_prefixes(seqlen_q, seqlen_k):
    lengths = torch.tensor([0, 1, TILE, TILE + 1, seqlen_k])
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    pairs = (j < lengths[:, None, None]) | (j <= i + seqlen_k - seqlen_q)
    actual = prefix_block_mask(lengths, seqlen_q, seqlen_k)
    assert torch.equal(actual[:, 0], tiles_with_a_pair(pairs))


def test_sliding_tiles():
    actual = sliding_block_mask(4 * TILE, 6 * TILE - 5, 1, first=1)[0, 0]
    assert actual.int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]
    both = sliding_block_mask(300, 300, 0, 1)[0, 0]
    assert both.int().tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]


def test_the_tiles_of_a_mask_change_no_result():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 300, 2, 16, generator=generator) for _ in range(3))
    mask = torch.rand(2, 1, 300, 300, generator=generator) < 0.5
    mask[:, :, :128, 128:256] = False
    block_mask = block_mask_of(mask)
    assert not block_mask.all()
    expected = flash_attn_func(q, k, v, mask=mask)
    assert torch.equal(flash_attn_func(q, k, v, mask=mask, block_mask=block_mask), expected)


def test_documents_are_packed_sequences():
    lengths = [200, 57, 300]
    q, k, v = torch.randn(3, sum(lengths), 2, 16, generator=torch.Generator().manual_seed(0))
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    pairs = (segments[:, :, None] == segments[:, None])[:, None]
    masks = {"mask": pairs, "block_mask": segment_block_mask(segments)}
    out = flash_attn_func(*(x[None] for x in (q, k, v)), causal=True, **masks)
    starts = torch.tensor([0, 200, 257, 557], dtype=torch.int32)
    expected = flash_attn_varlen_func(q, k, v, starts, starts, 300, 300, causal=True)
    torch.testing.assert_close(out[0], expected)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda: block_mask_of(torch.ones(3, 4)), "takes a bool mask"),
        (lambda: block_mask_of(torch.ones(3, dtype=torch.bool)), r"got torch.bool \(3,\)"),
        (lambda: segment_block_mask(torch.ones(3, 4)), "segments_q must be integers"),
        (
            lambda: segment_block_mask(torch.ones(1, 4).int(), torch.ones(4).int()),
            "segments_k must",
        ),
        (lambda: prefix_block_mask(torch.ones(2), 3, 4), "prefix_lengths must be integers"),
        (lambda: sliding_block_mask(3, 4, -1), "none may be negative"),
    ],
)
def test_what_they_do_not_take(call, wanted):
    with pytest.raises(ValueError, match=wanted):
        call()
