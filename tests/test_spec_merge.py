"""Merging results over disjoint keys."""

import pytest
import torch
from spec_runner import make_inputs, run, run_varlen

from flashattn_ext import spec

INF = torch.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_two_halves_are_the_whole(dtype):
    q, k, v, *_ = make_inputs(2, 30, 50, 4, 2, 16, 24, dtype)
    whole = run(q, k, v)
    parts = [run(q, k[:, keys], v[:, keys]) for keys in (slice(0, 17), slice(17, 50))]
    out, lse = spec.merge(parts[0]["out"], parts[0]["lse"], parts[1]["out"], parts[1]["lse"])
    assert out.dtype == dtype
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, whole["out"], **tolerance)
    torch.testing.assert_close(lse, whole["lse"])


def test_in_any_order():
    """Merging is commutative bit for bit and associative up to rounding."""
    q, k, v, *_ = make_inputs(1, 8, 60, 2, 1, 8, 8, torch.float64)
    a, b, c = (
        tuple(run(q, k[:, keys], v[:, keys]).values())
        for keys in (slice(0, 5), slice(5, 40), slice(40, 60))
    )
    assert all(torch.equal(x, y) for x, y in zip(spec.merge(*a, *b), spec.merge(*b, *a)))
    left, right = spec.merge(*spec.merge(*a, *b), *c), spec.merge(*a, *spec.merge(*b, *c))
    for x, y in zip(left, right):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_empty_state_changes_nothing(dtype):
    """merge(state, empty) == state bit for bit, also where state's own rows are empty."""
    q, k, v, *_ = make_inputs(1, 12, 5, 2, 1, 8, 8, dtype)
    out, lse = run(q, k, v, causal=True).values()
    out[0, -1, 0, 0] = -0.0
    empty_out, empty_lse = torch.zeros_like(out), torch.full_like(lse, -INF)
    for merged_out, merged_lse in (
        spec.merge(out, lse, empty_out, empty_lse),
        spec.merge(empty_out, empty_lse, out, lse),
    ):
        assert torch.equal(merged_out.view(torch.uint8), out.view(torch.uint8))
        assert torch.equal(merged_lse, lse)


def test_far_apart():
    """A state that outweighs the other by more than the type's range passes through."""
    out_a, out_b = torch.full((1, 1, 1, 4), 2.0), torch.full((1, 1, 1, 4), 5.0)
    low, high = torch.full((1, 1, 1), -1e4), torch.full((1, 1, 1), 1e4)
    out, lse = spec.merge(out_a, low, out_b, high)
    assert torch.equal(out, out_b)
    assert torch.equal(lse, high)


def test_packed_layout():
    q, k, v, *_ = make_inputs(1, 9, 20, 4, 2, 8, 8, torch.float64)
    cu_q = torch.tensor([0, 4, 9]).int()
    cu_half = torch.tensor([0, 5, 10]).int()
    first, second = (
        run_varlen(q[0], x[0], y[0], cu_q, cu_half)
        for x, y in ((k[:, :10], v[:, :10]), (k[:, 10:], v[:, 10:]))
    )
    out, lse = spec.merge(first["out"], first["lse"], second["out"], second["lse"])
    order = [*range(5), *range(10, 15), *range(5, 10), *range(15, 20)]
    whole = run_varlen(q[0], k[0, order], v[0, order], cu_q, torch.tensor([0, 10, 20]).int())
    torch.testing.assert_close(out, whole["out"])
    torch.testing.assert_close(lse, whole["lse"])
