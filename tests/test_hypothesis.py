"""Properties over random problems: any shape, window, length and layout against the reference.

`HYPOTHESIS_PROFILE=search` looks for new examples instead of repeating the same ones.
"""

import dataclasses

import harness
import pytest
import torch
from cases import HALF_TYPES, Case, Options, VarlenCase, make_tensors, make_varlen_tensors

from flashattn_ext import flash_attn_func, merge

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies

# The fixtures only seed torch and fill its empty tensors: nothing an example could leave dirty.
PROPERTY = hypothesis.settings(
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)

SEQLEN = st.one_of(
    st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129]), st.integers(min_value=0, max_value=200)
)
HEAD_DIM = st.integers(min_value=1, max_value=32).map(lambda n: 8 * n)
WINDOW_SIDE = st.one_of(
    st.just(-1), st.sampled_from([0, 1, 63, 64, 65]), st.integers(min_value=0, max_value=220)
)


@st.composite
def options(draw):
    return Options(
        causal=draw(st.sampled_from([False, True, "top_left"])),
        window_size=(draw(WINDOW_SIDE), draw(WINDOW_SIDE)),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0, 30.0])),
        softmax_scale=draw(st.sampled_from([None, None, 0.05, 0.2])),
    )


@st.composite
def heads(draw):
    heads_k = draw(st.integers(min_value=1, max_value=3))
    return heads_k * draw(st.sampled_from([1, 1, 2, 3, 5])), heads_k


@st.composite
def dense_cases(draw):
    heads_q, heads_k = draw(heads())
    return Case(
        head_dim=draw(HEAD_DIM),
        head_dim_v=draw(st.one_of(st.none(), HEAD_DIM)),
        seqlen_q=draw(SEQLEN),
        seqlen_k=draw(SEQLEN),
        batch=draw(st.integers(min_value=0, max_value=2)),
        heads_q=heads_q,
        heads_k=heads_k,
        dtype=draw(st.sampled_from(HALF_TYPES)),
        options=draw(options()),
    )


@st.composite
def varlen_cases(draw):
    heads_q, heads_k = draw(heads())
    lengths = draw(st.lists(st.tuples(SEQLEN, SEQLEN), max_size=4))
    lengths_q, lengths_k = tuple(q for q, _ in lengths), tuple(k for _, k in lengths)

    def used(of):
        parts = st.tuples(*(st.integers(min_value=0, max_value=n) for n in of))
        return draw(st.one_of(st.none(), parts))

    return VarlenCase(
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        head_dim=draw(HEAD_DIM),
        head_dim_v=draw(st.one_of(st.none(), HEAD_DIM)),
        heads_q=heads_q,
        heads_k=heads_k,
        dtype=draw(st.sampled_from(HALF_TYPES)),
        tail_q=draw(st.sampled_from([0, 1, 70])),
        tail_k=draw(st.sampled_from([0, 1, 70])),
        seqused_q=used(lengths_q),
        seqused_k=used(lengths_k),
        options=draw(options()),
    )


def check(x, case):
    """The accuracy rule from the rounded out: rows of any few keys occur here."""
    harness.check_tensors(x, case.options.kwargs(), with_dlse=True, from_rounded_out=True)


@PROPERTY
@hypothesis.given(case=dense_cases(), seed=st.integers(min_value=0, max_value=2**31))
def test_dense(device, case, seed):
    torch.manual_seed(seed)
    check(make_tensors(case, device), case)


@PROPERTY
@hypothesis.given(case=varlen_cases(), seed=st.integers(min_value=0, max_value=2**31))
def test_varlen(device, case, seed):
    torch.manual_seed(seed)
    check(make_varlen_tensors(case, device), case)


@st.composite
def layouts(draw):
    """A way to lay (B, S, H, D) out: an order of the first three dimensions, gaps, an offset."""
    order = draw(st.permutations([0, 1, 2]))
    gaps = [draw(st.sampled_from([0, 1, 8])) for _ in range(3)]
    return order, draw(st.sampled_from([0, 1, 8, 16])), gaps, draw(st.sampled_from([0, 1, 8]))


def laid_out(t, layout):
    """`t`'s values in a NaN-filled storage: dims in `order`, rows padded, gaps between dims."""
    order, row_gap, gaps, offset = layout
    strides = [0, 0, 0, 1]
    step = t.shape[3] + row_gap
    for dim in reversed(order):
        strides[dim] = step
        step = step * max(t.shape[dim], 1) + gaps[dim]
    storage = torch.full((step + offset,), torch.nan, dtype=t.dtype, device=t.device)
    return storage[offset:].as_strided(t.shape, strides, offset).copy_(t)


@PROPERTY
@hypothesis.given(
    case=dense_cases(), of_each=st.tuples(*[layouts()] * 4), expand=st.sampled_from(["", "k", "v"])
)
def test_layouts_change_no_bit(device, case, of_each, expand):
    x = make_tensors(case, device)
    if expand and case.batch == 2:
        plain = getattr(x, expand)
        setattr(x, expand, plain[:1].expand_as(plain).contiguous())
    # An input with a stride of 0 is not for every kernel: its run and the plain one take the same.
    plan = harness.portable(device) if expand and case.batch == 2 else None
    wanted = harness.run(x, case.options.kwargs(), plan)
    names = ("q", "k", "v", "dout")
    changes = {n: laid_out(getattr(x, n), layout) for n, layout in zip(names, of_each)}
    if expand and case.batch == 2:
        changes[expand] = changes[expand][:1].expand_as(changes[expand])
    view = dataclasses.replace(x, **changes)
    harness.assert_bitwise(harness.run(view, case.options.kwargs(), plan), wanted)


@PROPERTY
@hypothesis.given(case=dense_cases(), cut=st.floats(min_value=0, max_value=1))
def test_merge_of_any_cut(device, case, cut):
    """Keys cut in two anywhere, also at an end: merged, the halves are the whole."""
    case = dataclasses.replace(case, options=Options())
    x = make_tensors(case, device)
    at = round(cut * case.seqlen_k)
    parts = [
        flash_attn_func(x.q, x.k[:, part], x.v[:, part], return_lse=True)
        for part in (slice(0, at), slice(at, None))
    ]
    out, lse = merge(*parts[0], *parts[1])
    whole_out, whole_lse = flash_attn_func(x.q, x.k, x.v, return_lse=True)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[case.dtype]
    torch.testing.assert_close(out, whole_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=2e-5)
    if at in (0, case.seqlen_k):
        assert torch.equal(out, whole_out)
        assert torch.equal(lse, whole_lse)


@PROPERTY
@hypothesis.given(
    case=dense_cases(), extra=st.sampled_from([0, 1, 1000]), causal=st.sampled_from([False, True])
)
def test_windows_that_hide_nothing(device, case, extra, causal):
    """A side as long as the sequences is no window at all, bit for bit."""
    x = make_tensors(case, device)
    reach = max(case.seqlen_q, case.seqlen_k) + extra
    wanted = harness.run(x, {"causal": causal})
    for window_size in ((reach, -1), (-1, reach), (reach, reach)):
        actual = harness.run(x, {"causal": causal, "window_size": window_size})
        harness.assert_bitwise(actual, wanted)
