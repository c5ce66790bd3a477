"""The dropout mask: known answers, independence of tiles, rate, and what it does to the results."""

import numpy as np
import pytest
import torch
from spec_runner import RNG_STATE, make_inputs, run

from flashattn_ext.dropout import (
    draw_rng_state,
    dropout_mask,
    keep_scale,
    keep_tile,
    kept_of_256,
    philox4x32,
)

# Known answers of the generator's authors: counter, key, output after 7 and after 10 rounds.
KNOWN = [
    (
        [0x00000000] * 4,
        [0x00000000] * 2,
        [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    ),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "after_7", "after_10"), KNOWN)
def test_philox_known_answers(counter, key, after_7, after_10):
    words = [torch.tensor(word) for word in counter]
    assert [int(word) for word in philox4x32(words, key)] == after_7
    assert [int(word) for word in philox4x32(words, key, rounds=10)] == after_10


def philox_in_numpy(counter, key):
    """7 rounds on Python's unbounded integers, written apart from the library."""
    c, k = [int(x) for x in counter], list(key)
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.array(c, dtype="<u4").tobytes()


def test_mask_is_the_documented_function():
    """Every entry from the layout in words: counter (i, J, b * Hq + h, offset_lo), byte c."""
    seed, offset = RNG_STATE.view(torch.int64).tolist()
    seed, offset = seed % 2**64, offset % 2**64
    heads, p = 3, 0.3
    mask = dropout_mask(RNG_STATE, 2, heads, 4, 37, p)
    key = (seed % 2**32, (seed >> 32) ^ (offset >> 32))
    for b, h, i, j in np.ndindex(2, heads, 4, 37):
        octets = philox_in_numpy((i, j // 16, b * heads + h, offset % 2**32), key)
        assert mask[b, h, i, j].item() == (octets[j % 16] <= round(256 * (1 - p)) - 1)


def test_mask_does_not_depend_on_the_tile():
    whole = dropout_mask(RNG_STATE, 2, 3, 50, 70, 0.4)
    for rows, cols in [
        ((0, 50), (0, 70)),
        ((7, 20), (3, 5)),
        ((49, 50), (15, 49)),
        ((1, 9), (64, 70)),
    ]:
        tile = keep_tile(
            RNG_STATE, 0.4, torch.arange(6).view(2, 3), torch.arange(*rows), slice(*cols)
        )
        assert torch.equal(tile, whole[:, :, slice(*rows), slice(*cols)])
    one_head = keep_tile(RNG_STATE, 0.4, torch.tensor([4]), torch.arange(50), slice(0, 70))
    assert torch.equal(one_head[0], whole[1, 1])


def test_a_longer_problem_contains_the_shorter_ones_mask():
    assert torch.equal(
        dropout_mask(RNG_STATE, 1, 2, 100, 100, 0.4)[:, :, :30, :45],
        dropout_mask(RNG_STATE, 1, 2, 30, 45, 0.4),
    )


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_keep_rate(p):
    """Within five standard deviations of the rounded rate, which is within 1/512 of 1 - p."""
    rate = kept_of_256(p) / 256
    assert abs(rate - (1 - p)) <= 1 / 512
    mask = dropout_mask(RNG_STATE, 2, 4, 128, 256, p).double()
    assert abs(mask.mean().item() - rate) <= 5 * (rate * (1 - rate) / mask.numel()) ** 0.5
    assert keep_scale(p) == pytest.approx(1 / rate if rate else 0.0)


def test_entries_are_independent():
    """Neighbours along every axis, and other seeds and offsets, agree as often as chance has it."""
    seed, offset = 2**63 + 12345, 2**40 + 4
    mask, other_seed, other_offset = (
        dropout_mask(torch.tensor(state, dtype=torch.uint64), 4, 8, 128, 128, 0.5)
        for state in ([seed, offset], [seed ^ 1, offset], [seed, offset ^ 4])
    )
    pairs = [(mask[:-1], mask[1:]), (mask[:, :-1], mask[:, 1:])]
    pairs += [(mask[:, :, :-1], mask[:, :, 1:]), (mask[..., :-1], mask[..., 1:])]
    pairs += [(mask[..., :-16], mask[..., 16:]), (mask, other_seed), (mask, other_offset)]
    for a, b in pairs:
        agreement = (a == b).double().mean().item()
        assert abs(agreement - 0.5) <= 5 * 0.5 / a.numel() ** 0.5


def test_high_bits_of_seed_and_offset_matter():
    base = dropout_mask(torch.tensor([5, 6], dtype=torch.uint64), 1, 1, 16, 64, 0.5)
    for seed, offset in [(5 + 2**40, 6), (5, 6 + 2**40)]:
        state = torch.tensor([seed, offset], dtype=torch.uint64)
        assert not torch.equal(dropout_mask(state, 1, 1, 16, 64, 0.5), base)


def test_drawn_states_follow_torchs_generator():
    torch.manual_seed(3)
    first, second = draw_rng_state(), draw_rng_state()
    torch.manual_seed(3)
    assert torch.equal(first, draw_rng_state())
    assert not torch.equal(first, second)
    assert first.dtype == torch.uint64
    assert first.shape == (2,)


def test_dropping_everything():
    actual = run(
        *make_inputs(1, 8, 9, 2, 1, 8, 8, torch.float32), dropout_p=1.0, rng_state=RNG_STATE
    )
    plain = run(*make_inputs(1, 8, 9, 2, 1, 8, 8, torch.float32))
    assert not actual["out"].any()
    assert not actual["dv"].any()
    assert actual["lse"].shape == plain["lse"].shape
    assert actual["lse"].isfinite().all()


def test_a_rate_that_rounds_to_zero_is_no_dropout():
    inputs = make_inputs(1, 8, 9, 2, 1, 8, 8, torch.float32)
    plain = run(*inputs)
    rare = run(*inputs, dropout_p=1e-3, rng_state=RNG_STATE)
    assert all(torch.equal(rare[name], plain[name]) for name in plain)


def test_lse_and_expectation_without_dropout():
    """LSE never sees dropout; the mean over many masks is the undropped output."""
    q, k, v, *_ = make_inputs(1, 4, 32, 1, 1, 8, 8, torch.float64)
    plain = run(q, k, v)
    total = torch.zeros_like(plain["out"])
    trials = 2000
    for trial in range(trials):
        state = torch.tensor([trial, 0], dtype=torch.uint64)
        dropped = run(q, k, v, dropout_p=0.3, rng_state=state)
        assert torch.equal(dropped["lse"], plain["lse"])
        total += dropped["out"]
    torch.testing.assert_close(total / trials, plain["out"], rtol=0, atol=0.08)
