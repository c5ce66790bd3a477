"""Writes the README's tables and the speed plot from the records; nothing there is typed by hand.

    python -m benchmarks.tables            rewrites them
    python -m benchmarks.tables --check    fails where the README differs from the records
    python -m benchmarks.tables --current  fails unless this csrc/ has passed tests and sanitizers

A table stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`. Each is made from one run,
the newest that has its kind of record, and names that run, its GPU and its versions. Speed tables
take the newest of the runs with the most cells, so that a look at a few shapes replaces no table;
runs of the same sources that share no cell count as one. The default plan's and the portable
family's are chosen apart.
"""

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import records
from benchmarks.comparison import (
    LABELS,
    PORTABLE,
    Cells,
    default_plan,
    geometric_mean,
    over_yardstick,
    portable,
    ratios,
    training_cells,
    widest_run,
)
from benchmarks.plot import draw

REPOSITORY = records.REPOSITORY
README = REPOSITORY / "README.md"
PLOT = REPOSITORY / "docs" / "speed.svg"
BASELINE = "sdpa_flash"
NO_RECORD = "No record yet."
SECTION = re.compile(r"(<!-- bench:(\w+) -->\n)(.*?)(<!-- /bench:\2 -->)", re.DOTALL)


def caption(line: dict, *more: str, runs: Iterable[str] = ()) -> str:
    """One sentence: on what, with what, when, for which sources; `runs` where there are more."""
    names = ", ".join(f"run `{run}`" for run in runs or (line["run"],))
    facts = [
        f"{line['gpu']}, driver {line['driver']}, CUDA {line['cuda']}, torch {line['torch']}",
        f"{line['date']}, {names}",
        f"commit `{line['commit'][:10]}`, csrc `{line['csrc_sha256'][:12]}`",
        *more,
    ]
    return "; ".join(facts) + "."


def caption_of(cells: Cells) -> str:
    return caption(cells[0][0], runs=dict.fromkeys(line["run"] for line, _ in cells))


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


def grid(texts: dict[tuple[int, bool, int], str]) -> str:
    """A table of texts by (head dim, causal) and sequence length."""
    seqlens = sorted({seqlen for _, _, seqlen in texts})
    rows = [
        [mask_name(head_dim, causal), *(texts.get((head_dim, causal, n), "") for n in seqlens)]
        for head_dim, causal in sorted({key[:2] for key in texts})
    ]
    return table(["sequence length", *map(str, seqlens)], rows)


def mask_name(head_dim: int | str, causal: bool) -> str:
    return f"d {head_dim}, {'causal' if causal else 'full'}"


def key_of(line: dict) -> tuple[int, bool, int]:
    return line["head_dim"], line["causal"], line["seqlen_q"]


def mean_and_lowest(values: list[float], over: str = "") -> str:
    return f"{geometric_mean(values):.2f}×{over} (lowest cell {min(values):.2f}×)"


def kernels_of(cells: Cells) -> str:
    first = cells[0][0]
    families = ", ".join(sorted({line["family"] for line, _ in cells}))
    return f"flashattn_ext ({families} kernels), {first['dtype']}, 16,384 tokens, heads = 2048 / d"


def speed(cells: Cells) -> str:
    """Ours in TFLOP/s with the ratio over SDPA FLASH per cell; geometric means above."""
    if not cells:
        return ""
    texts: dict[tuple[int, bool, int], str] = {}
    against: dict[str, list[float]] = {}
    for line, cell in cells:
        relative = ratios(line, cell)
        over = f" ({relative[BASELINE]:.2f}×)" if BASELINE in relative else ""
        texts[key_of(line)] = f"{line['tflops']:.0f}{over}"
        for impl, ratio in relative.items():
            against.setdefault(impl, []).append(ratio)
    means = "; ".join(
        mean_and_lowest(values, f" {LABELS[impl]}") for impl, values in against.items()
    )
    note = f"TFLOP/s of {kernels_of(cells)}"
    if BASELINE in against:
        note += f"; in brackets the speed over {LABELS[BASELINE]}"
    if means:
        note += f". Geometric mean over all cells: {means}"
    return f"{note}.\n\n{grid(texts)}\n\n{caption_of(cells)}"


def forward(lines: list[dict]) -> str:
    text = speed(training_cells(lines, "fwd"))
    picture = f"![Speed by sequence length]({PLOT.relative_to(REPOSITORY).as_posix()})"
    return f"{picture}\n\n{text}" if text else ""


def forward_portable(lines: list[dict]) -> str:
    """The portable family's forward, unless that is what the default plan's table shows."""
    cells = training_cells(lines, "fwd", portable)
    if cells and cells == training_cells(lines, "fwd"):
        return f"The default plan's forward above ran the {PORTABLE} kernels: it is this table too."
    return speed(cells)


def over_peers(lines: list[dict], op: str) -> str:
    """The default plan over the fastest peer of each cell."""
    cells = [(line, cell) for line, cell in training_cells(lines, op) if ratios(line, cell)]
    if not cells:
        return ""
    best = {key_of(line): best_peer(line, cell) for line, cell in cells}
    peers = dict.fromkeys(LABELS[impl] for line, cell in cells for impl in ratios(line, cell))
    means = mean_and_lowest([ratio for ratio, _ in best.values()])
    note = (
        f"Speed of {kernels_of(cells)}, over the fastest of these in each cell: "
        f"{', '.join(peers)}. Geometric mean over all cells: {means}."
    )
    texts = {key: f"{ratio:.2f}× {name}" for key, (ratio, name) in best.items()}
    return f"{note}\n\n{grid(texts)}\n\n{caption_of(cells)}"


def best_peer(own: dict, cell: list[dict]) -> tuple[float, str]:
    """Our speed over the fastest peer of the cell, and its name."""
    relative = ratios(own, cell)
    impl = min(relative, key=lambda name: relative[name])
    return relative[impl], LABELS[impl].removeprefix("SDPA ")


def other_cases(lines: list[dict], ops: tuple[str, ...]) -> str:
    """Beside the training shapes: each case over our own rate it is held against, and the peers."""
    rows: list[list[str]] = []
    captions: dict[str, str] = {}
    of_op = [line for line in lines if line.get("op") in ops]
    for case, dtype in dict.fromkeys((line["case"], line["dtype"]) for line in of_op):
        if (case, dtype) == ("dense", "bfloat16"):
            continue
        cells = widest_run(of_op, default_plan, case=case, dtype=dtype)
        groups: dict[str, Cells] = {}
        for line, cell in cells:
            head_dim = "/".join(
                str(d) for d in dict.fromkeys((line["head_dim"], line["head_dim_v"]))
            )
            groups.setdefault(mask_name(head_dim, line["causal"]), []).append((line, cell))
        for name, group in groups.items():
            rows.append([f"{case}, {dtype}, {name}", *case_figures(group, of_op)])
        captions |= {line["run"]: caption(line) for line, _ in cells}
    if not rows:
        return ""
    note = (
        "TFLOP/s counted on visible work, over our own rate (dense bf16 at the length, or the "
        "mean length; grouped heads over as many heads of keys) and over the fastest peer of the "
        "run that takes the case; geometric means over lengths, the lowest in brackets."
    )
    header = ["case", "TFLOP/s", "over our own rate", "over the fastest peer"]
    return "\n\n".join([note, table(header, rows), *captions.values()])


def case_figures(group: Cells, lines: list[dict]) -> list[str]:
    """Rate, ratio over our yardstick, ratio over the fastest peer, over the cells of a group."""

    def summary(values: list[float], name: str = "") -> str:
        lowest = f" ({min(values):.2f}×)" if len(values) > 1 else ""
        return f"{geometric_mean(values):.2f}×{lowest}{name}" if values else ""

    run = [line for line in lines if line["run"] == group[0][0]["run"]]
    own = [over_yardstick(line, run) for line, _ in group]
    best = [best_peer(line, cell) for line, cell in group if ratios(line, cell)]
    names = ", ".join(dict.fromkeys(name for _, name in best))
    return [
        f"{geometric_mean([line['tflops'] for line, _ in group]):.0f}",
        summary([ratio for ratio in own if ratio is not None]),
        summary([ratio for ratio, _ in best], f" {names}"),
    ]


def backward(lines: list[dict]) -> str:
    return speed(training_cells(lines, "bwd"))


def packed(lines: list[dict]) -> str:
    """One row per varlen problem and implementation."""
    rows = []
    captions: dict[str, str] = {}
    packs = [line for line in lines if line.get("op") == "varlen_fwd"]
    for case in dict.fromkeys(line["case"] for line in packs):
        cells = widest_run(packs, default_plan, case=case)
        captions |= {line["run"]: caption(line) for line, _ in cells}
        for own, cell in cells:
            mask = mask_name(own["head_dim"], own["causal"])
            for line in cell:
                label = LABELS[line["impl"]]
                if line["family"] and not default_plan(line):
                    label += f" ({line['family']})"
                ratio = "" if line is own else f"{line['ms'] / own['ms']:.2f}×"
                problem = f"{case.removeprefix('varlen_')}, {mask}, {line['batch']} sequences"
                rows.append([problem, label, f"{line['tflops']:.0f}", ratio])
    if not rows:
        return ""
    header = ["16,384 packed tokens", "implementation", "TFLOP/s", "ours over it"]
    return "\n\n".join([table(header, rows), *captions.values()])


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
    run = records.latest_run(lines, "claim", source="benchmarks/bench_memory.py")
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
    "fwd_portable": forward_portable,
    "fwd_peers": functools.partial(over_peers, op="fwd"),
    "fwd_cases": functools.partial(other_cases, ops=("fwd", "varlen_fwd")),
    "bwd": backward,
    "bwd_peers": functools.partial(over_peers, op="bwd"),
    "bwd_cases": functools.partial(other_cases, ops=("bwd",)),
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


def not_verified(lines: Iterable[dict], csrc_sha256: str) -> list[str]:
    """What is missing before one can say that these sources were tested on a GPU."""
    of_this = [line for line in lines if line["csrc_sha256"] == csrc_sha256]
    missing = []
    if not any(
        line["kind"] == "tests" and line["passed"] and not line["failed"] for line in of_this
    ):
        missing.append("no run of the GPU tests without a failure")
    for tool in records.SANITIZER_TOOLS:
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
