"""What a benchmark measures: problems, their random inputs, and the check before any timing.

Tensors are laid out as the library takes them, (B, S, H, D) or packed (T, H, D); a baseline that
wants another order is given transposed views of the same memory.
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import flops

TOTAL_TOKENS = 16384
MODEL_WIDTH = 2048
# Largest relative Frobenius error against fp64 that a timed implementation may show.
ERROR_LIMIT = {torch.bfloat16: 3.5e-3, torch.float16: 4.5e-4}
# Peers keep more roundings in their backward; beyond this a baseline is simply wrong.
BASELINE_ERROR_LIMIT = 2e-2


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention problem. `lengths` non-empty: varlen self-attention over those sequences."""

    case: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: tuple[int, int] = (-1, -1)
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def band(self) -> tuple[int, int]:
        """(left, right) with causality in it: the window, its right end 0 when causal."""
        return self.window[0], 0 if self.causal else self.window[1]

    @property
    def forward_flops(self) -> float:
        shapes = [(n, n) for n in self.lengths] or [(self.seqlen_q, self.seqlen_k)] * self.batch
        pairs = sum(flops.visible_pairs(sq, sk, self.causal, self.window) for sq, sk in shapes)
        return flops.forward_flops(1, self.heads_q, pairs, self.head_dim, self.head_dim_v)

    @property
    def backward_flops(self) -> float:
        return flops.BACKWARD_OVER_FORWARD * self.forward_flops

    def fields(self) -> dict[str, Any]:
        """The record fields that say which problem a figure belongs to."""
        return {
            "case": self.case,
            "dtype": str(self.dtype).removeprefix("torch."),
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "causal": self.causal,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "batch": self.batch,
            "heads_q": self.heads_q,
            "heads_k": self.heads_k,
            "page_size": 0,
        }


def dense(head_dim: int, seqlen: int, causal: bool, **changes: object) -> Problem:
    """A training shape: 16,384 tokens in all, heads = 2048 / head_dim."""
    heads = MODEL_WIDTH // head_dim
    problem = Problem(
        case="dense",
        batch=max(1, TOTAL_TOKENS // seqlen),
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        heads_q=heads,
        heads_k=heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=causal,
    )
    return dataclasses.replace(problem, **changes)  # type: ignore[arg-type]


def long_tailed_lengths(
    count: int = 16, total: int = TOTAL_TOKENS, seed: int = 0
) -> tuple[int, ...]:
    """`count` log-normal lengths (sigma 1) that sum to `total`: most short, a few very long."""
    generator = random.Random(seed)
    draws = [generator.lognormvariate(0, 1) for _ in range(count)]
    lengths = [max(1, round(total * draw / sum(draws))) for draw in draws]
    lengths[lengths.index(max(lengths))] += total - sum(lengths)
    return tuple(lengths)


VARLEN_LENGTHS = {
    "uniform": (1024,) * 16,
    "mixed": (8192, 37, 2048, 1, 1500, 731, 3000, 512, 128, 64, 171),
    "8x2k": (2048,) * 8,
    "longtail": long_tailed_lengths(),
}


def varlen(head_dim: int, causal: bool, kind: str) -> Problem:
    """16,384 packed tokens, in sequences of `VARLEN_LENGTHS[kind]`."""
    lengths = VARLEN_LENGTHS[kind]
    if sum(lengths) != TOTAL_TOKENS:
        raise ValueError(f"varlen {kind}: {sum(lengths)} tokens, wanted {TOTAL_TOKENS}")
    return dense(
        head_dim,
        max(lengths),
        causal,
        case=f"varlen_{kind}",
        batch=len(lengths),
        lengths=lengths,
    )


def _varlen_case(kind: str) -> list[Problem]:
    return [varlen(head_dim, True, kind) for head_dim in (64, 128)]


def _grouped_case() -> list[Problem]:
    """32 query heads over 8 heads of keys and values, each beside its MHA twin."""
    return [
        dense(128, seqlen, causal, case=case, heads_q=32, heads_k=heads_k)
        for seqlen in (4096, 16384)
        for causal in (False, True)
        for case, heads_k in (("gqa_32_8", 8), ("mha_32_32", 32))
    ]


# Beside `dense`: fixed problems by the name that --cases takes, which is the record's `case` too.
CASES: dict[str, Callable[[], list[Problem]]] = {
    **{f"varlen_{kind}": functools.partial(_varlen_case, kind) for kind in VARLEN_LENGTHS},
    # The last 1,024 keys, the row's own among them.
    "window_1024": lambda: [dense(128, 16384, True, case="window_1024", window=(1023, 0))],
    "window_128": lambda: [dense(64, 8192, True, case="window_128", window=(127, 0))],
    "gqa_32_8": _grouped_case,
    "mla_192_128": lambda: [
        dense(192, seqlen, True, case="mla_192_128", heads_q=16, heads_k=16, head_dim_v=128)
        for seqlen in (4096, 16384)
    ],
    "tokens_18000": lambda: [
        dense(128, 18000, True, case="tokens_18000", heads_q=8, heads_k=8)  # batch 1
    ],
}


@dataclasses.dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor  # (B + 1) int32; (0) for a dense problem

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    def heads_first(self) -> "Inputs":
        """(B, H, S, D) views of the same memory that are leaves themselves."""
        q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in self.leaves)
        return Inputs(q, k, v, self.dout.transpose(1, 2), self.cu_seqlens)

    def detached(self) -> "Inputs":
        """The same tensors, asking for no gradients."""
        q, k, v = (t.detach() for t in self.leaves)
        return Inputs(q, k, v, self.dout, self.cu_seqlens)


def make_inputs(problem: Problem, device: str = "cuda", seed: int = 0) -> Inputs:
    """Standard normal inputs that require gradients."""
    generator = torch.Generator(device).manual_seed(seed)
    p = problem

    def normal(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        rows = (sum(p.lengths),) if p.lengths else (p.batch, seqlen)
        shape = (*rows, heads, dim)
        return torch.randn(shape, generator=generator, device=device).to(p.dtype)

    starts = [0, *itertools.accumulate(p.lengths)] if p.lengths else []
    return Inputs(
        q=normal(p.seqlen_q, p.heads_q, p.head_dim).requires_grad_(),
        k=normal(p.seqlen_k, p.heads_k, p.head_dim).requires_grad_(),
        v=normal(p.seqlen_k, p.heads_k, p.head_dim_v).requires_grad_(),
        dout=normal(p.seqlen_q, p.heads_q, p.head_dim_v),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
    )


def _one_head(problem: Problem, tensor: torch.Tensor, head: int) -> torch.Tensor:
    """One head of the first sequence (varlen: of the longest), (S, D), in fp64."""
    if not problem.lengths:
        return tensor[0, :, head].detach().double()
    longest = problem.lengths.index(max(problem.lengths))
    start = sum(problem.lengths[:longest])
    return tensor[start : start + problem.lengths[longest], head].detach().double()


def reference_slice(
    problem: Problem, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64 out, dq, dk, dv of the last head of one sequence (`_one_head`), in closed form.

    dk and dv sum over the query heads that share that last head of keys. Computed in row chunks,
    so that memory stays O(S).
    """
    p = problem
    k = _one_head(p, inputs.k, p.heads_k - 1)
    v = _one_head(p, inputs.v, p.heads_k - 1)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for head in range(p.heads_q - p.heads_q // p.heads_k, p.heads_q):
        q, dout = _one_head(p, inputs.q, head), _one_head(p, inputs.dout, head)
        out, dq, dk_part, dv_part = _reference_head(p, q, k, v, dout)
        dk += dk_part
        dv += dv_part
    return out, dq, dk, dv


def _reference_head(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, dq, dk, dv of one (S, D) head."""
    p = problem
    scale = 1 / math.sqrt(p.head_dim)
    out, dq = torch.empty_like(dout), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    cols = torch.arange(k.shape[0], device=k.device)
    offset = k.shape[0] - q.shape[0]
    left, right = p.band
    for start in range(0, q.shape[0], 2048):
        rows = slice(start, start + 2048)
        relative = cols - (torch.arange(q.shape[0], device=q.device)[rows, None] + offset)
        scores = q[rows] @ k.T * scale
        if left >= 0:
            scores.masked_fill_(relative < -left, -math.inf)
        if right >= 0:
            scores.masked_fill_(relative > right, -math.inf)
        probs = scores.softmax(-1)
        out[rows] = probs @ v
        dv += probs.T @ dout[rows]
        dprobs = dout[rows] @ v.T
        delta = (dout[rows] * out[rows]).sum(-1, keepdim=True)
        dscores = probs * (dprobs - delta) * scale
        dq[rows] = dscores @ k
        dk += dscores.T @ q[rows]
    return out, dq, dk, dv


def relative_error(problem: Problem, actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative Frobenius error of `actual`'s last head in the sequence that `reference` is of."""
    mine = _one_head(problem, actual, actual.shape[-2] - 1)
    return float((mine - reference).norm() / reference.norm())
