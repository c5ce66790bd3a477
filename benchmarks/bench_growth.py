"""What a forward costs on logits built to outgrow every range, beside standard normal inputs.

    python -m benchmarks.bench_growth

A softmax without a running maximum has more to do where logits grow from one block of keys to the
next (docs/design.md, "A softmax without a running maximum"). Here they climb towards the first key,
which is visited last, by so many nats per 128 keys: rows outgrow their range in every block, at the
largest rates beyond what fp32 holds. Each output is compared with fp64 before it is timed.
"""

import argparse
import dataclasses
import math
from typing import Any

import torch

from benchmarks import bench_attention, problems, records, timing
from benchmarks.comparison import OURS

SEQLEN = 4096
HEAD_DIMS = (64, 128)
RATES = (20, 100, 300)  # nats per 128 keys
LIMIT = 2.2  # times the usual


def climbing(q: torch.Tensor, k: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k whose logits of key j are (Sk - j) * rate / 128 but for noise; (B, S, H, D) each."""
    head_dim, keys = q.shape[-1], k.shape[1]
    steep_q, steep_k = 0.01 * q.detach().float(), 0.01 * k.detach().float()
    steep_q[..., 0] = 1.0
    climb = (keys - torch.arange(keys, device=k.device)) * (rate / 128 * math.sqrt(head_dim))
    steep_k[..., 0] = climb[None, :, None]
    return steep_q.to(q.dtype), steep_k.to(k.dtype)


def measure(
    head_dims: tuple[int, ...] = HEAD_DIMS, seqlen: int = SEQLEN, device: str = "cuda"
) -> list[dict[str, Any]]:
    """Claim records: time over that of standard normal inputs, for each head dim and rate."""
    lines: list[dict[str, Any]] = []
    print(f"\nforward on climbing logits over the usual, {seqlen} keys, bf16, no mask")
    for head_dim in head_dims:
        problem = problems.dense(head_dim, seqlen, False)
        usual = problems.make_inputs(problem, device).detached()
        inputs = {"usual": usual}
        for rate in RATES:
            q, k = climbing(usual.q, usual.k, rate)
            inputs[f"{rate}"] = dataclasses.replace(usual, q=q, k=k)
        calls = {}
        for name, x in inputs.items():
            (candidate,) = bench_attention.candidates_for(problem, x, (OURS,), ops=("fwd",))
            calls[name] = candidate.call("fwd")
        times = timing.time_alternating(calls)
        for rate in RATES:
            price = times[f"{rate}"].median / times["usual"].median
            print(f"  d{head_dim:<4} {rate:>4} nats per 128 keys  {price:.2f}")
            lines.append(
                records.claim(
                    f"forward_of_logits_that_climb_{rate}_nats_per_128_keys",
                    price,
                    "times the usual",
                    holds=price <= LIMIT,
                    source="benchmarks/bench_growth.py",
                    **problem.fields(),
                )
            )
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    measure()


if __name__ == "__main__":
    main()
