"""Logits that grow and fall along the keys: out and LSE do not depend on what P is relative to.

Key blocks are visited from the last to the first, so logits that climb towards the first key grow
while a row is being summed. The rates, in nats per 128 keys, reach from what 16-bit P takes as it
is to what overflows fp32 in one block.
"""

import math

import compare
import pytest
import reference
import torch
from cases import HALF_TYPES

from benchmarks import bench_growth
from flashattn_ext import flash_attn_func, flash_attn_varlen_func

RATES = [1.0, 8.0, 20.0, 60.0, 100.0, 300.0]


def half_types(device):
    return HALF_TYPES if device == "cuda" else [torch.float32]


def check(q, k, v, plan=None, **options):
    """Against fp64; twice, bit for bit."""
    out, lse = flash_attn_func(q, k, v, **options, return_lse=True, plan=plan)
    exact = reference.run(q, k, v, **options)
    unfused = reference.run(q, k, v, **options, same_dtype=True)
    compare.assert_lse(lse, exact)
    error = (out.double() - exact["out"]).norm()
    # Few keys carry such rows: the roundings of single values show, in the unfused result as well.
    allowed = max(
        compare.RELATIVE[q.dtype] * exact["out"].norm(),
        1.5 * (unfused["out"] - exact["out"]).norm(),
    )
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
    again, lse_again = flash_attn_func(q, k, v, **options, return_lse=True, plan=plan)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def ramp(keys, head_dim, rate, device, dtype):
    """q, k, v whose logits climb by `rate` nats per 128 keys towards the first key."""
    q, k, v = (torch.randn(1, n, 2, head_dim, device=device) for n in (150, keys, keys))
    q, k = bench_growth.climbing(q, k, rate)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("rate", RATES)
def test_logits_that_climb_and_fall(device_plan, rate, head_dim):
    device, plan = device_plan
    for dtype in half_types(device):
        q, k, v = ramp(700, head_dim, rate, device, dtype)
        check(q, k, v, plan)
        check(q, k.flip(1), v, plan)
        check(q, k, v, plan, causal=True)


@pytest.mark.parametrize("keys", [1500, 5000])
@pytest.mark.parametrize("rate", [8.0, 100.0])
def test_the_same_at_the_lengths_of_other_tiles(device_plan, rate, keys):
    device, plan = device_plan
    for dtype in half_types(device):
        check(*ramp(keys if device == "cuda" else 700, 64, rate, device, dtype), plan)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("jump", [10.0, 50.0, 90.0, 400.0])
def test_single_rows_jump_at_a_single_key(device_plan, jump, head_dim):
    """One key in a block that most rows need no new reference for; others keep theirs."""
    device, plan = device_plan
    for dtype in half_types(device):
        q, k, v = (torch.randn(1, n, 1, head_dim, device=device) for n in (150, 600, 600))
        q[..., 0], k[..., 0] = 0.0, 0.0
        q[:, 3::7, :, 0] = 1.0
        k[:, 200, :, 0] = jump * math.sqrt(head_dim)
        k[:, 77, :, 0] = jump * math.sqrt(head_dim) / 2
        check(q.to(dtype), k.to(dtype), v.to(dtype), plan)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("size", [1e-25, 1e30])
def test_values_of_any_size(device_plan, size, head_dim):
    device, plan = device_plan
    q, k, v = (torch.randn(1, n, 2, head_dim, device=device) for n in (150, 700, 700))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    out = flash_attn_func(3 * q.to(dtype), k.to(dtype), (size * v).to(dtype), plan=plan)
    exact = reference.run(3 * q.to(dtype), k.to(dtype), (size * v).to(dtype))["out"]
    # In units of `size`: squares of such numbers leave the range of fp32.
    error = (out.double() - exact).div(size).norm()
    assert error <= compare.RELATIVE[dtype] * exact.div(size).norm()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_of_minus_infinity(device_plan, head_dim):
    """All logits of the keys that come first are -inf, as if they were masked."""
    device, plan = device_plan
    dtype = half_types(device)[0]
    q, k, v = (torch.randn(1, n, 2, head_dim, device=device).to(dtype) for n in (150, 700, 700))
    q = q.abs() + 0.1
    k[:, 400:, :, 1] = -math.inf
    out, lse = flash_attn_func(q, k, v, return_lse=True, plan=plan)
    alone, lse_alone = flash_attn_func(q, k[:, :400], v[:, :400], return_lse=True, plan=plan)
    torch.testing.assert_close(out, alone, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, lse_alone, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_that_are_no_numbers(device_plan, head_dim):
    """NaN comes out where it went in, and nowhere else."""
    device, plan = device_plan
    dtype = half_types(device)[0]
    q, k, v = (torch.randn(1, n, 2, head_dim, device=device).to(dtype) for n in (150, 700, 700))
    clean, lse_clean = flash_attn_func(q, k, v, return_lse=True, plan=plan)
    q[:, 37] = math.nan
    out, lse = flash_attn_func(q, k, v, return_lse=True, plan=plan)
    assert out[:, 37].isnan().all()
    assert lse[:, :, 37].isnan().all()
    others = torch.arange(150, device=device) != 37
    assert torch.equal(out[:, others], clean[:, others])
    assert torch.equal(lse[:, :, others], lse_clean[:, :, others])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_lies_behind_a_sequence_does_not_show(device_plan, head_dim):
    """Queries of nobody, in the last tile of a sequence, whose logits would outgrow any range."""
    device, plan = device_plan
    dtype = half_types(device)[0]
    q, k, v = (torch.randn(400, 2, head_dim, device=device).to(dtype) for _ in range(3))
    cu_seqlens = torch.tensor([0, 330], dtype=torch.int32, device=device)

    def attend():
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, 330, 330, return_lse=True, plan=plan
        )

    out, lse = attend()
    for stranger in (1e4, math.inf, math.nan):
        q[330:] = stranger
        again, lse_again = attend()
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
