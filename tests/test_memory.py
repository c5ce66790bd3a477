"""Extra memory is O(tokens): measured by torch's allocator, beside the matrix that is not there."""

import pytest
import torch

from benchmarks import bench_memory
from flashattn_ext import explain, flash_attn_func

pytestmark = [pytest.mark.gpu, pytest.mark.no_poison]


def test_eighteen_thousand_tokens(capsys):
    """Batch 1, 8 heads, d 128, forward + backward."""
    problem = bench_memory.problem_of(18000)
    extra, matrix = bench_memory.peak_extra_bytes(problem), bench_memory.matrix_bytes(problem)
    with capsys.disabled():
        print(
            f"\n18,000 tokens: peak extra {extra / 2**20:.2f} MiB; "
            f"one N x N matrix in bf16: {matrix / 2**20:.0f} MiB"
        )
    # lse and the backward's workspace, fp32: the formulas of docs/memory.md.
    rows, shape = 18000 * 8, (1, 18000, 8, 128)
    plan = explain(shape, shape, shape, backward=True)
    assert extra <= 4 * rows + plan.workspace_bytes
    sums = 1.01 * 4 * 128 if plan.family == "sm90_fused" else 0
    assert plan.workspace_bytes <= rows * (8 + sums)


def test_extra_memory_grows_with_the_tokens():
    extra = {n: bench_memory.peak_extra_bytes(bench_memory.problem_of(n)) for n in (8192, 32768)}
    assert extra[32768] <= 4.1 * extra[8192]


def test_gqa_expands_no_keys():
    """32 query heads over one key head: no (B, Sk, Hq, D) copy is made."""
    q = torch.randn(1, 64, 32, 128, device="cuda").bfloat16().requires_grad_()
    k, v = (torch.randn(1, 65536, 1, 128, device="cuda").bfloat16().requires_grad_() for _ in "kv")
    dout = torch.randn(1, 64, 32, 128, device="cuda").bfloat16()
    torch.autograd.grad(flash_attn_func(q, k, v), (q, k, v), dout)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_attn_func(q, k, v)
    torch.autograd.grad(out, (q, k, v), dout)
    extra = torch.cuda.max_memory_allocated() - before
    results = sum(t.numel() * t.element_size() for t in (out, q, k, v))
    assert extra - results < 2**22, f"{extra - results} bytes beyond the results"
