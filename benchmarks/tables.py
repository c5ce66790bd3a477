"""Writes the README's tables and the speed plot from the records; nothing there is typed by hand.

    python -m benchmarks.tables            rewrites them
    python -m benchmarks.tables --check    fails where the README differs from the records
    python -m benchmarks.tables --current  fails unless this csrc/ has passed tests and sanitizers

A table stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`. Each is made from the
newest run that has its kind of record, and names that run, its GPU and its versions.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import records
from benchmarks.bench_attention import OURS, by_cell, geometric_mean, ratios

REPOSITORY = records.REPOSITORY
README = REPOSITORY / "README.md"
PLOT = REPOSITORY / "docs" / "speed.svg"
BASELINE = "sdpa_flash"
NO_RECORD = "No record yet."
LABELS = {
    "flashattn_ext": "flashattn_ext",
    "sdpa_flash": "SDPA FLASH",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA EFFICIENT",
    "torch_varlen": "torch varlen_attn",
    "flex": "FlexAttention",
    "fa2": "flash-attn 2",
    "fa3": "flash-attn 3",
    "fa4": "flash-attn 4",
}
SECTION = re.compile(r"(<!-- bench:(\w+) -->\n)(.*?)(<!-- /bench:\2 -->)", re.DOTALL)


def caption(line: dict, *more: str) -> str:
    """One sentence: on what, with what, when, and for which sources."""
    facts = [
        f"{line['gpu']}, driver {line['driver']}, CUDA {line['cuda']}, torch {line['torch']}",
        f"{line['date']}, run `{line['run']}`",
        f"commit `{line['commit'][:10]}`, csrc `{line['csrc_sha256'][:12]}`",
        *more,
    ]
    return "; ".join(facts) + "."


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its first column left-aligned and the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def verified(lines: list[dict]) -> str:
    parts = []
    tests = records.latest_run(lines, "tests")
    for line in tests[-1:]:
        counts = f"{line['passed']} passed, {line['failed']} failed, {line['skipped']} skipped"
        parts.append(f"GPU tests: {counts} in {line['seconds']:.0f} s. {caption(line)}")
    sanitizers = records.latest_run(lines, "sanitizer")
    if sanitizers:
        found = ", ".join(
            f"{line['tool']} {line['errors']} errors in {line['cases']} cases"
            for line in sanitizers
        )
        parts.append(f"compute-sanitizer: {found}. {caption(sanitizers[0])}")
    return "\n\n".join(parts)


def speed(lines: list[dict], op: str) -> str:
    """Ours in TFLOP/s with the ratio over SDPA FLASH per cell; geometric means below."""
    run = records.latest_run(lines, "bench", op=op, case="dense")
    cells = by_cell(line for line in run if line["op"] == op and line["case"] == "dense")
    ours: dict[tuple, tuple[dict, float | None]] = {}
    against: dict[str, list[float]] = {}
    for cell in cells.values():
        line = next((line for line in cell if line["impl"] == OURS), None)
        if line is None:
            continue
        relative = ratios(cell)
        ours[line["head_dim"], line["causal"], line["seqlen_q"]] = line, relative.get(BASELINE)
        for impl, ratio in relative.items():
            against.setdefault(impl, []).append(ratio)
    if not ours:
        return ""
    seqlens = sorted({key[2] for key in ours})
    rows = []
    for head_dim, causal in sorted({key[:2] for key in ours}):
        row = [f"d {head_dim}, {'causal' if causal else 'full'}"]
        for seqlen in seqlens:
            line, over_baseline = ours.get((head_dim, causal, seqlen), ({}, None))
            text = f"{line['tflops']:.0f}" if line else ""
            row.append(text if over_baseline is None else f"{text} ({over_baseline:.2f}×)")
        rows.append(row)
    means = "; ".join(
        f"{geometric_mean(values):.2f}× {LABELS[impl]} (lowest cell {min(values):.2f}×)"
        for impl, values in against.items()
    )
    first = next(iter(ours.values()))[0]
    families = sorted({line["family"] for line, _ in ours.values()})
    note = (
        f"TFLOP/s of flashattn_ext ({', '.join(families)} kernels), {first['dtype']}, "
        f"16,384 tokens, heads = 2048 / d; in brackets the speed over {LABELS[BASELINE]}. "
        f"Geometric mean over all cells: {means}."
    )
    header = ["sequence length", *(f"{seqlen}" for seqlen in seqlens)]
    return f"{note}\n\n{table(header, rows)}\n\n{caption(first)}"


def forward(lines: list[dict]) -> str:
    text = speed(lines, "fwd")
    picture = f"![Speed by sequence length]({PLOT.relative_to(REPOSITORY).as_posix()})"
    return f"{picture}\n\n{text}" if text else ""


def backward(lines: list[dict]) -> str:
    return speed(lines, "bwd")


def packed(lines: list[dict]) -> str:
    """One row per varlen problem and implementation."""
    run = records.latest_run(lines, "bench", op="varlen_fwd")
    cells = by_cell(line for line in run if line["op"].startswith("varlen"))
    rows = []
    for cell in cells.values():
        relative = ratios(cell)
        for line in cell:
            mask = "causal" if line["causal"] else "full"
            problem = f"{line['op'].removeprefix('varlen_')} {line['case'].removeprefix('varlen_')}"
            ratio = "" if line["impl"] == OURS else f"{relative.get(line['impl'], 0):.2f}×"
            rows.append(
                [
                    f"{problem}, d {line['head_dim']}, {mask}, {line['batch']} sequences",
                    LABELS[line["impl"]],
                    f"{line['tflops']:.0f}",
                    ratio,
                ]
            )
    if not rows:
        return ""
    header = ["16,384 packed tokens", "implementation", "TFLOP/s", "ours over it"]
    return f"{table(header, rows)}\n\n{caption(run[0])}"


def overhead(lines: list[dict]) -> str:
    run = records.latest_run(lines, "overhead")
    if not run:
        return ""
    modes = list(dict.fromkeys(line["mode"] for line in run))
    micros = {(line["impl"], line["mode"]): line["us"] for line in run}
    rows = []
    for impl in dict.fromkeys(line["impl"] for line in run):
        row = [LABELS[impl]]
        for mode in modes:
            own, base = micros.get((impl, mode)), micros.get((BASELINE, mode))
            text = "" if own is None else f"{own:.1f}"
            row.append(f"{text} ({own / base:.2f}×)" if own and base else text)
        rows.append(row)
    names = {"no_grad": "no grad", "grad": "recording a graph", "fwd_bwd": "forward + backward"}
    header = ["µs per call, tiny causal shape", *(names.get(mode, mode) for mode in modes)]
    note = f"In brackets the time over {LABELS[BASELINE]}'s, its back end pinned outside the loop."
    return f"{note}\n\n{table(header, rows)}\n\n{caption(run[0])}"


def memory(lines: list[dict]) -> str:
    run = [
        line
        for line in records.latest_run(lines, "claim", source="benchmarks/bench_memory.py")
        if line["source"] == "benchmarks/bench_memory.py"
    ]
    if not run:
        return ""
    rows = [
        [
            f"{line['seqlen_q']:,}",
            f"{line['value'] / 2**20:.2f}",
            f"{line['value'] / line['seqlen_q']:.0f}",
            f"{line['matrix_bytes'] / 2**20:,.0f}",
        ]
        for line in run
    ]
    shape = f"batch {run[0]['batch']}, {run[0]['heads_q']} heads, d {run[0]['head_dim']}"
    note = (
        f"Peak memory of forward + backward beyond inputs and results ({shape}, "
        f"{run[0]['dtype']}), beside a single N × N matrix of scores in that type."
    )
    header = ["tokens", "extra, MiB", "bytes per token", "one N × N, MiB"]
    return f"{note}\n\n{table(header, rows)}\n\n{caption(run[0])}"


SECTIONS: dict[str, Callable[[list[dict]], str]] = {
    "verified": verified,
    "fwd": forward,
    "bwd": backward,
    "varlen": packed,
    "overhead": overhead,
    "memory": memory,
}


def fill(text: str, lines: list[dict]) -> str:
    """`text` with every section between markers made anew."""

    def section(match: re.Match) -> str:
        name = match[2]
        if name not in SECTIONS:
            raise ValueError(f"unknown table bench:{name}; known: {', '.join(SECTIONS)}")
        body = SECTIONS[name](lines) or NO_RECORD
        return f"{match[1]}{body}\n{match[4]}"

    return SECTION.sub(section, text)


def draw(lines: list[dict], path: Path) -> bool:
    """The plot: TFLOP/s by sequence length, one panel per op and head dim; False without data."""
    run = records.latest_run(lines, "bench", op="fwd", case="dense")
    run = [line for line in run if line["case"] == "dense"]
    if not run:
        return False
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flashattn_ext"  # the same records, the same file
    from matplotlib import pyplot

    head_dims = sorted({line["head_dim"] for line in run})
    ops = [op for op in ("fwd", "bwd") if any(line["op"] == op for line in run)]
    size = (3.6 * len(head_dims), 2.8 * len(ops))
    figure, axes = pyplot.subplots(len(ops), len(head_dims), figsize=size, squeeze=False)
    impls = list(dict.fromkeys(line["impl"] for line in run))
    for row, op in enumerate(ops):
        for column, head_dim in enumerate(head_dims):
            panel = axes[row][column]
            for index, impl in enumerate(impls):
                for causal in (False, True):
                    points = sorted(
                        (line["seqlen_q"], line["tflops"])
                        for line in run
                        if (line["op"], line["head_dim"], line["impl"], line["causal"])
                        == (op, head_dim, impl, causal)
                    )
                    panel.plot(
                        [x for x, _ in points],
                        [y for _, y in points],
                        color=f"C{index}",
                        linestyle="--" if causal else "-",
                        marker=".",
                        label=f"{LABELS[impl]}{', causal' if causal else ''}",
                    )
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.set_title(f"{'forward' if op == 'fwd' else 'backward'}, d {head_dim}")
            panel.grid(alpha=0.3)
        axes[row][0].set_ylabel("TFLOP/s")
    for panel in axes[-1]:
        panel.set_xlabel("sequence length")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{run[0]['gpu']}, {run[0]['dtype']}, 16,384 tokens", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def not_verified(lines: Iterable[dict], csrc_sha256: str) -> list[str]:
    """What is missing before one can say that these sources were tested on a GPU."""
    of_this = [line for line in lines if line["csrc_sha256"] == csrc_sha256]
    missing = []
    if not any(
        line["kind"] == "tests" and line["passed"] and not line["failed"] for line in of_this
    ):
        missing.append("no run of the GPU tests without a failure")
    for tool in ("memcheck", "racecheck"):
        if not any(
            line["kind"] == "sanitizer" and line["tool"] == tool and not line["errors"]
            for line in of_this
        ):
            missing.append(f"no clean {tool} run")
    return missing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--current", action="store_true", help="is this csrc/ tested on a GPU?")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=records.RESULTS)
    parser.add_argument("--plot", type=Path, default=PLOT)
    chosen = parser.parse_args(arguments)
    lines = records.read(chosen.results)
    if chosen.current:
        from flashattn_ext import _source_hash

        present = _source_hash.csrc_sha256(REPOSITORY) or ""
        missing = not_verified(lines, present)
        for sentence in missing:
            print(f"csrc {present[:12]}: {sentence}", file=sys.stderr)
        return 1 if missing else 0
    text = chosen.readme.read_text(encoding="utf-8")
    wanted = fill(text, lines)
    if not chosen.check:
        chosen.readme.write_text(wanted, encoding="utf-8")
        draw(lines, chosen.plot)
        return 0
    if text != wanted:
        print(
            f"{chosen.readme.name}: tables differ from benchmarks/results; "
            "run `python -m benchmarks.tables`",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
