"""Runs a case through the public functions and holds the results to the accuracy rule."""

import compare
import pytest
import reference
import torch
from cases import Case, Tensors, VarlenCase, make_tensors, make_varlen_tensors

import flashattn_ext

RESULTS = ("out", "lse", "dq", "dk", "dv")


def portable(device: str) -> str:
    """The family of `device` that runs every layout."""
    return "sm80" if device == "cuda" else "spec"


def inputs_of(case: Case | VarlenCase, device: str) -> Tensors:
    """Random inputs of a dense or packed case."""
    make = make_tensors if isinstance(case, Case) else make_varlen_tensors
    return make(case, device)


def attend(x: Tensors, options: dict, plan: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the public function that fits `x`."""
    call = flashattn_ext.flash_attn_varlen_func if x.lengths else flashattn_ext.flash_attn_func
    return call(x.q, x.k, x.v, **x.lengths, **options, return_lse=True, plan=plan)


def run(
    x: Tensors, options: dict, plan: str | None = None, *, with_dlse: bool = False
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of one forward and backward."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    inputs = Tensors(*leaves, x.dout, x.dlse, x.lengths)
    out, lse = attend(inputs, options, plan)
    roots, seeds = ([out, lse], [x.dout, x.dlse]) if with_dlse else ([out], [x.dout])
    gradients = torch.autograd.grad(roots, leaves, seeds)
    return dict(zip(RESULTS, (out.detach(), lse.detach(), *gradients)))


def expected(
    x: Tensors,
    options: dict,
    *,
    same_dtype: bool = False,
    with_dlse: bool = False,
    out: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The same from the dense reference: fp64, or in the inputs' type.

    `out` given: the exact gradients for a backward that starts from this rounded out.
    """
    dlse = x.dlse if with_dlse else None
    if out is not None:
        shift = reference.dlse_of_stored_out(expected(x, options)["out"], out, x.dout)
        dlse = shift if dlse is None else dlse + shift
    options = {**options, "same_dtype": same_dtype}
    if not x.lengths:
        return reference.run(x.q, x.k, x.v, x.dout, dlse, **options)
    lengths = {name: t for name, t in x.lengths.items() if not name.startswith("max_")}
    return reference.run_varlen(x.q, x.k, x.v, dout=x.dout, dlse=dlse, **lengths, **options)


def check_tensors(
    x: Tensors,
    options: dict,
    plan: str | None = None,
    *,
    with_dlse: bool = False,
    from_rounded_out: bool = False,
) -> dict[str, torch.Tensor]:
    """Holds one forward and backward to the accuracy rule; returns its results."""
    actual = run(x, options, plan, with_dlse=with_dlse)
    check_results(actual, x, options, with_dlse=with_dlse, from_rounded_out=from_rounded_out)
    return actual


def check_results(
    actual: dict[str, torch.Tensor],
    x: Tensors,
    options: dict,
    *,
    with_dlse: bool = False,
    from_rounded_out: bool = False,
) -> None:
    """Holds results to the accuracy rule.

    `from_rounded_out` compares gradients with those of `expected(out=...)`: for inputs so extreme
    that the rounding of out alone moves dq and dk by more than the rule allows.
    """
    out = actual["out"] if from_rounded_out else None
    compare.assert_accurate(
        actual,
        expected(x, options, with_dlse=with_dlse, out=out),
        expected(x, options, with_dlse=with_dlse, same_dtype=True),
        dtype=x.q.dtype,
        dout=torch.nan_to_num(x.dout),
        v=torch.nan_to_num(x.v),
    )


def skip_what_the_family_refuses(x: Tensors, options: dict, plan: str | None) -> None:
    """Skips, with the family's own sentence, a backward that plan "sm90_fused" does not run.

    What that plan must run is asserted in test_plan_fused.py; the other families run every case.
    """
    if plan != "sm90_fused":
        return
    error = flashattn_ext.explain(
        x.q, x.k, x.v, **x.lengths, **options, plan=plan, backward=True
    ).error
    if error is not None:
        pytest.skip(error)


def check(
    case: Case | VarlenCase, device: str, plan: str | None = None, *, with_dlse: bool = False
) -> dict[str, torch.Tensor]:
    """`check_tensors` of a case at the size that `device` runs; skips what `plan` refuses."""
    case = case.on(device)
    x, options = inputs_of(case, device), case.options.kwargs()
    skip_what_the_family_refuses(x, options, plan)
    return check_tensors(
        x,
        options,
        plan,
        with_dlse=with_dlse,
        from_rounded_out=moved_by_rounding(case),
    )


def moved_by_rounding(case: Case | VarlenCase) -> bool:
    """Whether the rounding of out moves a gradient by more than the rule allows."""
    return case.kind == "times3" or keys_per_row(case) < 16


def keys_per_row(case: Case | VarlenCase) -> float:
    """Visible keys of a row, on average. With few of them the terms of dq nearly cancel."""
    pairs = rows = 0
    for seqlen_q, seqlen_k in case.sequences:
        visible, _ = reference.visible_pairs(
            seqlen_q, seqlen_k, case.options.causal, case.options.window_size
        )
        pairs += int(visible.sum())
        rows += seqlen_q
    return pairs / max(rows, 1)


def assert_bitwise(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal bit for bit, NaN and the sign of zero included."""
    for name, value in actual.items():
        other = wanted[name]
        assert value.shape == other.shape, f"{name}: {value.shape} and {other.shape}"
        same = value.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)
        assert same.all(), (
            f"{name}: {int((value != other).sum())} of {value.numel()} values differ, largest "
            f"difference {(value.double() - other.double()).abs().max().item():.3e}"
        )


def assert_same_kernel(
    device: str, actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> None:
    """Two forms of one problem: the same bits from the same CUDA plan, rounding on the CPU.

    The CPU path's matrix products belong to torch, which blocks different shapes differently.
    """
    if device == "cuda":
        assert_bitwise(actual, wanted)
        return
    for name, value in actual.items():
        relative = compare.RELATIVE[value.dtype]
        torch.testing.assert_close(value, wanted[name], rtol=4 * relative, atol=4 * relative)
