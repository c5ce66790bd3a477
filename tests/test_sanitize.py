"""A small set for compute-sanitizer (`make sanitize`): each kernel, its tails, its masks.

    compute-sanitizer --tool memcheck python -m pytest -m gpu tests/test_sanitize.py

Sizes cross one tile edge in both directions and no more: under racecheck a kernel runs a thousand
times slower. The same tests run everywhere as ordinary tests.
"""

import harness
import pytest
import torch
from cases import Case, Options, VarlenCase, heads_first, make_tensors

from flashattn_ext import flash_attn_func, merge


def small(head_dim, seqlen_q=130, seqlen_k=67, **fields):
    """One sequence in bf16, one head of K and V for two of Q, unless told otherwise."""
    few = {"batch": 1, "heads_q": 2, "heads_k": 1, "dtype": torch.bfloat16}
    return Case(head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **few | fields)


DENSE = [
    small(32),
    small(64, options=Options(causal=True)),
    small(64, dtype=torch.float16, options=Options(window_size=(20, 5), softcap=10.0)),
    small(72, options=Options(causal="top_left")),
    small(96, dtype=torch.float16),
    small(128, options=Options(causal=True, window_size=(33, -1))),
    small(192, dtype=torch.float16, options=Options(causal=True)),
    small(256, options=Options(softcap=10.0)),
]
# Rows of the forward's Hopper tile table that the lengths above do not reach, and blocks of keys
# that a part of a tile leaves out, ahead of its first and behind its last.
FORWARD = [
    *(
        small(head_dim, 140, 400, heads_q=1, options=Options(window_size=(150, 0)))
        for head_dim in (64, 128, 256)
    ),
    small(64, 200, 1100, heads_q=1),
    small(192, 130, 140, head_dim_v=128, options=Options(causal=True)),
]
PACKED = [
    VarlenCase(
        lengths_q=(65, 0, 3),
        lengths_k=(70, 5, 0),
        head_dim=head_dim,
        heads_q=2,
        heads_k=1,
        tail_q=1,
        tail_k=3,
        seqused_k=(69, 2, 0),
        options=Options(causal=True),
    )
    for head_dim in (64, 128, 256)
]
# Two blocks of keys, which share the rows of dq.
SHARED = [
    small(head_dim, 130, 140, heads_q=1, options=Options(causal=True)) for head_dim in (64, 128)
]


@pytest.mark.parametrize("case", [*DENSE, *SHARED, *PACKED], ids=str)
def test_sanitize(device, case):
    x = harness.inputs_of(case, device)
    actual = harness.run(x, case.options.kwargs(), with_dlse=True)
    for name in ("out", "dq", "dk", "dv"):
        assert actual[name].isfinite().all(), name


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_sanitize_forward(device, case):
    out, _ = harness.attend(harness.inputs_of(case, device), case.options.kwargs())
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("case", [*DENSE, *PACKED], ids=str)
def test_sanitize_portable(case):
    """Where the test above runs the Hopper kernels."""
    x = harness.inputs_of(case, "cuda")
    actual = harness.run(x, case.options.kwargs(), "sm80", with_dlse=True)
    for name in ("out", "dq", "dk", "dv"):
        assert actual[name].isfinite().all(), name


# More tiles than SMs, without a mask: persistent CTAs go from tile to tile.
MANY = [small(head_dim, 130, 140, heads_q=140, heads_k=140) for head_dim in (64, 128)]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("plan", [None, "sm90_fused", "sm90"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_sanitize_hopper_backward_of_many_tiles(case, plan):
    """In one kernel in order, in one in any order, and in two."""
    x = harness.inputs_of(case, "cuda")
    actual = harness.run(x, case.options.kwargs(), plan)
    for name in ("dq", "dk", "dv"):
        assert actual[name].isfinite().all(), name


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("plan", ["sm90_fused", "sm90"])
@pytest.mark.parametrize("case", [*SHARED, *PACKED[:2]], ids=str)
def test_sanitize_hopper_backward(case, plan):
    """Where the tests above sum dq in one kernel and in order: in any order, and in two kernels."""
    x = harness.inputs_of(case, "cuda")
    actual = harness.run(x, case.options.kwargs(), plan, with_dlse=True)
    for name in ("dq", "dk", "dv"):
        assert actual[name].isfinite().all(), name


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sanitize_more_tiles_than_sms(device, head_dim):
    """Persistent CTAs go from tile to tile, some with keys and some without."""
    case = Case(
        head_dim=head_dim,
        seqlen_q=200,
        seqlen_k=6,
        batch=1,
        heads_q=140,
        heads_k=1,
        options=Options(causal=True),
    )
    with torch.no_grad():
        out, _ = harness.attend(make_tensors(case, device), case.options.kwargs())
    assert out.isfinite().all()
    assert not out[:, :194].any(), "rows before the first key"


def test_sanitize_unequal_head_dims(device):
    case = Case(head_dim=40, head_dim_v=104, seqlen_q=66, seqlen_k=65, batch=1)
    actual = harness.run(make_tensors(case, device), {})
    assert actual["dv"].isfinite().all()


def test_sanitize_strides(device):
    x = make_tensors(Case(seqlen_q=66, seqlen_k=65, batch=1, heads_k=4), device)
    for name in ("q", "k", "v", "dout"):
        setattr(x, name, heads_first(getattr(x, name)))
    assert harness.run(x, {"causal": True})["dq"].isfinite().all()


def test_sanitize_merge(device):
    x = make_tensors(Case(seqlen_q=33, seqlen_k=65, batch=1), device)
    halves = [
        flash_attn_func(x.q, x.k[:, part], x.v[:, part], return_lse=True)
        for part in (slice(0, 30), slice(30, 65))
    ]
    out, lse = merge(*halves[0], *halves[1])
    assert out.isfinite().all()
    assert lse.isfinite().all()
