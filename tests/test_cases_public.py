"""Numbers that users of other libraries reported, with the right values.

Each test names the report it comes from (FA = Dao-AILab/flash-attention, PT = pytorch/pytorch,
FI = flashinfer-ai/flashinfer, TE = NVIDIA/TransformerEngine, CF = NVIDIA/cudnn-frontend).
"""

import dataclasses
import math

import compare
import harness
import pytest
import torch
from cases import (
    EVERY_HEAD_DIM,
    HALF_TYPES,
    Case,
    Options,
    VarlenCase,
    heads_first,
    make_tensors,
    make_varlen_tensors,
    type_name,
)

from flashattn_ext import flash_attn_func, flash_attn_varlen_func, merge

RANDN3_HEAD_DIMS = (8, 16, 40, 64, 72, 96, 128, 136, 192, 256)


def test_one_key_per_sequence_many_empty_rows(device):
    """FA#443: causal, 76 + 34 + 146 queries over one key each; dQ was NaN."""
    case = VarlenCase(
        lengths_q=(76, 34, 146),
        lengths_k=(1, 1, 1),
        heads_q=1,
        heads_k=1,
        head_dim=32,
        dtype=torch.float16,
        kind="times3",
        options=Options(causal=True),
    )
    x = make_varlen_tensors(case, device)
    x.dout = torch.ones_like(x.dout)
    actual = harness.run(x, {"causal": True})
    last = torch.tensor([75, 109, 255], device=device)
    others = torch.ones(256, dtype=torch.bool, device=device)
    others[last] = False
    assert torch.equal(actual["out"][last], x.v)
    assert not actual["out"][others].any()
    assert (actual["lse"][:, others] == -math.inf).all()
    bound = 1e-5 * compare.longest_row(x.dout) * compare.longest_row(x.v)
    assert actual["dq"].abs().max() <= bound
    assert actual["dk"].abs().max() <= bound
    assert not actual["dq"][others].any()
    assert torch.equal(actual["dv"], x.dout[last])


@pytest.mark.parametrize("head_dim", RANDN3_HEAD_DIMS)
def test_one_query_one_key(device, head_dim):
    """FA#334: (1, 1, 1, D), randn * 3: O = v, dQ and dK vanish, dV = dO; dQ was NaN."""
    case = Case(
        head_dim=head_dim,
        seqlen_q=1,
        seqlen_k=1,
        batch=1,
        heads_q=1,
        heads_k=1,
        dtype=torch.float16,
        kind="times3",
    )
    for seed in range(5):
        torch.manual_seed(seed)
        x = make_tensors(case, device)
        actual = harness.run(x, {})
        bound = 1e-5 * compare.longest_row(x.dout) * compare.longest_row(x.v)
        assert torch.equal(actual["out"], x.v)
        assert torch.equal(actual["dv"], x.dout)
        assert actual["dq"].abs().max() <= bound
        assert actual["dk"].abs().max() <= bound


def test_gqa_lengths_of_one_and_zero(device):
    """FA#1537: GQA 9/3, q lengths 1, 0, 1 over 3, 0, 5 keys, max_seqlen_q = 1."""
    case = VarlenCase(
        lengths_q=(1, 0, 1),
        lengths_k=(3, 0, 5),
        heads_q=9,
        heads_k=3,
        options=Options(causal=True, softmax_scale=1.0),
    )
    harness.check_tensors(
        make_varlen_tensors(case, device), case.options.kwargs(), from_rounded_out=True
    )


def test_fewer_tokens_than_sequences(device):
    """FA#1619: one token in four sequences, GQA 21/7, D = 120."""
    case = VarlenCase(
        lengths_q=(0, 0, 0, 1), lengths_k=(0, 0, 0, 1), heads_q=21, heads_k=7, head_dim=120
    )
    x = make_varlen_tensors(case, device)
    actual = harness.run(x, {"softmax_scale": math.sqrt(120)})
    assert torch.equal(actual["out"], x.v.repeat_interleave(3, dim=1))
    bound = 1e-5 * compare.longest_row(x.dout) * compare.longest_row(x.v) * math.sqrt(120)
    assert actual["dq"].abs().max() <= bound
    assert actual["dk"].abs().max() <= bound


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_of_sequences_without_queries(device, head_dim, causal):
    """FA#2562: sequences with keys and no queries; illegal access in the backward."""
    case = VarlenCase(
        lengths_q=(0, 1208, 840, 0),
        lengths_k=(2538, 1742, 840, 3072),
        heads_q=4,
        heads_k=1,
        head_dim=head_dim,
        options=Options(causal=causal),
    )
    actual = harness.check(case, device)
    lengths = case.on(device).lengths_k
    for name in ("dk", "dv"):
        assert not actual[name][: lengths[0]].any()
        assert not actual[name][sum(lengths[:3]) :].any()


@pytest.mark.parametrize("causal", [False, True])
def test_lse_of_packed_sequences_stays_in_its_rows(device, causal):
    """FA#2842: -inf of a sequence without keys was written over another sequence's LSE."""
    case = VarlenCase(
        lengths_q=(3, 4, 5), lengths_k=(7, 0, 9), heads_q=2, options=Options(causal=causal)
    )
    actual = harness.check_tensors(
        make_varlen_tensors(case, device), case.options.kwargs(), from_rounded_out=True
    )
    assert (actual["lse"][:, 3:7] == -math.inf).all()
    assert actual["lse"][:, :3].isfinite().all()
    assert actual["lse"][:, 7:].isfinite().all()
    assert not actual["out"][3:7].any()


def test_more_queries_than_keys(device):
    """FI#4452: 66 causal queries over 33 keys in 32 heads: 1056 empty rows, LSE was -49994."""
    case = Case(seqlen_q=66, seqlen_k=33, batch=1, heads_q=32, heads_k=32)
    x = make_tensors(case, device)
    x.v = torch.ones_like(x.v)
    actual = harness.run(x, {"causal": True})
    assert (actual["lse"][:, :, :33] == -math.inf).all()
    assert not actual["out"][:, :33].any()
    assert (actual["out"][:, 33:] == 1).all()
    assert not actual["dq"][:, :33].any()
    partial = flash_attn_func(x.q, x.k, x.v, return_lse=True)
    empty = torch.zeros_like(partial[0]), torch.full_like(partial[1], -math.inf)
    for merged, wanted in zip(merge(*partial, *empty), partial):
        assert torch.equal(merged, wanted)


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"),
    [(2, 0, 64), (2, 64, 0), (0, 64, 64), (2, 0, 0), (0, 0, 0)],
)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_empty_dimensions(device, batch, seqlen_q, seqlen_k, causal):
    """FA PR#2776, PT#174939: Sq = 0, Sk = 0, B = 0, backward included."""
    case = Case(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=2, heads_k=2)
    x = make_tensors(case, device)
    actual = harness.run(x, {"causal": causal}, with_dlse=True)
    assert actual["out"].shape == (batch, seqlen_q, 2, 64)
    assert actual["lse"].shape == (batch, 2, seqlen_q)
    for name, like in (("dq", x.q), ("dk", x.k), ("dv", x.v)):
        assert actual[name].shape == like.shape
        assert not actual[name].any(), name
    assert not actual["out"].any()
    assert (actual["lse"] == -math.inf).all()


def test_two_rows_past_the_last_sequence(device):
    """PT#176793, FA PR#2324: 946 rows for 944 tokens, memory full of NaN: gradients were NaN."""
    case = VarlenCase(
        lengths_q=(144, 288, 512),
        lengths_k=(144, 288, 512),
        heads_q=16,
        heads_k=16,
        tail_q=2,
        tail_k=2,
    )
    if device == "cuda":
        fill_pool_with_nan()
    actual = harness.check(case, device)
    for name in ("out", "dq", "dk", "dv"):
        assert not actual[name][-2:].any(), name


def fill_pool_with_nan():
    """Blocks of every size that the caching allocator hands out again, full of NaN."""
    blocks = [torch.full((2**n,), math.nan, device="cuda") for n in range(7, 25) for _ in range(4)]
    del blocks


def test_padded_rows_after_one_sequence(device):
    """sglang PR#15757: 21 tokens in tensors of 24 rows, the rest NaN, 16 heads over one."""
    case = VarlenCase(
        lengths_q=(21,),
        lengths_k=(21,),
        heads_q=16,
        heads_k=1,
        head_dim=128,
        tail_q=3,
        tail_k=3,
        options=Options(causal=True),
    )
    actual = harness.check_tensors(
        make_varlen_tensors(case, device), case.options.kwargs(), from_rounded_out=True
    )
    assert actual["out"][:21].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_slices_of_a_fused_projection(device, head_dim):
    """FA#2541: q, k, v are slices of one (T, 3 * H * D) matrix; dV was NaN at D = 256."""
    heads = 4
    fused = torch.randn(1, 128, 3 * heads * head_dim, device=device).bfloat16()
    parts = fused.chunk(3, dim=-1)
    views = [part.unflatten(-1, (heads, head_dim)) for part in parts]
    case = Case(head_dim=head_dim, batch=1, heads_q=heads, heads_k=heads)
    x = dataclasses.replace(make_tensors(case, device), q=views[0], k=views[1], v=views[2])
    plain = dataclasses.replace(x, q=x.q.contiguous(), k=x.k.contiguous(), v=x.v.contiguous())
    actual = harness.run(x, {"causal": True})
    for name, value in actual.items():
        assert value.isfinite().all(), name
    harness.assert_bitwise(actual, harness.run(plain, {"causal": True}))


@pytest.mark.parametrize("seqlen_k", [128, 97, 64])
@pytest.mark.parametrize("heads", [1, 2])
def test_scores_far_below_zero(device, seqlen_k, heads):
    """CF#1072: one query, every score lowered by 128, LSE about -122; dK and dV were NaN."""
    case = Case(seqlen_q=1, seqlen_k=seqlen_k, batch=1, heads_q=heads, heads_k=heads)
    x = make_tensors(case, device)
    x.q[..., 0], x.k[..., 0] = -1024.0, 1.0  # -1024 / sqrt(64) = -128
    actual = harness.check_tensors(x, {}, from_rounded_out=True)
    assert (actual["lse"] < -118).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", EVERY_HEAD_DIM)
def test_head_dims_dense_and_as_one_packed_sequence(device, head_dim, packed):
    """FA PR#2896: at S = 512 and d 72 and 104, dQ was wrong; here every multiple of 8."""
    if packed:
        case = VarlenCase(
            lengths_q=(512,), lengths_k=(512,), head_dim=head_dim, heads_q=4, heads_k=4
        )
    else:
        case = Case(head_dim=head_dim, seqlen_q=512, seqlen_k=512, batch=1, heads_q=4, heads_k=4)
    harness.check(case, device)


def test_one_loud_channel_and_correlated_rows(device):
    """TE#3216: GQA 16/2, d 256, batch 2; cos(dQ, reference) was -0.11."""
    case = Case(
        head_dim=256,
        seqlen_q=300,
        seqlen_k=300,
        heads_q=16,
        heads_k=2,
        kind="channel",
        options=Options(causal=True),
    ).on(device)
    x = make_tensors(case, device)
    options = {"causal": True, "deterministic": True}
    actual = harness.run(x, options)
    truth = harness.expected(x, {"causal": True})
    for name in ("out", "dq", "dk", "dv"):
        cosine = torch.cosine_similarity(actual[name].double().flatten(), truth[name].flatten(), 0)
        assert cosine > 0.999, f"{name}: cosine {cosine:.5f}"
    for index in range(case.batch):
        one = slice(index, index + 1)
        single = dataclasses.replace(
            x, q=x.q[one], k=x.k[one], v=x.v[one], dout=x.dout[one], dlse=x.dlse[one]
        )
        wanted = {name: t[one] for name, t in actual.items()}
        harness.assert_same_kernel(device, harness.run(single, options), wanted)


def test_transposed_dout(device):
    """FA#355: GQA 4/1, dO a transposed view; gradients must equal those of its copy."""
    case = Case(head_dim=128, seqlen_q=32, seqlen_k=32, heads_k=1, dtype=torch.float16)
    x = make_tensors(case, device)
    view = heads_first(x.dout)
    assert not view.is_contiguous()
    wanted = harness.run(x, {})
    harness.assert_bitwise(harness.run(dataclasses.replace(x, dout=view), {}), wanted)


def test_fifty_backwards_are_the_same(device):
    """FA#359: B 300, 2048 queries over 128 keys, randn * 3: a race changed dK and dV."""
    case = Case(
        head_dim=128,
        batch=300 if device == "cuda" else 2,
        seqlen_q=2048 if device == "cuda" else 150,
        seqlen_k=128,
        heads_q=1,
        heads_k=1,
        dtype=torch.float16,
        kind="times3",
    )
    x = make_tensors(case, device)
    x.dout = torch.ones_like(x.dout)
    first = harness.check_tensors(x, {}, from_rounded_out=True)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    out = flash_attn_func(*leaves)
    for _ in range(50 if device == "cuda" else 3):
        gradients = torch.autograd.grad(out, leaves, x.dout, retain_graph=True)
        for name, gradient in zip(("dq", "dk", "dv"), gradients):
            assert torch.equal(gradient, first[name]), name


def test_forms_of_causal_at_length(device):
    """FA#1133: causal, window (-1, 0), (S, 0) and (S - 1, 0) are one mask: the same bits."""
    seqlen = 16384 if device == "cuda" else 200
    case = Case(
        head_dim=128, seqlen_q=seqlen, seqlen_k=seqlen, batch=1, heads_q=8, heads_k=8,
        dtype=torch.float16,
    )  # fmt: skip
    x = make_tensors(case, device)
    wanted = flash_attn_func(x.q, x.k, x.v, causal=True)
    for left in (-1, seqlen, seqlen - 1):
        assert torch.equal(flash_attn_func(x.q, x.k, x.v, window_size=(left, 0)), wanted), left


def test_negative_window_raises(device):
    """FA#1116: window (-1, -3) was taken; it has no meaning."""
    x = make_tensors(Case(seqlen_q=20, seqlen_k=20), device)
    with pytest.raises((RuntimeError, ValueError), match="window"):
        flash_attn_func(x.q, x.k, x.v, window_size=(-1, -3))


def test_a_window_counts_its_own_end(device):
    """TE#1197, HF#39408: window (1024, 0) is 1025 keys; k = 0 and v = j give their mean."""
    seqlen, heads = (2048, 64) if device == "cuda" else (1300, 1)
    shape = (1, seqlen, heads, 64)
    q = torch.randn(shape, device=device).half()
    k = torch.zeros(shape, dtype=torch.float16, device=device)
    j = torch.arange(seqlen, device=device)
    v = torch.zeros(shape, dtype=torch.float16, device=device)
    v[..., 0] = (j % 128 == 0).half()[:, None]  # the weight of every 128th key
    out = flash_attn_func(q, k, v, window_size=(1024, 0))[0, :, :, 0].double()
    count = (j + 1).clamp(max=1025)
    first = (j - 1024).clamp(min=0)
    marked = j // 128 - (first + 127) // 128 + 1
    wanted = marked.double() / count.double()
    assert torch.allclose(out, wanted[:, None].expand_as(out), rtol=1e-3, atol=1e-6)


def test_gradient_through_the_lse(device):
    """FA#889: loss = mean(lse^2) * 1e-3 + sum(out * g); rows without a key add nothing."""
    case = Case(seqlen_q=150, seqlen_k=100, options=Options(causal=True)).on(device)
    x = make_tensors(case, device)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    seen = lse > -math.inf
    assert not seen.all()
    loss = torch.where(seen, lse, 0).square().mean() * 1e-3 + (out * x.dout).sum()
    gradients = torch.autograd.grad(loss, leaves)
    x.dlse = torch.where(seen, 2e-3 / lse.numel() * lse, 0).detach()
    truth = harness.expected(x, {"causal": True}, with_dlse=True)
    actual = dict(zip(("dq", "dk", "dv"), gradients))
    compare.assert_accurate(actual, truth, dtype=x.q.dtype, dout=x.dout, v=x.v)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_the_other_gpu():
    """FI#452, FA PR#1793: tensors on cuda:1 while cuda:0 is current: same bits, no switch."""
    case = Case(seqlen_q=150, seqlen_k=150, options=Options(causal=True))
    x = make_tensors(case, "cuda:0")
    wanted = harness.run(x, {"causal": True})
    other = dataclasses.replace(
        x, **{name: getattr(x, name).to("cuda:1") for name in ("q", "k", "v", "dout", "dlse")}
    )
    torch.cuda.set_device(0)
    actual = harness.run(other, {"causal": True})
    assert torch.cuda.current_device() == 0
    for name, value in actual.items():
        assert value.device == torch.device("cuda:1")
        assert torch.equal(value.to("cuda:0"), wanted[name]), name


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
def test_packed_equals_dense_with_two_layouts(device, dtype):
    """FA#1391: (B, S, H, D) read as (B, H, S, D) gives a wrong result; equal sizes hide nothing."""
    case = Case(seqlen_q=8, seqlen_k=8, heads_q=8, heads_k=8, dtype=dtype)
    x = make_tensors(case, device)
    right = flash_attn_func(x.q, x.k, x.v)
    swapped = flash_attn_func(*(t.transpose(1, 2) for t in (x.q, x.k, x.v))).transpose(1, 2)
    assert not torch.allclose(right, swapped, atol=1e-2)
    lengths = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    packed = flash_attn_varlen_func(
        *(t.flatten(0, 1) for t in (x.q, x.k, x.v)), lengths, lengths, 8, 8
    )
    harness.assert_same_kernel(device, {"out": packed.view_as(right)}, {"out": right})
