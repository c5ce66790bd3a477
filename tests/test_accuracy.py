"""Accuracy at lengths where many tiles meet, held also to what an unfused computation reaches.

The rule of `compare` is an upper bound. A fused kernel keeps its scores in fp32, so it must also
be no less accurate than PyTorch's unfused attention in the same type, out and every gradient.
"""

import harness
import pytest
import torch
from cases import HALF_TYPES, Case, Options, VarlenCase, make_tensors, type_name


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_no_less_accurate_than_unfused(device, head_dim, causal, dtype):
    case = Case(
        head_dim=head_dim,
        seqlen_q=1500,
        seqlen_k=2000,
        batch=1,
        heads_q=2,
        heads_k=1,
        dtype=dtype,
        options=Options(causal=causal),
    ).on(device)
    x = make_tensors(case, device)
    options = case.options.kwargs()
    actual = harness.check_tensors(x, options)
    truth, unfused = harness.expected(x, options), harness.expected(x, options, same_dtype=True)
    for name in ("out", "dq", "dk", "dv"):
        ours = (actual[name].double() - truth[name]).norm().item()
        theirs = (unfused[name].double() - truth[name]).norm().item()
        assert ours <= theirs, f"{name}: error {ours:.3e}, unfused {theirs:.3e}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_errors_have_no_drift(device, head_dim):
    """Rounding errors average out; truncation or a lost key would leave a mean."""
    case = Case(head_dim=head_dim, seqlen_q=1024, seqlen_k=1024, heads_q=4, heads_k=4).on(device)
    x = make_tensors(case, device)
    x.v = (x.v.float().abs() + 0.5).to(x.v.dtype)  # all of one sign, so that a bias adds up
    actual = harness.run(x, {})["out"].double()
    truth = harness.expected(x, {})["out"]
    drift = ((actual - truth) / truth).mean().abs().item()
    assert drift < 1e-4, f"mean relative error {drift:.2e}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_packed_sequences(device, head_dim):
    case = VarlenCase(
        lengths_q=(1100, 1, 700),
        lengths_k=(1300, 900, 700),
        head_dim=head_dim,
        tail_q=100,
        tail_k=100,
        options=Options(causal=True),
    )
    harness.check(case, device, with_dlse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_four_thousand_tokens(head_dim):
    case = Case(
        head_dim=head_dim,
        seqlen_q=4096,
        seqlen_k=4096,
        batch=1,
        heads_q=2,
        heads_k=2,
        options=Options(causal=True),
    )
    harness.check(case, "cuda")
    torch.cuda.empty_cache()
