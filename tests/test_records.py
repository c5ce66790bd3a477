"""Records of GPU runs, the tables made from them, and the tool that writes them, without a GPU."""

import dataclasses
import json

import pytest

from benchmarks import (
    bench_attention,
    bench_memory,
    comparison,
    flops,
    problems,
    record,
    records,
    tables,
)

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
    bench_line("flashattn_ext", 1.0, op="bwd", case="window_128"),
    bench_line("flex", 1.6, op="bwd", case="window_128"),
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
    assert "1.60× FlexAttention" in text
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


def test_a_run_in_parts_is_one_record():
    parts = [training_lines(("sm90",), seqlens=(length,)) for length in (1024, 2048)]
    text = tables.forward(runs(*parts))
    assert "run `20260100T000000`, run `20260101T000000`" in text
    assert text == tables.forward(runs(*parts, [])) != tables.forward(runs(parts[0]))
    # Measured again: another record, and the one with more cells is shown.
    assert text == tables.forward(runs(*parts, parts[0]))
    # Of other sources: not a part.
    other = [
        records.complete(
            dataclasses.replace(ENVIRONMENT, run="20260105T000000", csrc_sha256="5" * 64), line
        )
        for line in training_lines(("sm90",), seqlens=(4096,))
    ]
    assert text == tables.forward(runs(*parts) + other)


def test_the_fastest_peer_of_each_cell():
    lines = training_lines(("sm90", "sm80"), sdpa_cudnn=1.1, fa4=1.5)
    for line in lines:
        if line["impl"] == "fa4" and line["seqlen_q"] == 2048:
            line["ms"] = 0.9
    text = tables.SECTIONS["fwd_peers"](runs(lines))
    assert "| d 64, causal | 1.10× cuDNN | 0.90× flash-attn 4 |" in text
    assert "over all cells: 0.99× (lowest cell 0.90×)" in text
    assert tables.SECTIONS["fwd_peers"](runs(training_lines()[::2])) == ""  # no peer, no table


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
    text = tables.SECTIONS["fwd_cases"](runs(lines))
    assert "| window_1024, bfloat16, d 64, causal | 480 | 0.80× | 1.20× FlexAttention |" in text
    assert "| dense, float16, d 64, causal | 450 | 0.90× |  |" in text
    assert "| varlen_longtail, bfloat16, d 64, causal | 475 | 0.95× |  |" in text
    assert "| gqa_32_8, bfloat16, d 64, causal | 300 | 0.97× |  |" in text
    assert "| mla_192_128, bfloat16, d 64/32, causal | 310 |  |  |" in text
    assert text.count("run `") == 1
    assert "| window_1024, bfloat16, d 64, causal | 480 |  |" in tables.SECTIONS["fwd_cases"](
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
    assert len(commands) == 6
    for command in commands:
        record.parse(command.split("benchmarks.record")[1].split())
