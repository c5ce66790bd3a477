"""Runs tests and benchmarks on the GPU and appends what they said as records.

    python -m benchmarks.record --tests --sanitizer --bench --overhead --memory --growth --training
    python -m benchmarks.record --bench --budget-s 90 --plan sm80 --commit <hash> --out run.jsonl

The forward's records, each command within ten minutes, its options those of `bench_attention`:
training shapes and most other cases, both families and the peers in one run; then, apart because
FlexAttention compiles for each shape, what few other peers take, beside the rate it is held
against.

    python -m benchmarks.record --bench --ops fwd --plan default,sm80 --budget-s 500 \\
        --cases dense,fp16,gqa_32_8,tokens_18000,varlen_mixed,varlen_8x2k,varlen_longtail \\
        --impls flashattn_ext,sdpa_flash,sdpa_cudnn,torch_varlen,fa3,fa4
    python -m benchmarks.record --bench --ops fwd --budget-s 500 --head-dims 128 --seqlens 16384 \\
        --cases dense,window_1024,mla_192_128 \\
        --impls flashattn_ext,sdpa_flash,sdpa_cudnn,flex,fa3,fa4

The backward's:

    python -m benchmarks.record --bench --ops bwd --plan default,deterministic --budget-s 500 \\
        --cases dense,gqa_32_8 --impls flashattn_ext,sdpa_flash,sdpa_cudnn,fa3,fa4,fa4_deterministic
    python -m benchmarks.record --bench --ops bwd --budget-s 300 --cases window_128,mla_192_128 \\
        --impls flashattn_ext,sdpa_cudnn,flex,fa3,fa4

A run that its budget cut short has fewer cells and replaces no table of a wider one. With
`--plan sm80,default` and no `--ops` the backward is recorded too, once where both plans launch
the same kernels.

Records are described in `records.py`. Each part's lines are written as soon as it ends, so an
interrupted run keeps what it measured. The exit status is 1 when any part found a failure.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    bench_attention,
    bench_growth,
    bench_memory,
    bench_overhead,
    bench_training,
    records,
)
from benchmarks.records import REPOSITORY, Environment

# Only the library's kernels are instrumented: torch's own would cost minutes and prove nothing.
SANITIZER_OPTIONS = (
    "--target-processes",
    "all",
    "--kernel-regex",
    "kns=flashattn_ext",
    "--error-exitcode",
    "86",
)


def junit_counts(path: Path) -> dict[str, float]:
    """passed, failed (errors included), skipped and seconds of one pytest run."""
    totals: dict[str, float] = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        totals["passed"] += tests - skipped - failed
        totals["failed"] += failed
        totals["skipped"] += skipped
        totals["seconds"] += float(suite.get("time", 0))
    return totals


def sanitizer_errors(tool: str, output: str) -> int:
    """The error count of compute-sanitizer's closing summary; RuntimeError without a summary."""
    pattern = r"RACECHECK SUMMARY: (\d+) hazard" if tool == "racecheck" else r"SUMMARY: (\d+) error"
    counts = [int(count) for count in re.findall(pattern, output)]
    if not counts:
        raise RuntimeError(f"{tool} printed no summary; its output ends: {output[-500:]}")
    return sum(counts)


def _pytest(
    selection: Sequence[str], prefix: Sequence[str] = (), environment: dict[str, str] | None = None
) -> tuple[dict[str, float], str]:
    """Counts and output of `pytest selection`, its output shown as it comes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [*prefix, sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        process = subprocess.Popen(
            [*command, *selection],
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        status = process.wait()
        if not report.is_file():
            raise RuntimeError(f"pytest wrote no report (exit status {status}): {lines[-5:]}")
        return junit_counts(report), "".join(lines)


def record_tests(extra: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Every GPU test, in one run of pytest."""
    counts, _ = _pytest(["-m", "gpu", "tests", *extra])
    return [{"kind": "tests", "selection": "gpu", **counts}]


def record_sanitizer(extra: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The small set of `tests/test_sanitize.py` under memcheck and racecheck."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise RuntimeError(
            "compute-sanitizer is not on PATH; it comes with the CUDA toolkit (/usr/local/cuda/bin)"
        )
    lines: list[dict[str, Any]] = []
    for tool in records.SANITIZER_TOOLS:
        prefix = [program, "--tool", tool, *SANITIZER_OPTIONS]
        # Every tensor its own allocation, so that a step past its end is seen.
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        selection = ["-m", "gpu", "tests/test_sanitize.py", *extra]
        counts, output = _pytest(selection, prefix, environment)
        errors = sanitizer_errors(tool, output) + int(counts["failed"])
        lines.append(
            {"kind": "sanitizer", "tool": tool, "cases": counts["passed"], "errors": errors}
        )
    return lines


def failures(lines: Sequence[dict]) -> list[str]:
    """What in these records is a failure, in words."""
    found = []
    for line in lines:
        if line["kind"] == "tests" and (line["failed"] or not line["passed"]):
            found.append(f"tests: {line['failed']} failed, {line['passed']} passed")
        if line["kind"] == "sanitizer" and (line["errors"] or not line["cases"]):
            found.append(f"{line['tool']}: {line['errors']} errors in {line['cases']} cases")
        if line["kind"] == "claim" and line["verdict"] != "yes":
            found.append(f"claim {line['claim']}: {line['value']} {line['unit']}")
    return found


def check_binary(environment: Environment) -> None:
    """Records speak of the tree's `csrc/`; refuse when the loaded module was built from another."""
    from flashattn_ext._loader import build_info

    built = build_info()["source_hash"]
    if built != environment.csrc_sha256:
        raise RuntimeError(
            f"the loaded flashattn_ext._C was built from csrc {built[:12]}, this tree holds "
            f"{environment.csrc_sha256[:12]}; build it again before recording"
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="the GPU tests")
    parser.add_argument("--sanitizer", action="store_true", help="memcheck and racecheck")
    parser.add_argument("--bench", action="store_true", help="forward, backward and varlen speed")
    parser.add_argument("--overhead", action="store_true", help="host cost per call")
    parser.add_argument("--memory", action="store_true", help="peak extra memory")
    parser.add_argument("--growth", action="store_true", help="the forward's worst case")
    parser.add_argument("--training", action="store_true", help="a model's step beside SDPA's")
    parser.add_argument("--out", type=Path, default=None, help="instead of the day's results file")
    parser.add_argument("--commit", default=None, help="where git cannot be asked")
    parser.add_argument("--pytest-args", default="", help='more for pytest, such as "-x -n 4"')
    bench_attention.add_arguments(parser)
    chosen = parser.parse_args(arguments)
    parts = ("tests", "sanitizer", "bench", "overhead", "memory", "growth", "training")
    if not any(getattr(chosen, part) for part in parts):
        parser.error("nothing to do: give one or more of --tests --sanitizer --bench ...")
    return chosen


def main() -> int:
    chosen = parse()
    environment = Environment.of_this_run(chosen.commit)
    check_binary(environment)
    extra = chosen.pytest_args.split()
    parts: list[tuple[bool, Callable[[], list[dict[str, Any]]]]] = [
        (chosen.tests, lambda: record_tests(extra)),
        (chosen.sanitizer, lambda: record_sanitizer(extra)),
        (chosen.overhead, bench_overhead.measure),
        (chosen.memory, bench_memory.measure),
        (chosen.growth, bench_growth.measure),
        (chosen.training, bench_training.measure),
        (chosen.bench, lambda: bench_attention.run_from(chosen)),
    ]
    found: list[str] = []
    for wanted, part in parts:
        if wanted:
            lines = part()
            path = records.append(environment, lines, chosen.out)
            found += failures(lines)
            print(f"{len(lines)} records of run {environment.run} appended to {path}", flush=True)
    for failure in found:
        print(f"FAILED: {failure}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
