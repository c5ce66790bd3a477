"""The benchmark code where there is no GPU: formula, problems, checks, what is timed."""

import dataclasses
import math
import sys

import pytest
import reference
import torch
import torch._functorch.config

from benchmarks import (
    baselines,
    bench_attention,
    bench_growth,
    bench_memory,
    bench_overhead,
    bench_training,
    comparison,
    flops,
    problems,
    records,
    timing,
)
from benchmarks.baselines import IMPLEMENTATIONS, Unavailable
from examples import train_gpt


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal", "window"),
    [
        (5, 8, False, (-1, -1)),
        (5, 8, True, (-1, -1)),
        (8, 5, True, (-1, -1)),
        (9, 9, False, (2, 3)),
        (9, 9, True, (2, -1)),
        (7, 12, False, (0, 0)),
        (7, 7, False, (100, 100)),
    ],
)
def test_visible_pairs_counts_the_mask(seqlen_q, seqlen_k, causal, window):
    visible, _ = reference.visible_pairs(seqlen_q, seqlen_k, causal, window)
    assert flops.visible_pairs(seqlen_q, seqlen_k, causal, window) == visible.sum()


def test_flops_formula():
    assert flops.visible_pairs(64, 64, causal=True) == 64 * 64 / 2
    assert flops.forward_flops(2, 3, 100.0, 64) == 4 * 2 * 3 * 100 * 64
    assert flops.forward_flops(1, 1, 100.0, 64, 128) == 2 * 100 * (64 + 128)
    problem = problems.dense(64, 512, False, batch=2, heads_q=3, heads_k=3)
    assert problem.forward_flops == 4 * 2 * 3 * 512 * 512 * 64
    assert problem.backward_flops == 10 * 2 * 3 * 512 * 512 * 64
    assert flops.tflops(2e12, 1000.0) == 2.0


def test_training_shapes():
    cells = bench_attention.suite(["dense"])
    assert len(cells) == 3 * 6 * 2
    for problem in cells:
        assert problem.batch * problem.seqlen_q == 16384
        assert problem.heads_q * problem.head_dim == 2048
    quick = bench_attention.suite(quick=True)
    assert {problem.seqlen_q for problem in quick if problem.case == "dense"} == {1024, 4096}
    assert {problem.case for problem in quick} == set(bench_attention.DEFAULT_CASES)
    fp16 = bench_attention.suite(["fp16"], head_dims=(64,), seqlens=(2048,))
    assert [(p.case, p.dtype, p.causal) for p in fp16] == [
        ("dense", torch.float16, False),
        ("dense", torch.float16, True),
    ]


def test_case_names_are_the_records():
    for name, make in problems.CASES.items():
        twins = {"mha_32_32"} if name == "gqa_32_8" else set()
        assert {problem.case for problem in make()} == {name} | twins


def test_windows_are_counted_on_visible_work():
    (problem,) = problems.CASES["window_1024"]()
    pairs = 1024 * 1025 / 2 + (16384 - 1024) * 1024
    assert problem.forward_flops == 4 * 16 * pairs * 128


def test_shapes_of_the_other_cases():
    grouped = problems.CASES["gqa_32_8"]()
    for gqa, mha in zip(grouped[::2], grouped[1::2], strict=True):
        assert dataclasses.replace(gqa, case="mha_32_32", heads_k=32) == mha
        assert (gqa.heads_q, gqa.heads_k) == (32, 8)
    for mla in problems.CASES["mla_192_128"]():
        assert (mla.head_dim, mla.head_dim_v, mla.causal) == (192, 128, True)
    (long,) = problems.CASES["tokens_18000"]()
    assert (long.batch, long.seqlen_q, long.heads_q, long.head_dim) == (1, 18000, 8, 128)
    for problem in problems.CASES["varlen_8x2k"]():
        assert problem.lengths == (2048,) * 8
        assert problem.forward_flops == problems.dense(problem.head_dim, 2048, True).forward_flops


def test_the_long_tail_is_the_same_draw_everywhere():
    lengths = problems.VARLEN_LENGTHS["longtail"]
    assert lengths == problems.long_tailed_lengths()
    assert (len(lengths), sum(lengths), min(lengths), max(lengths)) == (16, 16384, 83, 3675)


def assert_slice_of(truth, part):
    """`part` is the last head of the first batch entry of a dense reference's results."""
    for name, value in zip(("out", "dq", "dk", "dv"), part):
        torch.testing.assert_close(value, truth[name][0, :, -1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("window", [(-1, -1), (30, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_slice_reference_is_the_dense_reference(causal, window):
    problem = problems.dense(32, 70, causal, batch=2, heads_q=3, heads_k=3, window=window)
    inputs = problems.make_inputs(problem, "cpu")
    detached = inputs.detached()
    truth = reference.run(
        detached.q, detached.k, detached.v, inputs.dout, causal=causal, window_size=window
    )
    assert_slice_of(truth, problems.reference_slice(problem, inputs))


@pytest.mark.parametrize("changes", [{"heads_k": 2, "head_dim_v": 24}, {"window": (13, 0)}])
def test_slice_reference_with_grouped_heads_and_causal_windows(changes):
    problem = problems.dense(32, 70, True, **{"batch": 1, "heads_q": 6, "heads_k": 6, **changes})
    inputs = problems.make_inputs(problem, "cpu")
    x = inputs.detached()
    truth = reference.run(x.q, x.k, x.v, x.dout, causal=True, window_size=problem.window)
    assert_slice_of(truth, problems.reference_slice(problem, inputs))


def test_slice_reference_is_of_the_longest_sequence():
    problem = problems.dense(32, 50, True, lengths=(7, 50, 13), batch=3, heads_q=2, heads_k=2)
    inputs = problems.make_inputs(problem, "cpu")
    q, k, v, dout = (t[None, 7:57] for t in (*inputs.detached().leaves, inputs.dout))
    truth = reference.run(q, k, v, dout, causal=True)
    assert_slice_of(truth, problems.reference_slice(problem, inputs))
    assert problems.relative_error(problem, inputs.q, inputs.q[7:57, -1].double()) == 0


def shrunk(problem):
    """The same kind of problem, small enough for a CPU."""
    lengths = tuple(1 + n // 64 for n in problem.lengths)
    seqlen = max(lengths) if lengths else 70
    return dataclasses.replace(
        problem,
        batch=len(lengths) or 1,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        heads_q=problem.heads_q // 8,
        heads_k=problem.heads_k // 8,
        lengths=lengths,
        window=(13, 0) if problem.window != (-1, -1) else problem.window,
    )


SMALL_CASES = [shrunk(make()[-1]) for make in problems.CASES.values()]
SMALL_CASES += [shrunk(problems.CASES["gqa_32_8"]()[0])]
SMALL_CASES += [shrunk(bench_attention.suite(["fp16"], head_dims=(64,))[-1])]


@pytest.mark.parametrize("ops", [("fwd",), ("fwd", "bwd")], ids="-".join)
@pytest.mark.parametrize("problem", SMALL_CASES, ids=lambda p: f"{p.case}-{p.dtype}")
def test_every_case_is_checked_and_runs(problem, ops):
    inputs = problems.make_inputs(problem, "cpu")
    # What SDPA FLASH does not take: packed sequences, windows, a narrower V.
    refuses = problem.lengths or problem.window != (-1, -1) or problem.case == "mla_192_128"
    impls = ("flashattn_ext", "sdpa_flash")
    candidates = list(bench_attention.candidates_for(problem, inputs, impls, ops=ops))
    assert [candidate.name for candidate in candidates] == list(impls[: 1 if refuses else 2])
    for candidate in candidates:
        assert candidate.errors.keys() == set(ops)
        assert 0 < max(candidate.errors.values()) < problems.BASELINE_ERROR_LIMIT
        for op in ops:
            candidate.call(op)()


@pytest.fixture
def call_once(monkeypatch):
    """Calls each candidate once in the place of timing it; there is no GPU whose time to take."""

    def time_alternating(candidates, **_):
        for call in candidates.values():
            call()
        return {name: timing.Timing.of([1.0]) for name in candidates}

    def wall_alternating(candidates, **_):
        return dict.fromkeys(time_alternating(candidates), 1.0)

    monkeypatch.setattr(timing, "time_alternating", time_alternating)
    monkeypatch.setattr(timing, "wall_alternating", wall_alternating)


SMALL = problems.dense(32, 70, True, batch=1, heads_q=2, heads_k=2)


def test_a_plan_that_launches_the_same_is_not_timed_twice(call_once):
    lines = bench_attention.measure(
        SMALL, ("flashattn_ext", "sdpa_flash"), plans=("default", "spec"), device="cpu"
    )
    assert [(line["op"], line["impl"], line["asked_plan"]) for line in lines] == [
        ("fwd", "flashattn_ext", "default"),
        ("fwd", "sdpa_flash", ""),
        ("bwd", "flashattn_ext", "default"),
        ("bwd", "sdpa_flash", ""),
    ]


def test_the_deterministic_form_is_timed_where_it_launches_something_else(call_once, monkeypatch):
    """By its own name among the plans; a forward launches what the default does."""

    def plan_of(problem, inputs, op, asked):
        assert asked in ({}, {"deterministic": True})
        return "sm90_fused", f"{len(asked) if op == 'bwd' else 0}"

    monkeypatch.setattr(bench_attention, "_plan_of", plan_of)
    lines = bench_attention.measure(
        SMALL, ("flashattn_ext",), plans=("default", "deterministic"), device="cpu"
    )
    assert [(line["op"], line["asked_plan"], line["deterministic"]) for line in lines] == [
        ("fwd", "default", False),
        ("bwd", "default", False),
        ("bwd", "deterministic", True),
    ]


def test_two_families_in_one_run(call_once, monkeypatch, capsys):
    families = {(None, "fwd"): "sm90", ("spec", "fwd"): "sm80"}  # "spec" stands for a forced family

    def plan_of(problem, inputs, op, asked):
        family = families.get((asked.get("plan"), op), "sm80")
        return family, f"{family} {op}"

    monkeypatch.setattr(bench_attention, "_plan_of", plan_of)
    lines = bench_attention.run(
        [SMALL], ("flashattn_ext", "sdpa_flash"), plans=("default", "spec"), device="cpu"
    )
    ours = [line for line in lines if line["impl"] == "flashattn_ext"]
    assert [(line["op"], line["family"], line["asked_plan"]) for line in ours] == [
        ("fwd", "sm90", "default"),
        ("fwd", "sm80", "spec"),
        ("bwd", "sm80", "default"),
    ]
    for line in lines:
        assert records.REQUIRED_FIELDS["bench"] <= line.keys()
    printed = capsys.readouterr().out
    assert "flashattn_ext:spec" in printed
    assert "best baseline" in printed


def test_a_spent_budget_leaves_cells_out(capsys):
    assert bench_attention.run([SMALL, SMALL], ("flashattn_ext",), budget_s=-1) == []
    assert "2 cells left out" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["flashattn_ext", "sdpa_flash"])
@pytest.mark.parametrize("causal", [False, True])
def test_candidates_are_checked_before_they_are_timed(name, causal):
    problem = problems.dense(32, 70, causal, batch=2, heads_q=3, heads_k=3)
    inputs = problems.make_inputs(problem, "cpu")
    (candidate,) = bench_attention.candidates_for(problem, inputs, (name,))
    assert 0 < max(candidate.errors.values()) < problems.BASELINE_ERROR_LIMIT
    for op in ("fwd", "bwd"):
        candidate.call(op)()


def test_a_wrong_candidate_is_not_timed(monkeypatch):
    inputs = problems.make_inputs(SMALL, "cpu")
    full = dataclasses.replace(SMALL, causal=False)
    sdpa = IMPLEMENTATIONS["sdpa_flash"]
    wrong = dataclasses.replace(sdpa, make=lambda _: sdpa.make(full))
    monkeypatch.setitem(IMPLEMENTATIONS, "sdpa_flash", wrong)
    assert not list(bench_attention.candidates_for(SMALL, inputs, ("sdpa_flash",)))
    right = IMPLEMENTATIONS["flashattn_ext"]
    ours = dataclasses.replace(right, make=lambda _: right.make(full))
    monkeypatch.setitem(IMPLEMENTATIONS, "flashattn_ext", ours)
    with pytest.raises(AssertionError, match="relative errors"):
        list(bench_attention.candidates_for(SMALL, inputs, ("flashattn_ext",)))


def test_missing_packages_are_unavailable(monkeypatch):
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    problem = problems.dense(64, 512, False)
    for name in ("fa2", "fa3", "fa4"):
        with pytest.raises(Unavailable, match="not importable"):
            IMPLEMENTATIONS[name].make(problem)
    with pytest.raises(Unavailable, match="no varlen form"):
        IMPLEMENTATIONS["sdpa_flash"].make(problems.varlen(64, True, "mixed"))


@torch._functorch.config.patch(donated_buffer=True)  # torch's default; undone behind the test
def test_a_compiled_baseline_can_be_checked_and_then_timed():
    """The check runs the backward once and lets the graph go; timing keeps it for many runs."""
    torch._dynamo.reset()
    baselines.keep_backward_buffers()

    @torch.compile(backend="aot_eager")
    def attend(q, k):
        return (q @ k.mT).softmax(-1) @ k.sin()

    leaves = [torch.randn(8, 4, requires_grad=True) for _ in "qk"]
    torch.autograd.grad(attend(*leaves).sum(), leaves)
    out = attend(*leaves)
    for _ in range(2):
        torch.autograd.grad(out.sum(), leaves, retain_graph=True)


def test_varlen_problem_runs_on_the_cpu():
    problem = dataclasses.replace(
        problems.varlen(64, True, "mixed"), heads_q=2, heads_k=2, lengths=(70, 1, 33), batch=3
    )
    inputs = problems.make_inputs(problem, "cpu")
    (candidate,) = bench_attention.candidates_for(problem, inputs, ("flashattn_ext",))
    assert max(candidate.errors.values()) < 3.5e-3
    assert problem.forward_flops == 4 * 2 * 64 * (70 * 70 + 1 + 33 * 33) / 2


def test_host_cost_is_measured_in_three_modes(capsys):
    problem = problems.dense(64, 16, True, batch=1, heads_q=1, heads_k=1)
    lines = bench_overhead.measure(
        ("flashattn_ext",), problem=problem, device="cpu", rounds=2, calls=2
    )
    assert [line["mode"] for line in lines] == list(bench_overhead.MODES)
    assert all(line["us"] > 0 for line in lines)
    assert "flashattn_ext" in capsys.readouterr().out


def test_timing_summary():
    summary = timing.Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert summary.median == 3.5
    assert (summary.low, summary.high) == (2.0, 5.0)
    assert summary.calls == 6


def test_matrix_bytes():
    assert bench_memory.matrix_bytes(bench_memory.problem_of(18000)) == 18000**2 * 8 * 2


def test_geometric_mean():
    assert math.isclose(comparison.geometric_mean([0.5, 2.0, 8.0]), 2.0)
    assert math.isnan(comparison.geometric_mean([]))


def test_the_price_of_growth(call_once):
    lines = bench_growth.measure(head_dims=(64,), seqlen=256, device="cpu")
    assert [line["value"] for line in lines] == [1.0] * len(bench_growth.RATES)
    assert {line["verdict"] for line in lines} == {"yes"}


def test_logits_climb_towards_the_first_key():
    q, k = bench_growth.climbing(*torch.randn(2, 1, 256, 1, 64, dtype=torch.float64), rate=20)
    logits = (q[0, :, 0] @ k[0, :, 0].T / math.sqrt(64)).mean(0)
    expected = (256 - torch.arange(256.0, dtype=torch.float64)) * 20 / 128
    torch.testing.assert_close(logits, expected, rtol=5e-3, atol=0.1)


def test_a_training_step(call_once):
    config = dataclasses.replace(train_gpt.CPU, layers=1, heads_k=4, context=48, tokens=192)
    step, loss = bench_training.measure(
        config, "cpu", peers=("sdpa_flash",), modes=(False,), steps=train_gpt.TAIL + 5
    )
    assert (step["claim"], step["value"]) == ("training_step_eager", 1.0)
    assert set(step["milliseconds"]) == {"flashattn_ext", "sdpa_flash"}
    assert loss["claim"] == "training_loss_eager"
    assert loss["value"] < 1e-4  # in fp32
    assert {step["verdict"], loss["verdict"]} == {"yes"}


def test_a_wrong_result_on_growing_logits_has_no_price(call_once, monkeypatch):
    ours = IMPLEMENTATIONS["flashattn_ext"]
    wrong = dataclasses.replace(ours, make=lambda _: lambda x: torch.zeros_like(x.v))
    monkeypatch.setitem(IMPLEMENTATIONS, "flashattn_ext", wrong)
    with pytest.raises(AssertionError, match="relative errors"):
        bench_growth.measure(head_dims=(64,), seqlen=128, device="cpu")
