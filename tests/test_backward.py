"""Forward and backward together: out, lse, dq, dk, dv against the fp64 reference.

Every body runs on the CPU path and, marked `gpu`, on the CUDA path; the CPU runs reduced sizes.
"""

import dataclasses

import harness
import pytest
import torch
from cases import (
    EVERY_HEAD_DIM,
    GQA_RATIOS,
    HALF_TYPES,
    HEAD_DIMS,
    SEQLENS,
    UNEQUAL_HEAD_DIMS,
    Case,
    Options,
    make_tensors,
    pairwise,
    type_name,
)

from flashattn_ext import flash_attn_func

MASKS = (False, True, "top_left")


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_accuracy(backward_plan, head_dim, causal, dtype):
    case = Case(
        head_dim=head_dim,
        seqlen_q=333,
        seqlen_k=402,
        heads_q=6,
        heads_k=2,
        dtype=dtype,
        options=Options(causal=causal),
    )
    harness.check(case, *backward_plan, with_dlse=True)


@pytest.mark.parametrize("head_dim", EVERY_HEAD_DIM)
def test_every_head_dim(device, head_dim):
    dtype = HALF_TYPES[head_dim // 8 % 2]
    case = Case(head_dim=head_dim, seqlen_q=97, seqlen_k=97, dtype=dtype)
    harness.check(case, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), UNEQUAL_HEAD_DIMS)
def test_unequal_head_dims(backward_plan, head_dim, head_dim_v, causal):
    case = Case(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=150,
        seqlen_k=170,
        options=Options(causal=causal),
    )
    harness.check(case, *backward_plan)


SHAPES = [
    Case(
        head_dim=row["head_dim"],
        seqlen_q=row["seqlens"][0],
        seqlen_k=row["seqlens"][1],
        batch=1,
        heads_q=4,
        heads_k=2,
        dtype=row["dtype"],
        options=Options(causal=row["causal"], window_size=row["window_size"]),
    )
    for row in pairwise(
        seqlens=SEQLENS,
        head_dim=(32, 64, 128, 192, 256),
        causal=MASKS,
        window_size=((-1, -1), (40, -1), (70, 20)),
        dtype=HALF_TYPES,
    )
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(backward_plan, case):
    harness.check(case, *backward_plan)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ratio", GQA_RATIOS)
def test_gqa(backward_plan, ratio, head_dim, causal):
    case = Case(
        head_dim=head_dim,
        seqlen_q=130,
        seqlen_k=190,
        heads_q=2 * ratio,
        heads_k=2,
        batch=1,
        options=Options(causal=causal),
    )
    harness.check(case, *backward_plan)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", [1.0, 15.0, 50.0])
def test_softcap(backward_plan, softcap, head_dim):
    for causal, window_size in ((False, (-1, -1)), (True, (90, -1))):
        case = Case(
            head_dim=head_dim,
            seqlen_q=140,
            seqlen_k=200,
            batch=1,
            options=Options(causal=causal, window_size=window_size, softcap=softcap),
        )
        harness.check(case, *backward_plan)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
@pytest.mark.parametrize("kind", ["peaky", "offset", "times3"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_inputs_that_are_not_normal(backward_plan, head_dim, kind, dtype):
    for causal in (False, True):
        case = Case(
            head_dim=head_dim,
            seqlen_q=260,
            seqlen_k=260,
            dtype=dtype,
            kind=kind,
            options=Options(causal=causal),
        )
        harness.check(case, *backward_plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=type_name)
@pytest.mark.parametrize("causal", MASKS)
def test_wide_types_on_the_cpu(dtype, causal):
    case = Case(dtype=dtype, seqlen_q=70, seqlen_k=100, options=Options(causal=causal, softcap=9.0))
    harness.check(case, "cpu", with_dlse=True)


@pytest.mark.parametrize(
    "options", [Options(), Options(causal=True, window_size=(50, -1))], ids=str
)
def test_forced_portable_plan(device, options):
    """`plan="sm80"` on CUDA, "spec" on the CPU: what a forced family computes is as accurate."""
    case = Case(seqlen_q=140, seqlen_k=200, head_dim=128, options=options).on(device)
    harness.check_tensors(make_tensors(case, device), options.kwargs(), harness.portable(device))


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("plan", ["sm90_fused", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forced_hopper_plan(head_dim, plan):
    """Both families are the same forward; each runs its own backward, or says why not."""
    case = Case(seqlen_q=140, seqlen_k=200, head_dim=head_dim, options=Options(causal=True))
    x = make_tensors(case, "cuda")
    out, lse = harness.attend(x, case.options.kwargs())
    named = dict(zip(("out", "lse"), harness.attend(x, case.options.kwargs(), plan)))
    harness.assert_bitwise(named, {"out": out, "lse": lse})
    if (head_dim, plan) != (256, "sm90_fused"):
        harness.check_tensors(x, case.options.kwargs(), plan)
        return
    with pytest.raises(RuntimeError, match="it is for head dims up to 64 and from 97 to 128"):
        harness.run(x, case.options.kwargs(), plan)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_of_dq_over_many_ctas(head_dim, causal, deterministic):
    """A thousand CTAs meet at the rows of dq, in order or not, and neither hang nor lose a part.

    The split kernels, of which each row of dq has one owner, round at the same places.
    """
    case = Case(head_dim=head_dim, seqlen_q=4096, seqlen_k=4096, heads_q=16, heads_k=16)
    x = make_tensors(case, "cuda")
    options = {"causal": causal, "deterministic": deterministic}
    split = harness.run(x, options, "sm90")
    fused = harness.run(x, options, "sm90_fused")
    for name in ("dq", "dk", "dv"):
        error = (fused[name].float() - split[name].float()).norm() / split[name].float().norm()
        assert error < 2e-3, f"{name}: {error:.2e}"


def test_only_the_lse_has_a_gradient(device):
    """out unused: dq and dk come from lse alone, and dv is exactly zero."""
    x = make_tensors(Case(seqlen_q=90, seqlen_k=120, batch=1), device)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    _, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse, leaves, x.dlse, allow_unused=True)
    no_dout = dataclasses.replace(x, dout=torch.zeros_like(x.dout))
    truth = harness.expected(no_dout, {"causal": True}, with_dlse=True)
    for name, actual in (("dq", dq), ("dk", dk)):
        error = (actual.double() - truth[name]).norm() / truth[name].norm()
        assert error < 3.5e-3, f"{name}: {error:.2e}"
    assert dv is None or not dv.any()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_gradients_of_some_inputs_only(device, wanted):
    x = make_tensors(Case(seqlen_q=70, seqlen_k=70), device)
    every = harness.run(x, {"causal": True})
    leaves = [t.requires_grad_(index in wanted) for index, t in enumerate((x.q, x.k, x.v))]
    out = flash_attn_func(*leaves, causal=True)
    gradients = torch.autograd.grad(out, [leaves[index] for index in wanted], x.dout)
    for index, gradient in zip(wanted, gradients):
        assert torch.equal(gradient, every[("dq", "dk", "dv")[index]])


def test_backward_twice_through_one_graph(device):
    x = make_tensors(Case(seqlen_q=70, seqlen_k=70), device)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    out = flash_attn_func(*leaves, causal=True)
    first = torch.autograd.grad(out, leaves, x.dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, x.dout)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def test_changed_input_is_noticed(device):
    """A saved tensor that was changed in place must not give silently wrong gradients."""
    x = make_tensors(Case(seqlen_q=20, seqlen_k=20), device)
    q = x.q.requires_grad_()
    out = flash_attn_func(q, x.k, x.v)
    x.k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(x.dout)


def test_double_backward_says_what_to_do(device):
    x = make_tensors(Case(seqlen_q=20, seqlen_k=20), device)
    q = x.q.requires_grad_()
    (dq,) = torch.autograd.grad(flash_attn_func(q, x.k, x.v), q, x.dout, create_graph=True)
    with pytest.raises(RuntimeError, match="flashattn_ext"):
        dq.sum().backward()
