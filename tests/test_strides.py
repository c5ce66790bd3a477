"""Memory layouts: whatever the strides, the results are those of contiguous copies, bit for bit."""

import dataclasses

import harness
import pytest
import torch
from cases import Case, Options, VarlenCase, heads_first, make_tensors, make_varlen_tensors

from flashattn_ext import flash_attn_func, flash_attn_qkvpacked_func

INPUTS = ("q", "k", "v", "dout")


def sequence_first(t):
    """Held as (S, B, H, D)."""
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def slice_of_wider_rows(t):
    """Every row followed by 8 elements of something else."""
    return torch.nn.functional.pad(t, (0, 8), value=float("nan"))[..., :-8]


def slice_at_an_offset(t):
    """Eight elements into a wider row: the base stays 16-byte aligned."""
    return torch.nn.functional.pad(t, (8, 0), value=float("nan"))[..., 8:]


def misaligned_base(t):
    """One element into its storage: not 16-byte aligned, so a copy is made."""
    storage = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return storage[1:].view(t.shape).copy_(t)


def misaligned_rows(t):
    """Rows one element further apart than they are long."""
    return torch.nn.functional.pad(t, (0, 1), value=float("nan"))[..., :-1]


def strided_last(t):
    """Every second element of a row twice as long."""
    wide = torch.full(
        (*t.shape[:-1], 2 * t.shape[-1]), float("nan"), dtype=t.dtype, device=t.device
    )
    view = wide[..., ::2]
    return view.copy_(t)


def every_second_row(t):
    wide = torch.full(
        (t.shape[0], 2 * t.shape[1], *t.shape[2:]), float("nan"), dtype=t.dtype, device=t.device
    )
    return wide[:, ::2].copy_(t)


LAYOUTS = (
    heads_first,
    sequence_first,
    slice_of_wider_rows,
    slice_at_an_offset,
    misaligned_base,
    misaligned_rows,
    strided_last,
    every_second_row,
)


def assert_same_as_contiguous(x, options, plan=None, **changes):
    """`plan` is that of the contiguous run: a stride of 0 rules out kernels that read it."""
    wanted = harness.run(x, options, plan, with_dlse=True)
    view = dataclasses.replace(x, **changes)
    for name, value in changes.items():
        plain = getattr(x, name)
        assert value.stride() != plain.stride() or value.data_ptr() % 16, f"{name}: plain already"
        assert torch.equal(value, plain), f"{name}: the layout changed the values"
    harness.assert_bitwise(harness.run(view, options, with_dlse=True), wanted)


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layout_of_all_inputs(device, layout, head_dim):
    x = make_tensors(Case(head_dim=head_dim, seqlen_q=130, seqlen_k=100), device)
    changes = {name: layout(getattr(x, name)) for name in INPUTS}
    assert_same_as_contiguous(x, {"causal": True}, **changes)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("plan", ["sm90_fused", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", [heads_first, every_second_row], ids=lambda f: f.__name__)
def test_layout_of_all_inputs_with_a_named_backward(layout, head_dim, plan):
    """The backward kernels that the test above does not choose."""
    x = make_tensors(Case(head_dim=head_dim, seqlen_q=130, seqlen_k=100), "cuda")
    wanted = harness.run(x, {"causal": True}, plan)
    view = dataclasses.replace(x, **{name: layout(getattr(x, name)) for name in INPUTS})
    harness.assert_bitwise(harness.run(view, {"causal": True}, plan), wanted)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("layout", [heads_first, strided_last], ids=lambda f: f.__name__)
def test_layout_of_one_input(device, layout, name):
    x = make_tensors(Case(seqlen_q=70, seqlen_k=100), device)
    assert_same_as_contiguous(x, {}, **{name: layout(getattr(x, name))})


@pytest.mark.parametrize("head_dim", [64, 256])
def test_keys_expanded_over_batch_and_heads(device, head_dim):
    """k and v of one head and one batch entry, expanded with stride 0."""
    case = Case(head_dim=head_dim, seqlen_q=97, seqlen_k=129, heads_q=8, heads_k=8)
    x = make_tensors(case, device)
    k, v = (t[:1, :, :1].expand(2, -1, 8, -1) for t in (x.k, x.v))
    assert k.stride(0) == k.stride(2) == 0
    plain = dataclasses.replace(x, k=k.contiguous(), v=v.contiguous())
    assert_same_as_contiguous(plain, {"causal": True}, harness.portable(device), k=k, v=v)


def test_one_key_row_expanded_over_the_sequence(device):
    """Stride 0 along the sequence: every key is the same, so out is v's mean of itself."""
    x = make_tensors(Case(seqlen_q=40, seqlen_k=70), device)
    k, v = (t[:, :1].expand(-1, 70, -1, -1) for t in (x.k, x.v))
    plain = dataclasses.replace(x, k=k.contiguous(), v=v.contiguous())
    assert_same_as_contiguous(plain, {}, harness.portable(device), k=k, v=v)


def test_queries_expanded(device):
    x = make_tensors(Case(seqlen_q=40, seqlen_k=70), device)
    q = x.q[:1].expand(2, -1, -1, -1)
    plain = dataclasses.replace(x, q=q.contiguous())
    assert_same_as_contiguous(plain, {}, harness.portable(device), q=q)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 64), (1, 100, 1, 64), (2, 100, 4, 1)])
def test_stride_zero_dout(device, shape):
    """out.sum().backward() and its kin send an expanded gradient."""
    x = make_tensors(Case(seqlen_q=100, seqlen_k=100), device)
    dout = torch.randn(shape, device=device).to(x.q.dtype).expand_as(x.dout)
    plain = dataclasses.replace(x, dout=dout.contiguous())
    assert_same_as_contiguous(plain, {"causal": True}, dout=dout)


def test_sum_backward(device):
    x = make_tensors(Case(seqlen_q=100, seqlen_k=100), device)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    flash_attn_func(*leaves).sum().backward()
    wanted = harness.run(dataclasses.replace(x, dout=torch.ones_like(x.dout)), {})
    for leaf, name in zip(leaves, ("dq", "dk", "dv")):
        assert torch.equal(leaf.grad, wanted[name])


@pytest.mark.parametrize("dlse_layout", ["expanded", "transposed", "strided"])
def test_layout_of_dlse(device, dlse_layout):
    x = make_tensors(Case(seqlen_q=100, seqlen_k=100), device)
    if dlse_layout == "expanded":
        dlse = torch.randn(1, 1, 100, device=device).expand(2, 4, -1)
    elif dlse_layout == "transposed":
        dlse = x.dlse.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        dlse = x.dlse.repeat_interleave(2, dim=-1)[..., ::2]
    plain = dataclasses.replace(x, dlse=dlse.contiguous())
    assert_same_as_contiguous(plain, {"causal": True}, dlse=dlse)


@pytest.mark.parametrize("head_dim", [64, 104, 256])
def test_fused_projection_in_both_orders(device, head_dim):
    """(B, S, 3, H, D) and (B, S, H, 3 * D) projections, read in place; gradients of the whole."""
    case = Case(head_dim=head_dim, heads_q=4, heads_k=4, seqlen_q=90, seqlen_k=90)
    x = make_tensors(case, device)
    wanted = harness.run(x, {"causal": True})
    fused = torch.stack([x.q, x.k, x.v], dim=2).requires_grad_()
    out = flash_attn_qkvpacked_func(fused, causal=True)
    (gradient,) = torch.autograd.grad(out, fused, x.dout)
    assert torch.equal(out, wanted["out"])
    for part, name in zip(gradient.unbind(2), ("dq", "dk", "dv")):
        assert torch.equal(part, wanted[name])
    interleaved = torch.cat([x.q, x.k, x.v], dim=-1)
    q, k, v = interleaved.split(head_dim, dim=-1)
    harness.assert_bitwise(
        harness.run(dataclasses.replace(x, q=q, k=k, v=v), {"causal": True}), wanted
    )


@pytest.mark.parametrize("packing", ["fused", "heads_first", "wider_rows"])
def test_varlen_layouts(device, packing):
    case = VarlenCase(
        lengths_q=(70, 0, 33),
        lengths_k=(70, 0, 33),
        heads_q=3,
        heads_k=3,
        tail_q=2,
        tail_k=2,
        options=Options(causal=True),
    )
    x = make_varlen_tensors(case, device, unowned=0.0)
    if packing == "fused":
        q, k, v = torch.stack([x.q, x.k, x.v], dim=1).unbind(1)
        changes = {"q": q, "k": k, "v": v}
    elif packing == "heads_first":
        changes = {n: getattr(x, n).transpose(0, 1).contiguous().transpose(0, 1) for n in INPUTS}
    else:
        changes = {n: slice_of_wider_rows(getattr(x, n)) for n in INPUTS}
    assert_same_as_contiguous(x, {"causal": True}, **changes)


def test_outputs_are_contiguous_whatever_the_inputs(device):
    x = make_tensors(Case(seqlen_q=70, seqlen_k=100), device)
    views = {name: heads_first(getattr(x, name)) for name in INPUTS}
    actual = harness.run(dataclasses.replace(x, **views), {})
    for name, value in actual.items():
        assert value.is_contiguous(), name


def test_inputs_are_left_alone(device):
    x = make_tensors(Case(seqlen_q=70, seqlen_k=100), device)
    before = {name: getattr(x, name).clone() for name in (*INPUTS, "dlse")}
    harness.run(x, {"causal": True}, with_dlse=True)
    for name, value in before.items():
        assert torch.equal(getattr(x, name), value), name
