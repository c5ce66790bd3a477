"""Host cost of one call on a tiny causal shape, ours beside SDPA with its back end pinned.

    python -m benchmarks.bench_overhead

Three modes: `no_grad`, `grad` (recording a graph) and `fwd_bwd` (a forward and its backward).
SDPA's back end is pinned around the whole loop, since pinning it inside costs more than the call.
"""

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import problems, timing
from benchmarks.baselines import IMPLEMENTATIONS, Attend, Unavailable
from benchmarks.problems import Inputs, Problem

MODES = ("no_grad", "grad", "fwd_bwd")
DEFAULT_IMPLS = ("flashattn_ext", "sdpa_flash", "sdpa_cudnn")
TINY = problems.dense(64, 128, True, batch=1, heads_q=2, heads_k=2)


def _call(mode: str, attend: Attend, inputs: Inputs) -> Callable[[], object]:
    if mode == "no_grad":
        plain = inputs.detached()
        return lambda: attend(plain)
    if mode == "grad":
        return lambda: attend(inputs)
    return lambda: torch.autograd.grad(attend(inputs), inputs.leaves, inputs.dout)


def measure(
    impls: tuple[str, ...] = DEFAULT_IMPLS,
    *,
    problem: Problem = TINY,
    device: str = "cuda",
    rounds: int = 15,
    calls: int = 200,
) -> list[dict[str, Any]]:
    """Overhead records, one per implementation and mode."""
    inputs = problems.make_inputs(problem, device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    lines: list[dict[str, Any]] = []
    gc.collect()
    gc.disable()
    try:
        for mode in MODES:
            candidates = {}
            for name in impls:
                implementation = IMPLEMENTATIONS[name]
                try:
                    attend = implementation.make(problem)
                except Unavailable as reason:
                    print(f"{name}: left out, {reason}")
                    continue
                call = _call(mode, attend, implementation.arrange(inputs))
                candidates[name] = timing.HostCall(call, implementation.pinned)
            with torch.set_grad_enabled(mode != "no_grad"):
                micros = timing.host_microseconds(
                    candidates, rounds=rounds, calls=calls, synchronize=synchronize
                )
            lines += [
                {
                    "kind": "overhead",
                    "impl": name,
                    "version": IMPLEMENTATIONS[name].version(),
                    "mode": mode,
                    "us": us,
                    **problem.fields(),
                }
                for name, us in micros.items()
            ]
    finally:
        gc.enable()
    print_table(lines)
    return lines


def print_table(lines: list[dict]) -> None:
    print(f"\nhost microseconds per call: {' '.join(f'{mode:>9}' for mode in MODES)}")
    for impl in dict.fromkeys(line["impl"] for line in lines):
        by_mode = {line["mode"]: line["us"] for line in lines if line["impl"] == impl}
        print(f"{impl:>27} {' '.join(f'{by_mode[mode]:9.1f}' for mode in MODES)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    measure(rounds=arguments.rounds, calls=arguments.calls)


if __name__ == "__main__":
    main()
