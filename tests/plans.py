"""Plans of shapes, without a GPU: what the tests of the plan share."""

import torch

from flashattn_ext._loader import load_native
from flashattn_ext.plan import explain

NATIVE = load_native()
HEAD_DIMS = range(8, 257, 8)
ROOMY = {  # an option that the kernels on CUDA do not have, in a shape that fits (2, 300, 4, 64)
    "bias": torch.zeros(1, 4, 1, 300),
    "mask": torch.ones(2, 1, 1, 300, dtype=torch.bool),
    "alibi_slopes": torch.zeros(4),
    "rel_bias": torch.zeros(4, 9),
    "sink": torch.zeros(4),
    "block_mask": torch.ones(1, 1, 3, 3, dtype=torch.bool),
    "dropout_p": 0.1,
}


def ceil_div(a, b):
    return -(-a // b)


def explain_shape(
    batch=2, seqlen_q=300, seqlen_k=300, heads_q=4, heads_k=2, dim=64, dim_v=None, **options
):
    options.setdefault("device", "h200")
    k = (batch, seqlen_k, heads_k, dim)
    return explain(
        (batch, seqlen_q, heads_q, dim), k, (*k[:3], dim if dim_v is None else dim_v), **options
    )


def first_unordered_length(**options):
    """The shortest problem whose backward sums dq in no fixed order."""

    def ordered(length):
        shape = {"seqlen_q": length, "seqlen_k": length} | options
        return explain_shape(**shape, backward=True).deterministic

    low, high = 64, 2**20
    assert ordered(low)
    assert not ordered(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ordered(middle) else (low, middle)
    return high


def native_problem(**sizes):
    problem = NATIVE.Problem()
    defaults = {"batch": 1, "num_heads_q": 1, "num_heads_k": 1, "head_dim": 64, "head_dim_v": 64}
    for name, value in (defaults | sizes).items():
        setattr(problem, name, value)
    problem.total_q = problem.batch * problem.seqlen_q
    problem.total_k = problem.batch * problem.seqlen_k
    return problem
