"""The benchmark code where there is no GPU: formula, records, tables, the slice reference."""

import dataclasses
import json
import math
import sys

import pytest
import reference
import torch
import torch._functorch.config

from benchmarks import (
    baselines,
    bench_attention,
    bench_memory,
    bench_overhead,
    comparison,
    flops,
    problems,
    record,
    records,
    tables,
    timing,
)
from benchmarks.baselines import IMPLEMENTATIONS, Unavailable

ENVIRONMENT = records.Environment(
    run="20260101T000000-abcdef",
    gpu="NVIDIA Test",
    driver="1.2",
    cuda="13.0",
    torch="2.11.0",
    date="2026-01-01",
    commit="c0ffee",
    csrc_sha256="0123456789abcdef",
)


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


@pytest.mark.parametrize("window", [(-1, -1), (30, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_slice_reference_is_the_dense_reference(causal, window):
    problem = problems.dense(32, 70, causal, batch=2, heads_q=3, heads_k=3, window=window)
    inputs = problems.make_inputs(problem, "cpu")
    detached = inputs.detached()
    truth = reference.run(
        detached.q, detached.k, detached.v, inputs.dout, causal=causal, window_size=window
    )
    part = problems.reference_slice(problem, inputs)
    for name, value in zip(("out", "dq", "dk", "dv"), part):
        torch.testing.assert_close(value, truth[name][0, :, 2], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("changes", [{"heads_k": 2, "head_dim_v": 24}, {"window": (13, 0)}])
def test_slice_reference_with_grouped_heads_and_causal_windows(changes):
    problem = problems.dense(32, 70, True, **{"batch": 1, "heads_q": 6, "heads_k": 6, **changes})
    inputs = problems.make_inputs(problem, "cpu")
    x = inputs.detached()
    truth = reference.run(x.q, x.k, x.v, x.dout, causal=True, window_size=problem.window)
    part = problems.reference_slice(problem, inputs)
    for name, value in zip(("out", "dq", "dk", "dv"), part):
        torch.testing.assert_close(value, truth[name][0, :, -1], rtol=1e-9, atol=1e-11)


def test_slice_reference_is_of_the_longest_sequence():
    problem = problems.dense(32, 50, True, lengths=(7, 50, 13), batch=3, heads_q=2, heads_k=2)
    inputs = problems.make_inputs(problem, "cpu")
    q, k, v, dout = (t[None, 7:57] for t in (*inputs.detached().leaves, inputs.dout))
    truth = reference.run(q, k, v, dout, causal=True)
    part = problems.reference_slice(problem, inputs)
    for name, value in zip(("out", "dq", "dk", "dv"), part):
        torch.testing.assert_close(value, truth[name][0, :, -1], rtol=1e-9, atol=1e-11)
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

    monkeypatch.setattr(timing, "time_alternating", time_alternating)


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


def test_two_families_in_one_run(call_once, monkeypatch, capsys):
    families = {(None, "fwd"): "sm90", ("spec", "fwd"): "sm80"}  # "spec" stands for a forced family

    def plan_of(problem, inputs, op, forced):
        family = families.get((forced, op), "sm80")
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
        records.complete(ENVIRONMENT, line)
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
    problem = problems.dense(32, 70, True, batch=1, heads_q=2, heads_k=2)
    inputs = problems.make_inputs(problem, "cpu")
    full = dataclasses.replace(problem, causal=False)
    sdpa = IMPLEMENTATIONS["sdpa_flash"]
    wrong = dataclasses.replace(sdpa, make=lambda _: sdpa.make(full))
    monkeypatch.setitem(IMPLEMENTATIONS, "sdpa_flash", wrong)
    assert not list(bench_attention.candidates_for(problem, inputs, ("sdpa_flash",)))
    right = IMPLEMENTATIONS["flashattn_ext"]
    ours = dataclasses.replace(right, make=lambda _: right.make(full))
    monkeypatch.setitem(IMPLEMENTATIONS, "flashattn_ext", ours)
    with pytest.raises(AssertionError, match="relative errors"):
        list(bench_attention.candidates_for(problem, inputs, ("flashattn_ext",)))


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


def bench_line(impl, ms, **fields):
    problem = problems.dense(64, 1024, True)
    line = {
        "kind": "bench",
        "op": "fwd",
        "impl": impl,
        "family": "sm80" if impl == "flashattn_ext" else "",
        **problem.fields(),
        "deterministic": False,
        "ms": ms,
        "tflops": flops.tflops(problem.forward_flops, ms),
        "gbps": 0.0,
        "rel_error": 2e-3,
        "plan": "sm80 fwd 128x64",
    }
    return {**line, **fields}


LINES = [
    {"kind": "tests", "passed": 700, "failed": 0, "skipped": 1, "seconds": 100.0},
    {"kind": "sanitizer", "tool": "memcheck", "cases": 14, "errors": 0},
    {"kind": "sanitizer", "tool": "racecheck", "cases": 14, "errors": 0},
    *(
        bench_line(impl, ms * factor, op=op, causal=causal, seqlen_q=seqlen)
        for op, factor in (("fwd", 1), ("bwd", 3))
        for causal in (False, True)
        for seqlen in (1024, 2048)
        for impl, ms in (("flashattn_ext", 1.0), ("sdpa_flash", 1.25))
    ),
    bench_line("flashattn_ext", 1.0, op="varlen_fwd", case="varlen_mixed"),
    bench_line("torch_varlen", 1.5, op="varlen_fwd", case="varlen_mixed"),
    {"kind": "overhead", "impl": "flashattn_ext", "mode": "no_grad", "us": 10.0},
    {"kind": "overhead", "impl": "sdpa_flash", "mode": "no_grad", "us": 20.0},
    {
        "kind": "claim",
        "claim": "peak_extra_memory_n18000",
        "source": "benchmarks/bench_memory.py",
        "value": 1800000,
        "unit": "bytes",
        "verdict": "yes",
        "matrix_bytes": 18000**2 * 16,
        **bench_memory.problem_of(18000).fields(),
    },
]


def write(folder, lines=LINES, environment=ENVIRONMENT):
    return records.append(environment, lines, folder / f"{environment.date}.jsonl")


def test_records_round_trip(tmp_path):
    path = write(tmp_path)
    raw = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(raw) == len(LINES)
    for line in raw:
        assert dataclasses.asdict(ENVIRONMENT).items() <= line.items()
    assert records.read(tmp_path) == raw
    assert ENVIRONMENT.results_path.name == "nvidia-test-2026-01-01.jsonl"


def test_records_refuse_what_is_incomplete(tmp_path):
    with pytest.raises(ValueError, match="lacks \\['errors'\\]"):
        write(tmp_path, [{"kind": "sanitizer", "tool": "memcheck", "cases": 3}])
    with pytest.raises(ValueError, match="record kind 'speed'"):
        write(tmp_path, [{"kind": "speed"}])
    (tmp_path / "broken.jsonl").write_text("{not json\n")
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 1"):
        records.read(tmp_path)


def test_latest_run_mixes_no_two_runs(tmp_path):
    write(tmp_path)
    newer = dataclasses.replace(ENVIRONMENT, run="20270101T000000-000000", date="2027-01-01")
    write(tmp_path, [bench_line("flashattn_ext", 9.0)], newer)
    lines = records.read(tmp_path)
    (line,) = records.latest_run(lines, "bench", op="fwd", case="dense")
    assert line["ms"] == 9.0
    assert {line["run"] for line in records.latest_run(lines, "tests")} == {ENVIRONMENT.run}
    assert not records.latest_run(lines, "tests", passed=5)


README = "# x\n" + "".join(
    f"<!-- bench:{name} -->\nold\n<!-- /bench:{name} -->\n" for name in tables.SECTIONS
)


def run_tables(folder, *arguments):
    paths = {"--readme": "README.md", "--results": "results", "--plot": "speed.svg"}
    places = [text for flag, name in paths.items() for text in (flag, str(folder / name))]
    return tables.main([*arguments, *places])


def test_tables_without_records(tmp_path):
    (tmp_path / "README.md").write_text(README)
    assert run_tables(tmp_path, "--check") == 1
    assert run_tables(tmp_path) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.count(tables.NO_RECORD) == len(tables.SECTIONS)
    assert run_tables(tmp_path, "--check") == 0
    assert not (tmp_path / "speed.svg").exists()


def test_tables_from_records(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, part of the dev extra")
    (tmp_path / "README.md").write_text(README)
    write(tmp_path / "results")
    assert run_tables(tmp_path) == 0
    text = (tmp_path / "README.md").read_text()
    assert "700 passed, 0 failed, 1 skipped" in text
    assert "memcheck 0 errors in 14 cases, racecheck 0 errors in 14 cases" in text
    assert "(1.25×)" in text
    assert "1.25× SDPA FLASH (lowest cell 1.25×)" in text
    assert "1.50×" in text
    assert "| SDPA FLASH | 20.0 (1.00×) |" in text
    assert "| 18,000 | 1.72 | 100 | 4,944 |" in text
    assert tables.NO_RECORD not in text
    assert (tmp_path / "speed.svg").read_text().lstrip().startswith("<?xml")
    assert run_tables(tmp_path, "--check") == 0
    (tmp_path / "README.md").write_text(text.replace("1.25×", "1.95×"))
    assert run_tables(tmp_path, "--check") == 1


def training_lines(families=("sm80",), seqlens=(1024, 2048), **peers):
    """A run's forward cells: ours per family, the first by default and the others forced."""
    impls = {family: ("flashattn_ext", 1.0 + index) for index, family in enumerate(families)}
    impls |= {"": ("sdpa_flash", 1.25)}
    impls |= {impl: (impl, ms) for impl, ms in peers.items()}
    return [
        bench_line(
            impl,
            ms,
            seqlen_q=seqlen,
            family=key if impl == "flashattn_ext" else "",
            asked_plan=("default" if key == families[0] else key)
            if impl == "flashattn_ext"
            else "",
        )
        for seqlen in seqlens
        for key, (impl, ms) in impls.items()
    ]


def runs(*parts):
    """Records of several runs, oldest first."""
    return [
        records.complete(dataclasses.replace(ENVIRONMENT, run=f"2026010{index}T000000"), line)
        for index, part in enumerate(parts)
        for line in part
    ]


def test_each_family_has_its_own_newest_run():
    old = training_lines(("sm80",))
    both = training_lines(("sm90", "sm80"), sdpa_cudnn=1.1)
    forced = [{**line, "asked_plan": "sm80"} for line in old if line["impl"] == "flashattn_ext"]

    lines = runs(old)
    assert "(sm80 kernels)" in tables.forward(lines)
    assert "ran the sm80 kernels" in tables.forward_portable(lines)
    lines = runs(old, both)
    assert "(sm90 kernels)" in tables.forward(lines)
    assert "(sm80 kernels)" in tables.forward_portable(lines)
    assert "run `20260101T000000`" in tables.forward_portable(lines)
    assert "0.62× SDPA FLASH" in tables.forward_portable(lines)  # 1.25 over the forced plan's 2.0
    lines = runs(old, both, forced)
    assert "run `20260101T000000`" in tables.forward(lines)
    assert "run `20260102T000000`" in tables.forward_portable(lines)
    assert "over SDPA FLASH" not in tables.forward_portable(lines)  # no peer in that run
    lines = runs(forced)
    assert tables.forward(lines) == ""
    assert tables.forward_portable(lines)


def test_a_look_at_a_few_shapes_replaces_no_table():
    lines = runs(training_lines(), training_lines(("sm90",), seqlens=(2048,)))
    assert "run `20260100T000000`" in tables.forward(lines)
    other_dtype = [{**line, "dtype": "float16"} for line in training_lines(("sm90",))]
    assert tables.forward(runs(training_lines(), other_dtype)) == tables.forward(
        runs(training_lines())
    )


def test_the_fastest_peer_of_each_cell():
    lines = training_lines(("sm90", "sm80"), sdpa_cudnn=1.1, fa4=1.5)
    for line in lines:
        if line["impl"] == "fa4" and line["seqlen_q"] == 2048:
            line["ms"] = 0.9
    text = tables.forward_peers(runs(lines))
    assert "| d 64, causal | 1.10× cuDNN | 0.90× flash-attn 4 |" in text
    assert "over all cells: 0.99× (lowest cell 0.90×)" in text
    assert tables.forward_peers(runs(training_lines()[::2])) == ""  # no peer, no table


def test_cases_over_our_own_rate():
    lines = [
        bench_line("flashattn_ext", 1.0, seqlen_q=16384, tflops=600.0),
        bench_line("flashattn_ext", 1.0, case="window_1024", seqlen_q=16384, tflops=480.0),
        bench_line("flex", 1.2, case="window_1024", seqlen_q=16384, tflops=400.0),
        bench_line("flashattn_ext", 1.0, seqlen_q=1024, tflops=500.0),
        bench_line("flashattn_ext", 1.0, dtype="float16", seqlen_q=1024, tflops=450.0),
        bench_line("flashattn_ext", 1.0, op="varlen_fwd", case="varlen_longtail", tflops=475.0),
        bench_line("flashattn_ext", 1.0, case="gqa_32_8", heads_k=8, tflops=300.0),
        bench_line("flashattn_ext", 1.0, case="mha_32_32", tflops=310.0),
        bench_line("flashattn_ext", 1.0, case="mla_192_128", head_dim_v=32, tflops=310.0),
    ]
    assert comparison.over_yardstick(lines[0], lines) is None  # not over itself
    text = tables.forward_cases(runs(lines))
    assert "| window_1024, bfloat16, d 64, causal | 480 | 0.80× | 1.20× FlexAttention |" in text
    assert "| dense, float16, d 64, causal | 450 | 0.90× |  |" in text
    assert "| varlen_longtail, bfloat16, d 64, causal | 475 | 0.95× |  |" in text
    assert "| gqa_32_8, bfloat16, d 64, causal | 300 | 0.97× |  |" in text
    assert "| mla_192_128, bfloat16, d 64/32, causal | 310 |  |  |" in text
    assert text.count("run `") == 1
    assert "| window_1024, bfloat16, d 64, causal | 480 |  |" in tables.forward_cases(
        runs(lines[1:2], lines[:1])  # the yardstick is another run's
    )


def test_tables_name_an_unknown_section(tmp_path):
    (tmp_path / "README.md").write_text("<!-- bench:gone -->\n<!-- /bench:gone -->\n")
    with pytest.raises(ValueError, match="unknown table bench:gone"):
        run_tables(tmp_path)


def test_the_readme_matches_the_records():
    """What the README says of speed, tests and memory is what the records say."""
    assert tables.main(["--check"]) == 0


def test_what_is_missing_before_sources_count_as_tested():
    lines = [records.complete(ENVIRONMENT, line) for line in LINES]
    assert tables.not_verified(lines, ENVIRONMENT.csrc_sha256) == []
    assert len(tables.not_verified(lines, "another")) == 3
    failed = [{**line, "failed": 1} if line["kind"] == "tests" else line for line in lines]
    assert len(tables.not_verified(failed, ENVIRONMENT.csrc_sha256)) == 1


def test_records_of_every_result_file_are_complete():
    for line in records.read():
        environment = {field.name: line[field.name] for field in dataclasses.fields(ENVIRONMENT)}
        assert all(environment.values()), line
        records.complete(records.Environment(**environment), line)


def test_junit_counts(tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" '
        'time="4.5"/></testsuites>'
    )
    counts = record.junit_counts(report)
    assert counts == {"passed": 4, "failed": 3, "skipped": 3, "seconds": 4.5}


def test_sanitizer_errors():
    assert record.sanitizer_errors("memcheck", "========= ERROR SUMMARY: 3 errors\n") == 3
    text = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert record.sanitizer_errors("racecheck", text) == 0
    with pytest.raises(RuntimeError, match="printed no summary"):
        record.sanitizer_errors("memcheck", "Error: Target application not found")


def test_failures_are_named():
    bad = [
        {"kind": "tests", "passed": 5, "failed": 1, "skipped": 0, "seconds": 1.0},
        {"kind": "tests", "passed": 0, "failed": 0, "skipped": 9, "seconds": 1.0},
        {"kind": "sanitizer", "tool": "racecheck", "cases": 0, "errors": 0},
    ]
    assert len(record.failures(bad)) == 3
    assert record.failures(LINES) == []


def test_record_needs_something_to_do(capsys):
    with pytest.raises(SystemExit):
        record.parse([])
    assert "nothing to do" in capsys.readouterr().err
    chosen = record.parse(["--bench", "--quick", "--plan", "sm80", "--impls", "flashattn_ext"])
    assert chosen.quick
    assert chosen.impls == ("flashattn_ext",)
    assert chosen.plan == ("sm80",)
    chosen = record.parse(["--bench", "--plan", "sm80,default", "--ops", "fwd", "--cases", "all"])
    assert chosen.plan == ("default", "sm80")
    assert chosen.ops == ("fwd",)
    assert chosen.cases == bench_attention.CASES
    with pytest.raises(SystemExit):
        record.parse(["--bench", "--cases", "dense,window_7"])
    assert "unknown ['window_7']" in capsys.readouterr().err


def test_the_documented_commands_are_accepted():
    joined = record.__doc__.replace("\\\n", " ")
    commands = [line for line in joined.splitlines() if "-m benchmarks.record" in line]
    assert len(commands) == 4
    for command in commands:
        record.parse(command.split("benchmarks.record")[1].split())


def test_geometric_mean():
    assert math.isclose(comparison.geometric_mean([0.5, 2.0, 8.0]), 2.0)
    assert math.isnan(comparison.geometric_mean([]))
