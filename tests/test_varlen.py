"""Packed sequences: lengths of every kind, rows that nobody owns, upper bounds, used lengths.

Rows outside every sequence hold NaN in q, k, v, dout and dlse: whatever reads them shows it.
"""

import dataclasses

import harness
import pytest
import torch
from cases import (
    GQA_RATIOS,
    HALF_TYPES,
    HEAD_DIMS,
    UNEQUAL_HEAD_DIMS,
    Case,
    Options,
    VarlenCase,
    make_tensors,
    make_varlen_tensors,
    owned_rows,
    type_name,
)

import flashattn_ext
from flashattn_ext import flash_attn_func, flash_attn_varlen_func

MIXED_Q = (113, 0, 1, 300, 64, 0)
MIXED_K = (203, 5, 0, 300, 65, 0)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_accuracy(backward_plan, head_dim, causal, dtype):
    case = VarlenCase(
        lengths_q=MIXED_Q,
        lengths_k=MIXED_K,
        head_dim=head_dim,
        dtype=dtype,
        tail_q=3,
        tail_k=70,
        options=Options(causal=causal),
    )
    harness.check(case, *backward_plan, with_dlse=True)


@pytest.mark.parametrize("ratio", GQA_RATIOS)
def test_gqa(device, ratio):
    case = VarlenCase(
        lengths_q=(100, 1, 0, 33),
        lengths_k=(100, 129, 7, 33),
        heads_q=2 * ratio,
        heads_k=2,
        options=Options(causal=True),
    )
    harness.check(case, device)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), UNEQUAL_HEAD_DIMS[::3])
def test_unequal_head_dims(device, head_dim, head_dim_v):
    case = VarlenCase(
        lengths_q=MIXED_Q, lengths_k=MIXED_K, head_dim=head_dim, head_dim_v=head_dim_v, tail_q=1
    )
    harness.check(case, device)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window_size", [(20, 10), (0, 0), (-1, 3), (64, -1)])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_windows_and_softcap(backward_plan, softcap, window_size, causal):
    case = VarlenCase(
        lengths_q=MIXED_Q,
        lengths_k=MIXED_K,
        tail_q=2,
        options=Options(causal=causal, window_size=window_size, softcap=softcap),
    )
    harness.check(case, *backward_plan)


USED = [
    ((50, 0, 1, 300, 0, 0), (7, 5, 0, 100, 65, 0)),
    (None, (7, 0, 0, 300, 1, 0)),
    ((1, 0, 0, 64, 64, 0), None),
    ((113, 0, 1, 300, 64, 0), (203, 5, 0, 300, 65, 0)),
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqused_q", "seqused_k"), USED, ids=str)
def test_seqused(backward_plan, seqused_q, seqused_k, causal, head_dim):
    """Rows and keys past seqused are as absent as a tail, and NaN there stays there."""
    case = VarlenCase(
        lengths_q=MIXED_Q,
        lengths_k=MIXED_K,
        head_dim=head_dim,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        tail_q=2,
        tail_k=2,
        options=Options(causal=causal),
    )
    harness.check(case, *backward_plan)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_unowned_rows_are_not_read_and_come_back_empty(backward_plan, head_dim, poison):
    """Keys of two blocks: a sum of two parts, as dq is then, has no order."""
    device, plan = backward_plan
    case = VarlenCase(
        lengths_q=(65, 130), lengths_k=(65, 130), head_dim=head_dim, tail_q=190, tail_k=190
    )
    clean = make_varlen_tensors(case, device, unowned=0.0)
    torch.manual_seed(0)  # the same values again, poison in the other rows
    poisoned = make_varlen_tensors(case, device, unowned=poison)
    options = {"causal": True}
    harness.skip_what_the_family_refuses(clean, options, plan)
    wanted = harness.run(clean, options, plan, with_dlse=True)
    actual = harness.run(poisoned, options, plan, with_dlse=True)
    harness.assert_bitwise(actual, wanted)
    tail = ~owned_rows(case.lengths_q, case.total_q).to(device)
    for name in ("out", "dq", "dk", "dv"):
        assert not actual[name][tail].any(), f"{name} of rows that no sequence owns is not 0"
    assert (actual["lse"][:, tail] == -torch.inf).all()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_before_the_first_sequence(device, causal):
    """cu_seqlens may start above 0: the rows before it belong to nobody."""
    case = VarlenCase(lengths_q=(40, 70), lengths_k=(50, 70), tail_q=5, tail_k=5)
    x = make_varlen_tensors(case, device, unowned=0.0)
    shifted = dataclasses.replace(
        x,
        q=x.q.roll(5, 0),
        k=x.k.roll(5, 0),
        v=x.v.roll(5, 0),
        dout=x.dout.roll(5, 0),
        dlse=x.dlse.roll(5, 1),
        lengths={
            **x.lengths,
            "cu_seqlens_q": x.lengths["cu_seqlens_q"] + 5,
            "cu_seqlens_k": x.lengths["cu_seqlens_k"] + 5,
        },
    )
    wanted = harness.run(x, {"causal": causal})
    for t in (shifted.q, shifted.k, shifted.v, shifted.dout):
        t[:5] = torch.nan
    actual = harness.run(shifted, {"causal": causal})
    unshifted = {name: value.roll(-5, 1 if name == "lse" else 0) for name, value in actual.items()}
    harness.assert_bitwise(unshifted, wanted)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_equal_lengths_equal_the_dense_run(backward_plan, head_dim, causal):
    """Packing changes addresses, not arithmetic. Of keys there are two blocks, as above."""
    device, plan = backward_plan
    case = Case(head_dim=head_dim, seqlen_q=77, seqlen_k=130, batch=3)
    dense = make_tensors(case, device)
    options = {"causal": causal}
    harness.skip_what_the_family_refuses(dense, options, plan)
    wanted = harness.run(dense, options, plan, with_dlse=True)
    packed = dataclasses.replace(
        dense,
        q=dense.q.flatten(0, 1),
        k=dense.k.flatten(0, 1),
        v=dense.v.flatten(0, 1),
        dout=dense.dout.flatten(0, 1),
        dlse=dense.dlse.transpose(0, 1).flatten(1, 2).contiguous(),
        lengths={
            "cu_seqlens_q": torch.arange(4, dtype=torch.int32, device=device) * 77,
            "cu_seqlens_k": torch.arange(4, dtype=torch.int32, device=device) * 130,
            "max_seqlen_q": 77,
            "max_seqlen_k": 130,
        },
    )
    actual = harness.run(packed, options, plan, with_dlse=True)
    actual["lse"] = actual["lse"].view(case.heads_q, 3, 77).transpose(0, 1)
    for name in ("out", "dq", "dk", "dv"):
        actual[name] = actual[name].view_as(wanted[name])
    harness.assert_same_kernel(device, actual, wanted)


def test_max_seqlen_is_an_upper_bound(device):
    case = VarlenCase(lengths_q=(33, 100), lengths_k=(70, 100))
    x = make_varlen_tensors(case, device)
    wanted = harness.run(x, {"causal": True})
    x.lengths |= {"max_seqlen_q": 5000, "max_seqlen_k": 3001}
    harness.assert_bitwise(harness.run(x, {"causal": True}), wanted)


def test_max_seqlen_too_small_stays_inside_the_tensors(device):
    """Rows beyond the bound take no part: they come back empty, no other row changes."""
    case = VarlenCase(lengths_q=(200, 100), lengths_k=(200, 100))
    x = make_varlen_tensors(case, device)
    wanted = harness.run(x, {})
    x.lengths |= {"max_seqlen_q": 128, "max_seqlen_k": 200}
    actual = harness.run(x, {})
    assert torch.equal(actual["out"][:128], wanted["out"][:128])
    assert torch.equal(actual["out"][200:], wanted["out"][200:])
    assert not actual["out"][128:200].any()
    assert not actual["dq"][128:200].any()
    assert (actual["lse"][:, 128:200] == -torch.inf).all()


@pytest.mark.parametrize(
    "cu_seqlens",
    [
        (0, 64, 9999),
        (0, 2**31 - 1, 128),
        (-7, 64, 128),
        (0, 100, 50),
        (128, 64, 0),
        (300, 400, 500),
    ],
    ids=str,
)
def test_bad_device_lengths_stay_inside_the_tensors(device, cu_seqlens):
    """Lengths live on the device, where nobody can raise: they are clamped, memory is safe."""
    case = VarlenCase(lengths_q=(64, 64), lengths_k=(64, 64))
    x = make_varlen_tensors(case, device)
    bad = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    x.lengths |= {"cu_seqlens_q": bad, "cu_seqlens_k": bad, "max_seqlen_q": 64, "max_seqlen_k": 64}
    actual = harness.run(x, {"causal": True})
    for name in ("out", "dq", "dk", "dv"):
        assert actual[name].isfinite().all(), name


def test_no_sequences_at_all(device):
    """B = 0 with rows in the tensors, and total = 0 with sequences."""
    for lengths, tail in (((), 4), ((0, 0, 0), 0), ((0, 0), 3)):
        case = VarlenCase(lengths_q=lengths, lengths_k=lengths, tail_q=tail, tail_k=tail)
        actual = harness.run(make_varlen_tensors(case, device), {"causal": True}, with_dlse=True)
        for name in ("out", "dq", "dk", "dv"):
            assert actual[name].shape[0] == tail
            assert not actual[name].any(), name
        assert (actual["lse"] == -torch.inf).all()


def test_many_short_sequences(device):
    lengths = tuple(i % 5 for i in range(300))
    case = VarlenCase(lengths_q=lengths, lengths_k=lengths[::-1], options=Options(causal=True))
    harness.check(case, device)


def test_packed_forms_equal_the_plain_one(device):
    case = VarlenCase(lengths_q=(33, 70), lengths_k=(33, 70), heads_q=3, heads_k=3)
    x = make_varlen_tensors(case, device)
    lengths, longest = x.lengths["cu_seqlens_q"], 70
    wanted = flash_attn_varlen_func(x.q, x.k, x.v, lengths, lengths, longest, longest, causal=True)
    qkv = torch.stack([x.q, x.k, x.v], dim=1)
    kv = torch.stack([x.k, x.v], dim=1)
    packed = flashattn_ext.flash_attn_varlen_qkvpacked_func(qkv, lengths, longest, causal=True)
    assert torch.equal(packed, wanted)
    packed = flashattn_ext.flash_attn_varlen_kvpacked_func(
        x.q, kv, lengths, lengths, longest, longest, causal=True
    )
    assert torch.equal(packed, wanted)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_equals_its_single_runs(device_plan, causal, head_dim):
    """Sequences do not see each other: each alone gives the bits it has in the batch.

    Odd sequences are so loud that their softmax would move a reference that it shared.
    """
    device, plan = device_plan
    case = VarlenCase(
        lengths_q=(65, 33, 128, 41, 7), lengths_k=(400, 33, 500, 300, 290), head_dim=head_dim
    )
    x = make_varlen_tensors(case, device)
    for start, stop in ((65, 98), (226, 267)):
        x.q[start:stop] *= 30
    options = {"causal": causal, "plan": plan}
    out = flash_attn_varlen_func(x.q, x.k, x.v, **x.lengths, **options)
    start_q = start_k = 0
    for length_q, length_k in zip(case.lengths_q, case.lengths_k):
        rows, keys = slice(start_q, start_q + length_q), slice(start_k, start_k + length_k)
        single = flash_attn_func(x.q[None, rows], x.k[None, keys], x.v[None, keys], **options)
        harness.assert_same_kernel(device, {"out": out[rows]}, {"out": single[0]})
        start_q, start_k = rows.stop, keys.stop
