"""What a forward costs on logits built to outgrow every range, beside standard normal inputs.

    python -m benchmarks.bench_growth

A softmax without a running maximum has more to do where logits grow from one block of keys to the
next (docs/design.md, "A softmax without a running maximum"). Here they climb towards the first key,
which is visited last, by so many nats per 128 keys: rows outgrow their range in every block, at the
largest rates beyond what fp32 holds. Each output is compared with fp64 before it is timed.
"""

import argparse
import functools
import math
from typing import Any

import torch

from benchmarks import problems, timing
from benchmarks.baselines import IMPLEMENTATIONS
from benchmarks.problems import Inputs, Problem

SEQLEN = 4096
HEAD_DIMS = (64, 128)
RATES = (20, 100, 300)  # nats per 128 keys
LIMIT = 2.2  # times the usual


def climbing(inputs: Inputs, rate: float) -> Inputs:
    """The same v; q and k so that the logits of key j are (S - j) * rate / 128, but for noise."""
    head_dim, keys = inputs.q.shape[-1], inputs.k.shape[1]
    q, k, v = (t.detach().float() for t in inputs.leaves)
    q, k = 0.01 * q, 0.01 * k
    q[..., 0] = 1.0
    climb = (keys - torch.arange(keys, device=k.device)) * (rate / 128 * math.sqrt(head_dim))
    k[..., 0] = climb[None, :, None]
    dtype = inputs.q.dtype
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), inputs.dout, inputs.cu_seqlens)


def check(problem: Problem, inputs: Inputs, out: torch.Tensor, name: str) -> None:
    """Against fp64, on one head."""
    exact, *_ = problems.reference_slice(problem, inputs)
    error = problems.relative_error(problem, out, exact)
    if not error <= problems.ERROR_LIMIT[problem.dtype]:
        raise AssertionError(f"{name}, head dim {problem.head_dim}: relative error {error:.3g}")


@torch.no_grad()
def measure(
    head_dims: tuple[int, ...] = HEAD_DIMS, seqlen: int = SEQLEN, device: str = "cuda"
) -> list[dict[str, Any]]:
    """Claim records: time over that of standard normal inputs, for each head dim and rate."""
    lines: list[dict[str, Any]] = []
    print(f"\nforward on climbing logits over the usual, {seqlen} keys, bf16, no mask")
    for head_dim in head_dims:
        problem = problems.dense(head_dim, seqlen, False)
        usual = problems.make_inputs(problem, device).detached()
        candidates = {"usual": usual} | {f"{rate}": climbing(usual, rate) for rate in RATES}
        attend = IMPLEMENTATIONS["flashattn_ext"].make(problem)
        for name, inputs in candidates.items():
            check(problem, inputs, attend(inputs), name)
        times = timing.time_alternating(
            {name: functools.partial(attend, inputs) for name, inputs in candidates.items()}
        )
        for rate in RATES:
            price = times[f"{rate}"].median / times["usual"].median
            print(f"  d{head_dim:<4} {rate:>4} nats per 128 keys  {price:.2f}")
            lines.append(
                {
                    "kind": "claim",
                    "claim": f"forward_of_logits_that_climb_{rate}_nats_per_128_keys",
                    "source": "benchmarks/bench_growth.py",
                    "value": price,
                    "unit": "times the usual",
                    "verdict": "yes" if price <= LIMIT else "no",
                    **problem.fields(),
                }
            )
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    measure()


if __name__ == "__main__":
    main()
