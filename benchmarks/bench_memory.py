"""Peak extra memory of one forward and backward, beside what an N x N matrix would need.

    python -m benchmarks.bench_memory

Extra is what had been requested of the caching allocator at the peak beyond the inputs, `dout` and
the results that the caller keeps (out, dq, dk, dv); the allocator's own rounding is not counted.
Lengths double, so that linear growth can be seen.
"""

import argparse
from typing import Any

import torch

from benchmarks import problems, records
from benchmarks.baselines import IMPLEMENTATIONS
from benchmarks.problems import Problem

HEADS, HEAD_DIM = 8, 128
LENGTHS = (4500, 9000, 18000, 36000)


def problem_of(seqlen: int) -> Problem:
    return problems.dense(HEAD_DIM, seqlen, False, batch=1, heads_q=HEADS, heads_k=HEADS)


def matrix_bytes(problem: Problem) -> int:
    """One (batch, heads, Sq, Sk) matrix in the input dtype; an unfused pass holds two or more."""
    pairs = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return pairs * problem.dtype.itemsize


def peak_extra_bytes(problem: Problem, impl: str = "flashattn_ext") -> int:
    """Bytes at the peak of forward + backward beyond inputs and results."""
    implementation = IMPLEMENTATIONS[impl]
    attend = implementation.make(problem)
    inputs = implementation.arrange(problems.make_inputs(problem))
    with implementation.pinned():
        torch.autograd.grad(attend(inputs), inputs.leaves, inputs.dout)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        out = attend(inputs)
        gradients = torch.autograd.grad(out, inputs.leaves, inputs.dout)
    torch.cuda.synchronize()
    results = sum(t.nbytes for t in (out, *gradients))
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - results


def measure(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """Claim records: bytes per token at each length, and the matrix that is never formed."""
    lines: list[dict[str, Any]] = []
    print(f"\npeak extra memory, forward + backward, batch 1, {HEADS} heads, d {HEAD_DIM}, bf16")
    print(f"{'tokens':>8} {'extra MiB':>10} {'bytes/token':>12} {'one N x N MiB':>14}")
    for seqlen in lengths:
        problem = problem_of(seqlen)
        extra, matrix = peak_extra_bytes(problem), matrix_bytes(problem)
        print(f"{seqlen:>8} {extra / 2**20:10.2f} {extra / seqlen:12.1f} {matrix / 2**20:14.1f}")
        lines.append(
            records.claim(
                f"peak_extra_memory_n{seqlen}",
                extra,
                "bytes",
                holds=extra < matrix / 10,
                source="benchmarks/bench_memory.py",
                matrix_bytes=matrix,
                **problem.fields(),
            )
        )
    per_token = [line["value"] / line["seqlen_q"] for line in lines]
    if max(per_token) > 1.25 * min(per_token):
        raise AssertionError(f"extra bytes per token grow with the length: {per_token}")
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    measure()


if __name__ == "__main__":
    main()
