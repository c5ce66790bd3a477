"""The accuracy rule, as one assertion.

Against an fp64 reference on the same rounded inputs:
1. relative Frobenius error of out and of each gradient within `RELATIVE[dtype]`;
2. largest absolute error at most twice that of a same-dtype unfused computation, plus 1e-5;
3. LSE within 2e-5 + 1e-6 * |LSE|.
What is zero by absence (a row or key without a partner, a tail) is exactly zero and its LSE is -inf
(or the sink); what is zero by cancellation is within 1e-5 * |dO| * |V|. Nothing is NaN where the
reference is finite.
"""

import math

import torch

RELATIVE = {
    torch.bfloat16: 3.5e-3,
    torch.float16: 4.5e-4,
    torch.float32: 1e-5,
    torch.float64: 1e-10,
}
# Results compared by criteria 1 and 2; the others in a result dict are lse and the seen masks.
TENSORS = ("out", "dq", "dk", "dv", "dbias", "dkey_bias", "dalibi_slopes", "drel_bias", "dsink")
# Zero by absence follows from the row (query side) or from the key.
ABSENT = {"out": "rows_seen", "dq": "rows_seen", "dk": "keys_seen", "dv": "keys_seen"}


def assert_accurate(actual, reference, unfused=None, *, dtype, dout=None, v=None):
    """Checks every tensor of `actual` against the fp64 `reference`.

    actual:    dict of results: any of out, lse, dq, dk, dv, dbias, dkey_bias, dalibi_slopes,
               drel_bias, dsink. Everything in it must be in `reference`.
    reference: `reference.run(...)` or `reference.run_varlen(...)` of the same inputs.
    unfused:   the same with `same_dtype=True`; None leaves criterion 2 out.
    dtype:     type of q, k and v.
    dout, v:   the incoming gradient and the values: they set the size of a zero by cancellation.
    """
    cancellation = 0.0
    if dout is not None and v is not None and dout.numel() and v.numel():
        cancellation = 1e-5 * longest_row(dout) * longest_row(v)
    for name, value in actual.items():
        if name == "lse":
            assert_lse(value, reference)
        elif name in TENSORS:
            baseline = None if unfused is None else unfused[name]
            assert_tensor(name, value, reference, baseline, RELATIVE[dtype], cancellation)
        else:
            raise KeyError(f"assert_accurate has no rule for '{name}'; known: lse, {TENSORS}")


def longest_row(x):
    return x.detach().double().norm(dim=-1).max().item()


def assert_tensor(name, value, reference, baseline, relative, cancellation):
    """Criteria 1 and 2 and the exact zeros for one tensor."""
    expected = reference[name]
    assert value.shape == expected.shape, (
        f"{name}: shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
    )
    value = value.detach().to(expected.device, torch.float64)
    if not value.numel():
        return
    assert_finite(name, value, expected)
    if name in ABSENT:
        absent = ~reference[ABSENT[name]]
        stray = value[absent]
        assert not stray.any(), (
            f"{name}: {int((stray != 0).sum())} values that must be exactly 0 by absence are not; "
            f"largest {stray.abs().max().item():.3e}"
        )
    error = (value - expected).abs()
    if expected.abs().max().item() <= cancellation:
        assert error.max().item() <= cancellation, report(
            name, value, expected, error, f"zero by cancellation within {cancellation:.3e}"
        )
        return
    size = expected.norm().item()
    ratio = error.norm().item() / size if size else math.inf * bool(error.any())
    # 0/0 is 0: a reference of exact zeros is met by exact zeros only.
    ratio = 0.0 if math.isnan(ratio) else ratio
    assert ratio <= relative, report(
        name, value, expected, error, f"relative Frobenius error {ratio:.3e}, allowed {relative}"
    )
    if baseline is not None:
        eager = (baseline.detach().to(expected.device, torch.float64) - expected).abs().max().item()
        allowed = 2 * eager + 1e-5
        assert error.max().item() <= allowed, report(
            name,
            value,
            expected,
            error,
            f"largest error above {allowed:.3e} = 2 * {eager:.3e} + 1e-5",
        )


def assert_lse(value, reference):
    """Criterion 3; -inf exactly where the reference has it."""
    expected = reference["lse"]
    assert value.shape == expected.shape, (
        f"lse: shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
    )
    value = value.detach().to(expected.device, torch.float64)
    expected = expected.double()
    empty = expected == -math.inf
    assert torch.equal(value == -math.inf, empty), (
        f"lse: -inf in {int((value == -math.inf).sum())} rows, expected {int(empty.sum())}"
    )
    value, expected = value[~empty], expected[~empty]
    error = (value - expected).abs()
    ok = error <= 2e-5 + 1e-6 * expected.abs()
    assert ok.all(), report("lse", value, expected, error, "more than 2e-5 + 1e-6 * |lse| off")


def assert_finite(name, value, expected):
    bad = ~value.isfinite() & expected.isfinite()
    assert not bad.any(), (
        f"{name}: {int(bad.sum())} of {value.numel()} values are NaN or inf where the reference is "
        f"finite, first at {tuple(bad.nonzero()[0].tolist())}"
    )


def report(name, value, expected, error, what):
    """The message of a failed check: what, and the worst element."""
    index = tuple(int(x) for x in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"{name}: {what}; worst at {index}: got {value[index].item():.6e}, "
        f"expected {expected[index].item():.6e}"
    )
