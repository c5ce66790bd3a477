"""Inputs at the edge of what the ops promise, each on the CPU and on a GPU."""

import math

import compare
import pytest
import reference
import torch
from cases import Case, make_tensors
from torch.utils.checkpoint import checkpoint

from flashattn_ext import flash_attn_func, flash_attn_varlen_func, merge


def dtype_of(device):
    return torch.bfloat16 if device == "cuda" else torch.float32


def randn(*shape, device):
    return torch.randn(*shape, device=device).to(dtype_of(device))


@pytest.mark.parametrize("offset", [0.0, 60.0, 1000.0])
def test_errors_do_not_add_up_over_many_key_blocks(device, offset):
    """The maximum stands still for hundreds of blocks: nothing may be rescaled by almost 1."""
    keys = 65_536 if device == "cuda" else 4096
    q, k, v = (randn(1, n, 1, 64, device=device) for n in (64, keys, keys))
    q[..., 0], k[..., 0] = 1.0, offset
    out, lse = flash_attn_func(q, k, v, softmax_scale=1.0, return_lse=True)
    exact = reference.run(q, k, v, softmax_scale=1.0)
    compare.assert_lse(lse, exact)
    error = (out - exact["out"]).norm() / exact["out"].norm()
    fp32_logits = 1e-5 + 2e-7 * offset  # an fp32 logit of size `offset` is off by 2^-24 of that
    assert error <= (3.5e-3 if device == "cuda" else fp32_logits)


@pytest.mark.parametrize("softcap", [50.0, 1000.0, 1e6])
def test_large_softcaps_keep_the_logits(device, softcap):
    q, k, v = (randn(1, n, 1, 64, device=device) for n in (100, 130, 130))
    out, lse = flash_attn_func(q, k, v, softcap=softcap, return_lse=True)
    exact = reference.run(q, k, v, softcap=softcap)
    compare.assert_lse(lse, exact)
    assert (out - exact["out"]).norm() <= 3.5e-3 * exact["out"].norm()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_rows_that_see_nothing_go_nowhere(backward_plan, head_dim):
    """Whatever arrives at such a row, NaN included."""
    device, plan = backward_plan
    q, k, v = (randn(1, n, 2, head_dim, device=device).requires_grad_() for n in (150, 100, 100))
    out = flash_attn_func(q, k, v, causal=True, plan=plan)
    dout = torch.randn_like(out)
    clean = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    dout[:, :50] = math.nan
    poisoned = torch.autograd.grad(out, (q, k, v), dout)
    for got, wanted in zip(poisoned, clean, strict=True):
        assert torch.equal(got, wanted)
    assert not poisoned[0][:, :50].any()


def test_loose_bounds_of_the_lengths_change_nothing(device):
    q, k, v = (randn(96, 2, 64, device=device) for _ in "qkv")
    cu_seqlens = torch.tensor([0, 40, 96], dtype=torch.int32, device=device)
    tight = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 56, 56, causal=True)
    loose = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, 2**31 - 1, 2**31 - 1, causal=True
    )
    assert torch.equal(loose, tight)


def test_merge_of_states_that_start_anywhere(device):
    shape = (1, 4, 2, 64)
    states = []
    for _ in range(2):
        out = randn(513, device=device)[1:].view(shape)  # 2 or 4 bytes past an aligned address
        states += [out, torch.randn(1, 2, 4, device=device)]
    out, lse = merge(*states)
    wanted, wanted_lse = merge(*(state.clone() for state in states))
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)


def test_checkpointing_when_only_lse_is_used(device):
    x = make_tensors(Case(head_dim=64), device)
    inputs = [t.requires_grad_() for t in (x.q, x.k, x.v)]

    def lse_of(q, k, v):
        return flash_attn_func(q, k, v, return_lse=True)[1]

    wanted = torch.autograd.grad(lse_of(*inputs).sum(), inputs)
    out = checkpoint(lse_of, *inputs, use_reentrant=False)
    for got, expected in zip(torch.autograd.grad(out.sum(), inputs), wanted, strict=True):
        assert_same(got, expected)


def assert_same(got, expected):
    """Bitwise on CUDA; the CPU's matrix products may vary with the alignment of a copy."""
    if got.device.type == "cuda":
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected)


def test_forward_mode_derivatives_are_refused(device):
    q, k, v = (randn(1, 8, 1, 64, device=device) for _ in "qkv")
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (torch.ones_like(q),))
    lse = torch.zeros(1, 1, 8, device=device)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda out: merge(out, lse, k, lse)[0], (q,), (torch.ones_like(q),))
