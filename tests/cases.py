"""The problems that the tests run, as data, and the random inputs that go with them.

A `Case` is one dense problem, a `VarlenCase` one packed problem. `reduced()` gives the same kind of
problem at a size the CPU path runs in milliseconds; a test body is the same on both devices.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch

HEAD_DIMS = (8, 40, 64, 72, 96, 128, 192, 256)
EVERY_HEAD_DIM = tuple(range(8, 257, 8))
# (D, Dv): one d128 problem with every smaller Dv that a peer got wrong, and the wide pairs.
UNEQUAL_HEAD_DIMS = (
    *((128, dv) for dv in (8, 16, 24, 40, 48, 72, 80, 88, 96, 104, 112, 120, 64)),
    *((192, 128), (64, 128), (256, 64), (8, 256), (40, 72)),
)
HALF_TYPES = (torch.bfloat16, torch.float16)
GQA_RATIOS = (1, 3, 5, 7, 8, 14)
# (Sq, Sk): single rows, tile edges and their neighbours, both long sides.
SEQLENS = (
    *((1, 1), (1, 239), (3, 799), (113, 203), (128, 128), (127, 512), (512, 256)),
    *((129, 65), (64, 1), (333, 1024), (1023, 1024)),
)
# Above this length `reduced()` shortens a sequence, keeping its remainder by the tile size.
CPU_SEQLEN = 160
TILE = 64


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that every path has now. `causal` is False, True or "top_left"."""

    causal: bool | str = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None

    def kwargs(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        mask = {False: "full", True: "causal"}.get(self.causal, self.causal)
        window = "" if self.window_size == (-1, -1) else "-window{}_{}".format(*self.window_size)
        cap = f"-softcap{self.softcap:g}" if self.softcap else ""
        scale = f"-scale{self.softmax_scale:g}" if self.softmax_scale is not None else ""
        return f"{mask}{window}{cap}{scale}"


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Case:
    """A dense problem. `kind` names the distribution of its inputs (see `values`)."""

    head_dim: int = 64
    head_dim_v: int | None = None
    seqlen_q: int = 128
    seqlen_k: int = 128
    batch: int = 2
    heads_q: int = 4
    heads_k: int = 2
    dtype: torch.dtype = torch.bfloat16
    kind: str = "normal"
    options: Options = Options()

    @property
    def dv(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def sequences(self) -> list[tuple[int, int]]:
        return [(self.seqlen_q, self.seqlen_k)]

    def reduced(self) -> "Case":
        """At most CPU_SEQLEN rows and keys, batch 2 and two groups of heads."""
        ratio = self.heads_q // self.heads_k
        heads_k = min(self.heads_k, 2)
        return dataclasses.replace(
            self,
            seqlen_q=shortened(self.seqlen_q),
            seqlen_k=shortened(self.seqlen_k),
            batch=min(self.batch, 2),
            heads_q=ratio * heads_k,
            heads_k=heads_k,
        )

    def on(self, device: str) -> "Case":
        return self if device == "cuda" else self.reduced()

    def __str__(self) -> str:
        dv = "" if self.head_dim_v is None else f"v{self.head_dim_v}"
        heads = f"h{self.heads_q}_{self.heads_k}"
        shape = f"d{self.head_dim}{dv}-b{self.batch}-{heads}-{self.seqlen_q}x{self.seqlen_k}"
        kind = "" if self.kind == "normal" else f"-{self.kind}"
        return f"{shape}-{self.options}{kind}-{type_name(self.dtype)}"


@dataclasses.dataclass(frozen=True)
class VarlenCase:
    """A packed problem: lengths per sequence, rows before and after them that nobody owns."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    head_dim: int = 64
    head_dim_v: int | None = None
    heads_q: int = 4
    heads_k: int = 2
    dtype: torch.dtype = torch.bfloat16
    kind: str = "normal"
    tail_q: int = 0
    tail_k: int = 0
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    options: Options = Options()

    @property
    def dv(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def total_q(self) -> int:
        return sum(self.lengths_q) + self.tail_q

    @property
    def total_k(self) -> int:
        return sum(self.lengths_k) + self.tail_k

    @property
    def sequences(self) -> list[tuple[int, int]]:
        used_q = self.seqused_q or self.lengths_q
        used_k = self.seqused_k or self.lengths_k
        return list(zip(map(min, self.lengths_q, used_q), map(min, self.lengths_k, used_k)))

    def reduced(self) -> "VarlenCase":
        ratio = self.heads_q // self.heads_k
        heads_k = min(self.heads_k, 2)
        used_q, used_k = self.seqused_q, self.seqused_k
        return dataclasses.replace(
            self,
            lengths_q=tuple(map(shortened, self.lengths_q)),
            lengths_k=tuple(map(shortened, self.lengths_k)),
            seqused_q=None if used_q is None else tuple(map(shortened, used_q)),
            seqused_k=None if used_k is None else tuple(map(shortened, used_k)),
            heads_q=ratio * heads_k,
            heads_k=heads_k,
        )

    def on(self, device: str) -> "VarlenCase":
        return self if device == "cuda" else self.reduced()

    def __str__(self) -> str:
        dv = "" if self.head_dim_v is None else f"v{self.head_dim_v}"
        used = "-used" if self.seqused_q or self.seqused_k else ""
        tail = f"-tail{self.tail_q}_{self.tail_k}" if self.tail_q or self.tail_k else ""
        lengths = (
            "_".join(map(str, self.lengths_q[:4])) + "x" + "_".join(map(str, self.lengths_k[:4]))
        )
        heads = f"h{self.heads_q}_{self.heads_k}"
        kind = "" if self.kind == "normal" else f"-{self.kind}"
        shape = f"d{self.head_dim}{dv}-{heads}-{lengths}{tail}{used}"
        return f"{shape}-{self.options}{kind}-{type_name(self.dtype)}"


def shortened(seqlen: int) -> int:
    """`seqlen`, or a shorter one with the same remainder by the tile size."""
    if seqlen <= CPU_SEQLEN:
        return seqlen
    return CPU_SEQLEN // TILE * TILE - TILE + seqlen % TILE


def values(kind: str, shape: tuple[int, ...], role: str, device: str) -> torch.Tensor:
    """fp32 values for the tensor that plays `role` (q, k, v or dout).

    normal   standard normal
    peaky    queries twice as long: a few keys take most of a row's weight
    offset   one direction, long in q, lifts every score by about 15: LSE is large
    times3   q, k and v three times as long: rows that are nearly one-hot
    channel  correlated rows; one channel of q and k fifty times the others, its sign the row's own
    """
    x = torch.randn(shape, device=device)
    if role == "dout":
        return x
    if kind == "peaky" and role == "q":
        x = 2 * x
    if kind == "offset" and role in "qk":
        x[..., 0] = 15 * math.sqrt(shape[-1]) if role == "q" else 1
    if kind == "times3":
        x = 3 * x
    if kind == "channel":
        rows = torch.randn((*shape[:-3], 1, *shape[-2:]), device=device)
        x = (x + rows) / math.sqrt(2)
        if role in "qk":
            x[..., 1] *= 50 if role == "k" else 50 / shape[-1]
    return x


@dataclasses.dataclass
class Tensors:
    """Inputs of one call and the gradients that arrive at its results; `lengths` for varlen."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    lengths: dict[str, Any] = dataclasses.field(default_factory=dict)


def make_tensors(case: Case, device: str) -> Tensors:
    """Random inputs of `case` from torch's generator of `device`."""
    c = case

    def random(seqlen: int, heads: int, dim: int, role: str) -> torch.Tensor:
        return values(c.kind, (c.batch, seqlen, heads, dim), role, device).to(c.dtype)

    return Tensors(
        q=random(c.seqlen_q, c.heads_q, c.head_dim, "q"),
        k=random(c.seqlen_k, c.heads_k, c.head_dim, "k"),
        v=random(c.seqlen_k, c.heads_k, c.dv, "v"),
        dout=random(c.seqlen_q, c.heads_q, c.dv, "dout"),
        dlse=torch.randn(c.batch, c.heads_q, c.seqlen_q, device=device).to(lse_type(c.dtype)),
    )


def heads_first(t: torch.Tensor) -> torch.Tensor:
    """The same values held as (B, H, S, D) in memory."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def lse_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def cumulative(lengths: Iterable[int], device: str = "cpu") -> torch.Tensor:
    """cu_seqlens (B + 1) int32."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def make_varlen_tensors(case: VarlenCase, device: str, unowned: float = math.nan) -> Tensors:
    """Random inputs of `case`; rows that no sequence owns or uses hold `unowned`."""
    c = case

    def random(
        lengths: tuple[int, ...], total: int, used: tuple[int, ...] | None, heads: int, dim: int,
        role: str,
    ) -> torch.Tensor:  # fmt: skip
        x = values(c.kind, (total, heads, dim), role, device).to(c.dtype)
        x[~owned_rows(lengths, total, used).to(device)] = unowned
        return x

    def int32(x: tuple[int, ...] | None) -> torch.Tensor | None:
        return None if x is None else torch.tensor(x, dtype=torch.int32, device=device)

    queries = (c.lengths_q, c.total_q, c.seqused_q, c.heads_q)
    keys = (c.lengths_k, c.total_k, c.seqused_k, c.heads_k)
    dlse = torch.randn(c.heads_q, c.total_q, device=device).to(lse_type(c.dtype))
    dlse[:, ~owned_rows(*queries[:3]).to(device)] = unowned
    return Tensors(
        q=random(*queries, c.head_dim, "q"),
        k=random(*keys, c.head_dim, "k"),
        v=random(*keys, c.dv, "v"),
        dout=random(*queries, c.dv, "dout"),
        dlse=dlse,
        lengths={
            "cu_seqlens_q": cumulative(c.lengths_q, device),
            "cu_seqlens_k": cumulative(c.lengths_k, device),
            "max_seqlen_q": max(c.lengths_q, default=0),
            "max_seqlen_k": max(c.lengths_k, default=0),
            "seqused_q": int32(c.seqused_q),
            "seqused_k": int32(c.seqused_k),
        },
    )


def owned_rows(
    lengths: tuple[int, ...], total: int, used: tuple[int, ...] | None = None
) -> torch.Tensor:
    """(total) bool: rows that belong to a sequence and lie within its used part."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    in_use = counts if used is None else torch.tensor(used, dtype=torch.int64)
    starts = counts.cumsum(0) - counts
    position = torch.arange(int(counts.sum())) - starts.repeat_interleave(counts)
    owned = torch.zeros(total, dtype=torch.bool)
    owned[: position.numel()] = position < in_use.repeat_interleave(counts)
    return owned


def pairwise(**factors: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Choices that together hold every pair of values of any two factors (greedy, repeatable)."""
    names = list(factors)
    sizes = [len(factors[name]) for name in names]
    uncovered = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x, y in itertools.product(range(sizes[a]), range(sizes[b]))
    }
    rows = []
    while uncovered:
        row = dict(min(uncovered))
        for index, size in enumerate(sizes):
            if index not in row:
                gains = [len(uncovered & pairs_of({**row, index: x})) for x in range(size)]
                row[index] = gains.index(max(gains))
        uncovered -= pairs_of(row)
        rows.append({name: factors[name][row[i]] for i, name in enumerate(names)})
    return rows


def pairs_of(row: dict[int, int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(sorted(row.items()), 2))
