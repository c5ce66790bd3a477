"""The one formula that turns a time into TFLOP/s, for every implementation alike.

A visible (query, key) pair costs one dot product of length D (scores) and one of length Dv
(output), two floating-point operations per element:

    forward  = 2 * (D + Dv) * batch * heads_q * pairs
    backward = 2.5 * forward

`pairs` is Sq * Sk, half of it when causal with Sq == Sk, and the exact count with a window or
causal Sq != Sk. The backward's five products against the forward's two give the 2.5, whatever an
implementation recomputes on top of that: a figure is useful work over time.
"""

BACKWARD_OVER_FORWARD = 2.5


def visible_pairs(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> float:
    """Pairs (i, j) with -left <= j - (i + Sk - Sq) <= right; -1 is unlimited."""
    left, right = window
    if left < 0 and right < 0:
        if not causal:
            return float(seqlen_q * seqlen_k)
        if seqlen_q == seqlen_k:
            return seqlen_q * seqlen_k / 2
    if causal:
        right = 0
    offset = seqlen_k - seqlen_q
    total = 0
    for i in range(seqlen_q):
        first = 0 if left < 0 else max(0, i + offset - left)
        last = seqlen_k - 1 if right < 0 else min(seqlen_k - 1, i + offset + right)
        total += max(0, last - first + 1)
    return float(total)


def forward_flops(
    batch: int, heads_q: int, pairs: float, head_dim: int, head_dim_v: int | None = None
) -> float:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return 2.0 * (head_dim + head_dim_v) * batch * heads_q * pairs


def tflops(flops: float, ms: float) -> float:
    """10^12 operations per second."""
    return flops / ms / 1e9 if ms > 0 else 0.0
