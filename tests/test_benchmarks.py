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
    cells = bench_attention.suite(varlen=False)
    assert len(cells) == 3 * 6 * 2
    for problem in cells:
        assert problem.batch * problem.seqlen_q == 16384
        assert problem.heads_q * problem.head_dim == 2048
    assert {problem.case for problem in bench_attention.suite(quick=True)} == {
        "dense",
        "varlen_mixed",
    }


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
    ours = dataclasses.replace(right, make=lambda _, plan=None: right.make(full))
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


def test_geometric_mean():
    assert math.isclose(bench_attention.geometric_mean([0.5, 2.0, 8.0]), 2.0)
    assert math.isnan(bench_attention.geometric_mean([]))
