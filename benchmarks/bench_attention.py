"""Forward, backward and varlen speed against the peers, on the GPU in front of you.

    python -m benchmarks.bench_attention --quick
    python -m benchmarks.bench_attention --impls flashattn_ext,sdpa_flash,sdpa_cudnn --budget-s 90

Shapes: 16,384 tokens, heads = 2048 / head_dim, standard normal inputs. Every implementation is
first compared with fp64 on one head of one sequence, then timed (`timing.py`); the printed ratio
is the baseline's time over ours, so above 1 is faster.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks import flops, problems, timing
from benchmarks.baselines import IMPLEMENTATIONS, Attend, Implementation, Unavailable
from benchmarks.problems import Inputs, Problem

HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = (1024, 4096)
DEFAULT_IMPLS = ("flashattn_ext", "sdpa_flash", "torch_varlen")
OURS = "flashattn_ext"


def suite(
    *,
    quick: bool = False,
    varlen: bool = True,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    seqlens: tuple[int, ...] | None = None,
) -> list[Problem]:
    """The problems in the order they are measured: long sequences last."""
    seqlens = seqlens or (QUICK_SEQLENS if quick else SEQLENS)
    cells = [
        problems.dense(head_dim, seqlen, causal)
        for seqlen, head_dim, causal in itertools.product(seqlens, head_dims, (False, True))
    ]
    if varlen:
        kinds = ("mixed",) if quick else ("uniform", "mixed")
        cells += [problems.varlen(d, True, kind) for d in (64, 128) for kind in kinds]
    return cells


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation, ready to run one problem, that has been found right."""

    implementation: Implementation
    attend: Attend
    inputs: Inputs
    errors: dict[str, float]

    @property
    def name(self) -> str:
        return self.implementation.name

    def call(self, op: str) -> Callable[[], object]:
        """One forward without a graph, or one backward through a graph that is kept."""
        x, pinned = self.inputs, self.implementation.pinned
        if op == "fwd":

            def forward() -> torch.Tensor:
                with torch.no_grad(), pinned():
                    return self.attend(x)

            return forward
        with pinned():
            out = self.attend(x)
        return lambda: torch.autograd.grad(out, x.leaves, x.dout, retain_graph=True)


def relative_errors(
    problem: Problem,
    implementation: Implementation,
    attend: Attend,
    inputs: Inputs,
    references: tuple[torch.Tensor, ...],
) -> dict[str, float]:
    """Relative Frobenius errors: `fwd` of out, `bwd` the largest of dq, dk, dv."""
    with implementation.pinned():
        out = attend(inputs)
        gradients = torch.autograd.grad(out, inputs.leaves, inputs.dout)
    errors = [
        problems.relative_error(problem, implementation.restore(actual), reference)
        for actual, reference in zip((out, *gradients), references, strict=True)
    ]
    return {"fwd": errors[0], "bwd": max(errors[1:])}


def _plan_of(problem: Problem, inputs: Inputs, op: str, plan: str | None) -> tuple[str, str]:
    """The family that runs and the plan's text, from `explain`."""
    import flashattn_ext

    options: dict[str, Any] = {"causal": problem.causal, "window_size": problem.window}
    if problem.lengths:
        longest = max(problem.lengths)
        options |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    chosen = flashattn_ext.explain(
        inputs.q, inputs.k, inputs.v, **options, plan=plan, backward=op == "bwd"
    )
    return chosen.family or "", chosen.summary


@functools.cache
def _say_once(message: str) -> None:
    print(message)


def candidates_for(
    problem: Problem, inputs: Inputs, impls: tuple[str, ...], plan: str | None = None
) -> Iterator[Candidate]:
    """The implementations that can run the problem and are right; says why others are left out."""
    references = problems.reference_slice(problem, inputs)
    for name in impls:
        implementation = IMPLEMENTATIONS[name]
        options = {"plan": plan} if name == OURS else {}
        try:
            attend = implementation.make(problem, **options)
            arranged = implementation.arrange(inputs)
            errors = relative_errors(problem, implementation, attend, arranged, references)
        except (Unavailable, RuntimeError) as reason:
            if name == OURS:
                raise
            _say_once(f"  {name} left out: {str(reason).splitlines()[0]}")
            continue
        limit = problems.BASELINE_ERROR_LIMIT
        if name == OURS:
            limit = problems.ERROR_LIMIT[problem.dtype]
        if not max(errors.values()) <= limit:
            message = f"{name} on {problem}: relative errors {errors}, at most {limit} allowed"
            if name == OURS:
                raise AssertionError(message)
            _say_once(f"  left out, wrong: {message}")
            continue
        yield Candidate(implementation, attend, arranged, errors)


def measure(
    problem: Problem,
    impls: tuple[str, ...],
    *,
    plan: str | None = None,
    rounds: int = 4,
    calls: int = 4,
    ops: tuple[str, ...] = ("fwd", "bwd"),
) -> list[dict[str, Any]]:
    """Bench records of one problem, one line per implementation and op."""
    inputs = problems.make_inputs(problem)
    candidates = list(candidates_for(problem, inputs, impls, plan))
    lines: list[dict[str, Any]] = []
    for op in ops:
        calls_of = {candidate.name: candidate.call(op) for candidate in candidates}
        times = timing.time_alternating(calls_of, rounds=rounds, calls=calls)
        for candidate in candidates:
            family, text = "", ""
            if candidate.name == OURS:
                family, text = _plan_of(problem, inputs, op, plan)
            lines.append(_line(problem, op, candidate, times[candidate.name], family, text))
    return lines


def _line(
    problem: Problem, op: str, candidate: Candidate, time_: timing.Timing, family: str, plan: str
) -> dict[str, Any]:
    work = problem.forward_flops if op == "fwd" else problem.backward_flops
    return {
        "kind": "bench",
        "op": f"varlen_{op}" if problem.lengths else op,
        "impl": candidate.name,
        "version": candidate.implementation.version(),
        "family": family,
        **problem.fields(),
        "deterministic": False,
        "ms": time_.median,
        "ms_low": time_.low,
        "ms_high": time_.high,
        "calls": time_.calls,
        "tflops": flops.tflops(work, time_.median),
        "gbps": 0.0,
        "rel_error": candidate.errors[op],
        "plan": plan,
    }


def by_cell(lines: Iterable[dict]) -> dict[tuple, list[dict]]:
    """Lines grouped by op and problem: the implementations that are compared with each other."""
    fields = ("op", "case", "head_dim", "causal", "seqlen_q", "batch", "heads_q", "heads_k")
    cells: dict[tuple, list[dict]] = {}
    for line in lines:
        cells.setdefault(tuple(line[field] for field in fields), []).append(line)
    return cells


def ratios(lines: list[dict]) -> dict[str, float]:
    """Baseline's time over ours, `impl` -> ratio, for the lines of one problem and op."""
    ours = next((line["ms"] for line in lines if line["impl"] == OURS), None)
    if ours is None:
        return {}
    return {line["impl"]: line["ms"] / ours for line in lines if line["impl"] != OURS}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _print_cell(problem: Problem, op: str, lines: list[dict]) -> None:
    speeds = "  ".join(f"{line['impl']} {line['tflops']:.0f}" for line in lines)
    versus = "  ".join(f"{value:.2f}x {name}" for name, value in ratios(lines).items())
    mask = "causal" if problem.causal else "full"
    print(
        f"{op:>10} {problem.case:<14} d{problem.head_dim:<3} {mask:<6} {problem.seqlen_q:>5}"
        f"  TFLOP/s: {speeds}   {versus}",
        flush=True,
    )


def print_summary(lines: list[dict]) -> None:
    """Geometric mean and the lowest cell per op, case and baseline."""
    cells: dict[tuple[str, str, str], list[float]] = {}
    for (op, case, *_), cell in by_cell(lines).items():
        for impl, ratio in ratios(cell).items():
            cells.setdefault((op, case, impl), []).append(ratio)
    print("\nspeed over the baseline: geometric mean, lowest cell, cells")
    for (op, case, impl), values in sorted(cells.items()):
        mean = geometric_mean(values)
        print(f"{op:>10} {case:<14} {impl:<14} {mean:.3f}  {min(values):.3f}  {len(values)}")


def run(
    cells: list[Problem],
    impls: tuple[str, ...],
    *,
    plan: str | None = None,
    rounds: int = 4,
    calls: int = 4,
    budget_s: float = math.inf,
) -> list[dict[str, Any]]:
    """Measure `cells` in order until the budget is spent, saying which were left out."""
    begin = time.monotonic()
    lines: list[dict[str, Any]] = []
    for index, problem in enumerate(cells):
        if time.monotonic() - begin > budget_s:
            print(f"budget of {budget_s:.0f} s spent: {len(cells) - index} cells left out")
            break
        cell = measure(problem, impls, plan=plan, rounds=rounds, calls=calls)
        lines += cell
        for op, of_op in itertools.groupby(cell, key=lambda line: line["op"]):
            _print_cell(problem, str(op), list(of_op))
    print_summary(lines)
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = set(chosen) - IMPLEMENTATIONS.keys()
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown {sorted(unknown)}; choose from {sorted(IMPLEMENTATIONS)}"
            )
        return chosen

    parser.add_argument("--quick", action="store_true", help="two lengths instead of six")
    parser.add_argument("--no-varlen", action="store_true", help="dense shapes only")
    parser.add_argument("--impls", type=names, default=DEFAULT_IMPLS, help="comma separated")
    parser.add_argument("--plan", default=None, help='force a kernel family, such as "sm80"')
    parser.add_argument("--head-dims", type=numbers, default=HEAD_DIMS)
    parser.add_argument("--seqlens", type=numbers, default=None)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each candidate")
    parser.add_argument("--calls", type=int, default=4, help="timed calls per turn")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="stop after this long")


def run_from(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    cells = suite(
        quick=arguments.quick,
        varlen=not arguments.no_varlen,
        head_dims=arguments.head_dims,
        seqlens=arguments.seqlens,
    )
    return run(
        cells,
        arguments.impls,
        plan=arguments.plan,
        rounds=arguments.rounds,
        calls=arguments.calls,
        budget_s=arguments.budget_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    run_from(parser.parse_args())


if __name__ == "__main__":
    main()
