"""Sizes past 32 bits and past the grid's limits, without more memory than a test may take.

The tensors are views into one storage whose strides carry elements past 2^31; what is compared is
small. Storage is committed memory on a GPU and untouched pages on the CPU.
"""

import dataclasses

import harness
import pytest
import torch
from cases import Case, VarlenCase, make_tensors, make_varlen_tensors

from flashattn_ext import flash_attn_func

INT32 = 2**31
GIB = 2**30


def needs(free_gib):
    """Skips, with the reason, where the GPU has less memory free."""
    free = torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else 0
    return pytest.mark.skipif(
        torch.cuda.is_available() and free < free_gib,
        reason=f"needs {free_gib} GiB of GPU memory, {free:.0f} are free",
    )


@pytest.fixture(autouse=True)
def empty_cache():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def far_view(t, dim, stride):
    """`t`'s values with `stride` elements between neighbours of `dim`, in one large storage."""
    strides = list(t.stride())
    strides[dim] = stride
    last = sum((n - 1) * s for n, s in zip(t.shape, strides))
    storage = torch.empty(last + 1, dtype=t.dtype, device=t.device)
    view = storage.as_strided(t.shape, strides)
    return view.copy_(t)


@pytest.mark.gpu
@pytest.mark.no_poison
@needs(30)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "row", "head"])
def test_offsets_past_two_to_the_31(dim):
    """q, k, v and dout each reach past 2^31 elements along one dimension."""
    case = Case(head_dim=64, batch=3, seqlen_q=70, seqlen_k=70, heads_q=3, heads_k=3)
    x = make_tensors(case, "cuda")
    wanted = harness.run(x, {"causal": True})
    steps = x.q.shape[dim] - 1
    stride = (INT32 // steps // 8 + 1) * 8
    for name in ("q", "k", "v", "dout"):
        far = {name: far_view(getattr(x, name), dim, stride)}
        assert steps * far[name].stride(dim) >= INT32
        harness.assert_bitwise(harness.run(dataclasses.replace(x, **far), {"causal": True}), wanted)
        del far


@pytest.mark.gpu
@pytest.mark.no_poison
@needs(60)
def test_outputs_past_two_to_the_31():
    """2^31 elements in q, out and dq themselves: the last rows must be right."""
    batch, seqlen, heads, dim = 1, 34_000_000 // 128, 64, 128
    q = torch.empty(batch, seqlen, heads, dim, dtype=torch.bfloat16, device="cuda")
    assert q.numel() > INT32
    q.normal_()
    k, v = (torch.randn(batch, 64, heads, dim, device="cuda").bfloat16() for _ in "kv")
    q.requires_grad_()
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    (dq,) = torch.autograd.grad(out, q, torch.ones((), device="cuda").bfloat16().expand_as(out))
    for part in (slice(0, 50), slice(seqlen // 2, seqlen // 2 + 50), slice(seqlen - 50, seqlen)):
        small = q[:, part].detach().requires_grad_()
        wanted, wanted_lse = flash_attn_func(small, k, v, return_lse=True)
        (wanted_dq,) = torch.autograd.grad(wanted, small, torch.ones_like(wanted))
        assert torch.equal(out[:, part], wanted)
        assert torch.equal(lse[:, :, part], wanted_lse)
        assert torch.equal(dq[:, part], wanted_dq)


@pytest.mark.gpu
@pytest.mark.no_poison
@needs(60)
def test_keys_past_two_to_the_31():
    """2^31 elements in k, v, dk and dv: one query over all of them, its answer known."""
    seqlen, heads, dim = 34_000_000 // 128, 64, 128
    k = torch.zeros(1, seqlen, heads, dim, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    assert k.numel() > INT32
    q = torch.ones(1, 1, heads, dim, dtype=torch.bfloat16, device="cuda")
    k[:, -1] = 16.0  # the last key's score stands 181 above the others
    v[:, -1] = torch.randn(heads, dim, device="cuda").bfloat16()
    k.requires_grad_()
    v.requires_grad_()
    out = flash_attn_func(q, k, v)
    dk, dv = torch.autograd.grad(out, (k, v), torch.ones_like(out))
    assert torch.equal(out[0, 0], v[0, -1])
    assert torch.equal(dv[:, -1], torch.ones_like(dv[:, -1]))
    assert not dv[:, :-1].any()
    assert dk.isfinite().all()


@pytest.mark.gpu
@pytest.mark.no_poison
@needs(30)
def test_varlen_rows_past_two_to_the_31():
    """Two short sequences at both ends of a packed tensor of 2^31 elements."""
    case = VarlenCase(lengths_q=(70, 33), lengths_k=(70, 33), heads_q=2, heads_k=2)
    x = make_varlen_tensors(case, "cuda")
    wanted = harness.run(x, {"causal": True})
    row = (INT32 // 102 // 8 + 1) * 8
    far = {name: far_view(getattr(x, name), 0, row) for name in ("q", "k")}
    harness.assert_bitwise(harness.run(dataclasses.replace(x, **far), {"causal": True}), wanted)


@pytest.mark.parametrize(
    ("batch", "heads"), [(70000, 1), (1, 70000), (300, 300)], ids=["batch", "heads", "product"]
)
def test_more_than_65535(device, batch, heads):
    """Batch, heads and their product beyond the limit of grid.y and grid.z, backward included."""
    if device == "cpu":  # no grid there: the same body over a tenth of each
        batch, heads = -(-batch // 10), -(-heads // 10)
    case = Case(
        head_dim=16,
        batch=batch,
        heads_q=heads,
        heads_k=heads,
        seqlen_q=3,
        seqlen_k=5,
        dtype=torch.float16,
    )
    x = make_tensors(case, device)
    harness.check_tensors(x, {"causal": True}, from_rounded_out=True)


def test_more_than_65535_sequences(device):
    count = 66000 if device == "cuda" else 500
    case = VarlenCase(
        lengths_q=(1,) * count,
        lengths_k=(2,) * count,
        heads_q=1,
        heads_k=1,
        head_dim=16,
        dtype=torch.float16,
    )
    x = make_varlen_tensors(case, device)
    actual = harness.run(x, {})
    pairs = dataclasses.replace(
        x,
        q=x.q[:, None],
        k=x.k.unflatten(0, (count, 2)),
        v=x.v.unflatten(0, (count, 2)),
        dout=x.dout[:, None],
        lengths={},
    )
    wanted = harness.run(pairs, {})
    for name in ("out", "dq", "dk", "dv"):
        flat = {name: wanted[name].flatten(0, 1)}
        harness.assert_same_kernel(device, {name: actual[name]}, flat)


@pytest.mark.gpu
@pytest.mark.no_poison
def test_a_long_sequence():
    """65,536 tokens: a window of the rows against fp64, and every value finite."""
    case = Case(batch=1, heads_q=2, heads_k=1, seqlen_q=65536, seqlen_k=65536)
    x = make_tensors(case, "cuda")
    actual = harness.run(x, {"causal": True})
    for name, value in actual.items():
        assert value.isfinite().all(), name
    tail = dataclasses.replace(x, q=x.q[:, -256:], dout=x.dout[:, -256:], dlse=x.dlse[:, :, -256:])
    truth = harness.expected(tail, {"causal": True})
    for name in ("out", "dq"):
        part = actual[name][:, -256:].double()
        assert (part - truth[name]).norm() / truth[name].norm() < 3.5e-3, name
