"""Forward, backward and varlen speed against the peers, on the GPU in front of you.

    python -m benchmarks.bench_attention --quick
    python -m benchmarks.bench_attention --impls flashattn_ext,sdpa_flash,sdpa_cudnn --budget-s 90
    python -m benchmarks.bench_attention --cases dense,window_1024 --ops fwd --plan default,sm80

Shapes: 16,384 tokens, heads = 2048 / head_dim, standard normal inputs; `problems.CASES` has the
others. Every implementation is first compared with fp64 on one head of one sequence, then timed
(`timing.py`); the printed ratio is the baseline's time over ours, so above 1 is faster. Several
plans of ours take turns with the peers in one run ("deterministic" is the default with that
argument); one that would launch what an earlier one launches is not timed twice.
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
from benchmarks.comparison import (
    DEFAULT_PLAN,
    DETERMINISTIC,
    OURS,
    label_of,
    print_summary,
    ratios,
)
from benchmarks.problems import Inputs, Problem

HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = (1024, 4096)
DEFAULT_IMPLS = ("flashattn_ext", "sdpa_flash", "torch_varlen")
OPS = ("fwd", "bwd")
# The training shapes in either dtype; records call both "dense".
TRAINING = {"dense": torch.bfloat16, "fp16": torch.float16}
CASES = (*TRAINING, *problems.CASES)
DEFAULT_CASES = ("dense", "varlen_uniform", "varlen_mixed")


def suite(
    cases: Iterable[str] = DEFAULT_CASES,
    *,
    quick: bool = False,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    seqlens: tuple[int, ...] | None = None,
) -> list[Problem]:
    """The problems of `cases`, in their order; training shapes with long sequences last.

    `quick`, `head_dims` and `seqlens` choose among the training shapes alone.
    """
    seqlens = seqlens or (QUICK_SEQLENS if quick else SEQLENS)
    cells = []
    for case in cases:
        if case in TRAINING:
            cells += [
                problems.dense(head_dim, seqlen, causal, dtype=TRAINING[case])
                for seqlen, head_dim, causal in itertools.product(seqlens, head_dims, (False, True))
            ]
        else:
            cells += problems.CASES[case]()
    return cells


def options_of(asked_plan: str) -> dict[str, Any]:
    """The keyword arguments behind a plan's name on the command line; "" for a baseline."""
    if asked_plan == DETERMINISTIC:
        return {"deterministic": True}
    return {} if asked_plan in ("", DEFAULT_PLAN) else {"plan": asked_plan}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation, ready to run one problem, that has been found right."""

    implementation: Implementation
    attend: Attend
    inputs: Inputs
    errors: dict[str, float]
    asked_plan: str  # "" for a baseline

    @property
    def name(self) -> str:
        return self.implementation.name

    @property
    def label(self) -> str:
        return label_of({"impl": self.name, "asked_plan": self.asked_plan})

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
    ops: Iterable[str] = OPS,
) -> dict[str, float]:
    """Relative Frobenius errors: `fwd` of out, `bwd` the largest of dq, dk, dv; of `ops` alone."""
    backward = "bwd" in ops
    with implementation.pinned(), torch.set_grad_enabled(backward):
        results = [attend(inputs)]
        if backward:
            results += torch.autograd.grad(results[0], inputs.leaves, inputs.dout)
    errors = [
        problems.relative_error(problem, implementation.restore(actual), reference)
        for actual, reference in zip(results, references)
    ]
    return {"fwd": errors[0], **({"bwd": max(errors[1:])} if backward else {})}


def _plan_of(problem: Problem, inputs: Inputs, op: str, asked: dict[str, Any]) -> tuple[str, str]:
    """The family that runs and the plan's text, from `explain`."""
    import flashattn_ext

    options = {"causal": problem.causal, "window_size": problem.window, **asked}
    if problem.lengths:
        longest = max(problem.lengths)
        options |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    chosen = flashattn_ext.explain(inputs.q, inputs.k, inputs.v, **options, backward=op == "bwd")
    order = "" if chosen.deterministic else ", dq in no fixed order"
    return chosen.family or "", f"{chosen.summary}, {len(chosen.kernels)} kernels{order}"


@functools.cache
def _say_once(message: str) -> None:
    print(message)


def candidates_for(
    problem: Problem,
    inputs: Inputs,
    impls: Iterable[str],
    plans: Iterable[str] = (DEFAULT_PLAN,),
    ops: Iterable[str] = OPS,
) -> Iterator[Candidate]:
    """The implementations that can run the problem and are right; says why others are left out."""
    references = problems.reference_slice(problem, inputs)
    for name in impls:
        for asked in plans if name == OURS else ("",):
            candidate = _checked(problem, inputs, name, asked, references, ops)
            if candidate is not None:
                yield candidate


def _checked(
    problem: Problem,
    inputs: Inputs,
    name: str,
    asked_plan: str,
    references: tuple[torch.Tensor, ...],
    ops: Iterable[str],
) -> Candidate | None:
    """`name` ready to run, or None where a baseline cannot or is wrong; ours raises then."""
    implementation = IMPLEMENTATIONS[name]
    try:
        attend = implementation.make(problem, **options_of(asked_plan))
        arranged = implementation.arrange(inputs)
        errors = relative_errors(problem, implementation, attend, arranged, references, ops)
    except (Unavailable, RuntimeError) as reason:
        if name == OURS:
            raise
        _say_once(f"  {name} left out of {problem.case}: {str(reason).splitlines()[0]}")
        return None
    limit = problems.BASELINE_ERROR_LIMIT
    if name == OURS:
        limit = problems.ERROR_LIMIT[problem.dtype]
    if not max(errors.values()) <= limit:
        message = f"{name} on {problem}: relative errors {errors}, at most {limit} allowed"
        if name == OURS:
            raise AssertionError(message)
        _say_once(f"  left out, wrong: {message}")
        return None
    return Candidate(implementation, attend, arranged, errors, asked_plan)


def measure(
    problem: Problem,
    impls: Iterable[str],
    *,
    plans: Iterable[str] = (DEFAULT_PLAN,),
    rounds: int = 4,
    calls: int = 4,
    ops: Iterable[str] = OPS,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """Bench records of one problem, one line per implementation (ours: per plan) and op."""
    inputs = problems.make_inputs(problem, device)
    candidates = list(candidates_for(problem, inputs, impls, plans, ops))
    lines: list[dict[str, Any]] = []
    for op in ops:
        launched: dict[str, tuple[str, str]] = {}
        timed = []
        for candidate in candidates:
            if candidate.name == OURS:
                plan = _plan_of(problem, inputs, op, options_of(candidate.asked_plan))
                if plan in launched.values():
                    continue
                launched[candidate.label] = plan
            timed.append(candidate)
        calls_of = {candidate.label: candidate.call(op) for candidate in timed}
        times = timing.time_alternating(calls_of, rounds=rounds, calls=calls)
        for candidate in timed:
            family, text = launched.get(candidate.label, ("", ""))
            lines.append(_line(problem, op, candidate, times[candidate.label], family, text))
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
        "asked_plan": candidate.asked_plan,
        **problem.fields(),
        "deterministic": candidate.implementation.deterministic
        or candidate.asked_plan == DETERMINISTIC,
        "ms": time_.median,
        "ms_low": time_.low,
        "ms_high": time_.high,
        "calls": time_.calls,
        "tflops": flops.tflops(work, time_.median),
        "gbps": 0.0,
        "rel_error": candidate.errors[op],
        "plan": plan,
    }


def _print_cell(problem: Problem, op: str, lines: list[dict]) -> None:
    speeds = "  ".join(f"{label_of(line)} {line['tflops']:.0f}" for line in lines)
    versus = "  ".join(
        f"{value:.2f}x {name}"
        for own in lines[:1]
        if own["impl"] == OURS
        for name, value in ratios(own, lines).items()
    )
    mask = "causal" if problem.causal else "full"
    print(
        f"{op:>10} {problem.case:<15} d{problem.head_dim:<3} {mask:<6} {problem.seqlen_q:>5}"
        f"  TFLOP/s: {speeds}   {versus}",
        flush=True,
    )


def run(
    cells: list[Problem],
    impls: Iterable[str],
    *,
    budget_s: float = math.inf,
    **options: Any,
) -> list[dict[str, Any]]:
    """`measure` the cells in order until the budget is spent, saying how many were left out."""
    begin = time.monotonic()
    lines: list[dict[str, Any]] = []
    for index, problem in enumerate(cells):
        if time.monotonic() - begin > budget_s:
            print(f"budget of {budget_s:.0f} s spent: {len(cells) - index} cells left out")
            break
        cell = measure(problem, impls, **options)
        lines += cell
        for op, of_op in itertools.groupby(cell, key=lambda line: line["op"]):
            _print_cell(problem, str(op), list(of_op))
    print_summary(lines)
    return lines


def _one_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """An argument type: names from `known`, comma separated; "all" is every one."""

    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(known) if text == "all" else tuple(dict.fromkeys(text.split(",")))
        unknown = sorted(set(chosen) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {unknown}; choose from {sorted(known)}")
        return chosen

    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _plans(text: str) -> tuple[str, ...]:
    """Plan names, the default first: a forced plan that launches the same is then left out."""
    return tuple(sorted(dict.fromkeys(text.split(",")), key=lambda name: name != DEFAULT_PLAN))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="two lengths instead of six")
    parser.add_argument(
        "--cases",
        type=_one_of(CASES),
        default=DEFAULT_CASES,
        help=f"comma separated, in this order, or all: {', '.join(CASES)}",
    )
    parser.add_argument("--ops", type=_one_of(OPS), default=OPS, help="fwd, bwd or both")
    parser.add_argument(
        "--impls", type=_one_of(IMPLEMENTATIONS), default=DEFAULT_IMPLS, help="comma separated"
    )
    parser.add_argument(
        "--plan",
        type=_plans,
        default=(DEFAULT_PLAN,),
        help='plans of ours, comma separated: "default", "deterministic" (the default with that '
        'argument) or a kernel family, such as "sm80"',
    )
    parser.add_argument("--head-dims", type=_numbers, default=HEAD_DIMS)
    parser.add_argument("--seqlens", type=_numbers, default=None)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each candidate")
    parser.add_argument("--calls", type=int, default=4, help="timed calls per turn")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="stop after this long")


def run_from(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    cells = suite(
        arguments.cases,
        quick=arguments.quick,
        head_dims=arguments.head_dims,
        seqlens=arguments.seqlens,
    )
    return run(
        cells,
        arguments.impls,
        plans=arguments.plan,
        ops=arguments.ops,
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
