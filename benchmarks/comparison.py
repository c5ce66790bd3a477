"""Bench lines against each other: ours over the peers, and over our own rate elsewhere.

Only lines of one run are ever compared. A cell is one op on one problem; in it stand the peers and
one line of ours per plan that was asked for.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable

OURS = "flashattn_ext"
DEFAULT_PLAN = "default"
DETERMINISTIC = "deterministic"  # stands for a plan: the default's with deterministic=True
PORTABLE = "sm80"
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
    "fa4_deterministic": "flash-attn 4 (deterministic)",
}
# The rate of ours, in the same run, that a case is held against: case and sequence length (None:
# the same), in bf16. A packed batch is held against its mean length.
YARDSTICKS: dict[str, tuple[str, int | None]] = {
    "dense": ("dense", None),
    "window_1024": ("dense", 16384),
    "gqa_32_8": ("mha_32_32", None),
    "varlen_uniform": ("dense", 1024),
    "varlen_8x2k": ("dense", 2048),
    "varlen_longtail": ("dense", 1024),
    "tokens_18000": ("dense", 16384),
}
CELL_FIELDS = (
    *("op", "case", "dtype", "head_dim", "head_dim_v", "causal"),
    *("seqlen_q", "batch", "heads_q", "heads_k"),
)


def by_cell(lines: Iterable[dict]) -> dict[tuple, list[dict]]:
    """Lines grouped by op and problem: the implementations that are compared with each other."""
    cells: dict[tuple, list[dict]] = {}
    for line in lines:
        cells.setdefault(tuple(line[field] for field in CELL_FIELDS), []).append(line)
    return cells


def asked_plan(line: dict) -> str:
    """The plan a line of ours was asked for; lines that do not say are the default's."""
    return line.get("asked_plan", DEFAULT_PLAN)


def default_plan(line: dict) -> bool:
    return asked_plan(line) == DEFAULT_PLAN


def label_of(line: dict) -> str:
    forced = line["impl"] == OURS and not default_plan(line)
    return f"{line['impl']}:{asked_plan(line)}" if forced else line["impl"]


def ratios(own: dict, cell: Iterable[dict]) -> dict[str, float]:
    """Baseline's time over that of `own`, `impl` -> ratio, for the lines of one cell."""
    return {line["impl"]: line["ms"] / own["ms"] for line in cell if line["impl"] != OURS}


def over_yardstick(own: dict, run: Iterable[dict]) -> float | None:
    """The rate of `own` over that of its yardstick in the same run; None where there is none."""
    case, seqlen = YARDSTICKS.get(own["case"], ("", None))
    wanted = {field: own[field] for field in ("impl", "head_dim", "causal")}
    wanted |= {"case": case, "dtype": "bfloat16", "op": own["op"].removeprefix("varlen_")}
    wanted |= {"seqlen_q": seqlen or own["seqlen_q"]}
    for line in run:
        if (
            line is not own
            and asked_plan(line) == asked_plan(own)
            and wanted.items() <= line.items()
        ):
            return own["tflops"] / line["tflops"]
    return None


def portable(line: dict) -> bool:
    return line["family"] == PORTABLE


Cells = list[tuple[dict, list[dict]]]


def joined_runs(own: Iterable[dict]) -> list[list[str]]:
    """Names of runs, those together that measured the same sources on the same GPU in parts.

    Parts share no cell: a run that measures one again begins anew.
    """
    cells: dict[str, set[tuple]] = {}
    sources: dict[str, tuple] = {}
    for line in own:
        run = line["run"]
        cells.setdefault(run, set()).update(by_cell([line]))
        sources[run] = tuple(line[field] for field in ("gpu", "torch", "commit", "csrc_sha256"))
    groups: list[list[str]] = []
    current: dict[tuple, list[str]] = {}
    for run in sorted(cells):
        group = current.get(sources[run])
        if group is None or any(cells[run] & cells[other] for other in group):
            group = current[sources[run]] = []
            groups.append(group)
        group.append(run)
    return groups


def widest_run(lines: list[dict], chosen: Callable[[dict], bool], **wanted: object) -> Cells:
    """Lines of ours with the wanted field values, each with its cell, of one run or its parts.

    The newest of the runs that have the most such lines of ours that are `chosen`.
    """
    fitting = [
        line
        for line in lines
        if line["kind"] == "bench" and all(line[key] == value for key, value in wanted.items())
    ]
    own = [line for line in fitting if line["impl"] == OURS and chosen(line)]
    if not own:
        return []
    sizes = Counter(line["run"] for line in own)
    runs = max(joined_runs(own), key=lambda names: (sum(sizes[name] for name in names), names[-1]))
    return [
        (line, cell)
        for run in runs
        for cell in by_cell(line for line in fitting if line["run"] == run).values()
        for line in cell
        if line["impl"] == OURS and chosen(line)
    ]


def training_cells(
    lines: list[dict], op: str, chosen: Callable[[dict], bool] = default_plan
) -> Cells:
    return widest_run(lines, chosen, op=op, case="dense", dtype="bfloat16")


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def print_summary(lines: list[dict]) -> None:
    """Geometric mean and lowest cell per op, case, plan and what it is compared with."""
    cells: dict[tuple[str, ...], list[float]] = {}
    for cell in by_cell(lines).values():
        for own in (line for line in cell if line["impl"] == OURS):
            over = ratios(own, cell)
            if over:
                over["best baseline"] = min(over.values())
            yardstick = over_yardstick(own, lines)
            if yardstick is not None:
                over["own yardstick"] = yardstick
            for name, ratio in over.items():
                key = (own["op"], own["case"], own["dtype"], label_of(own), name)
                cells.setdefault(key, []).append(ratio)
    print("\nspeed of ours over others: geometric mean, lowest cell, cells")
    for (op, case, dtype, own_label, name), values in sorted(cells.items()):
        print(
            f"{op:>10} {case:<15} {dtype:<8} {own_label:<18} {name:<14} "
            f"{geometric_mean(values):.3f}  {min(values):.3f}  {len(values)}"
        )
