"""Two blocks whose attention has a bias that is learnt, through flashattn_ext and written out.

    python examples/bias_blocks.py

A triangle-attention block: over the pairs (i, j) of a set of points, every row i attends along j
with the same bias for (j, k), itself made from the pairs; it learns to take noise off distances.
And an encoder block of T5: relative positions in logarithmic buckets, no scale; it learns to fill
in bytes that were blanked out. Each is trained from one seed twice: through the library, which
takes the bias as it is and gives its gradient, and through softmax(q k^T + bias) v with its table
of N x N scores; the losses of the first steps are compared. The exit status is 1 where they differ
or do not fall.

The options raise on CUDA so far, so this runs on the CPU.
"""

import argparse
import math
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashattn_ext

COMPARED = 30  # steps; rounding of one step moves the next ones apart
TOLERANCE = 1e-4  # relative difference of the losses of a step, in fp32
Attention = Callable[..., Tensor]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """q, k, v (batch, length, heads, d) and options of flash_attn_func -> the shape of q."""
    return flashattn_ext.flash_attn_func(q, k, v, **options)


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
) -> Tensor:
    """The same with the whole (batch, heads, length, length) table in memory."""
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if bias is not None:
        scores = scores + bias
    if rel_bias is not None:
        reach, position = rel_bias.shape[1] // 2, torch.arange(q.shape[1], device=q.device)
        distance = position[None, :] - position[:, None]
        scores = scores + rel_bias[:, reach + distance.clamp(-reach, reach)]
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


# ---- Triangle attention ----


class TriangleBlock(nn.Module):
    """Attention around the starting node, gated, and a transition: a block of a pair stack."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.bias = nn.Linear(width, heads, bias=False)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, pairs: Tensor, attention: Attention) -> Tensor:
        """pairs (points, points, width)."""
        x = self.norm1(pairs)
        # Row i is a batch entry: points x (points, heads, d).
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        bias = self.bias(x).permute(2, 0, 1)[None]  # (1, heads, j, k): every row's
        mixed = attention(q, k, v, bias=bias).flatten(2)
        pairs = pairs + self.out(torch.sigmoid(self.gate(x)) * mixed)
        return pairs + self.down(F.relu(self.up(self.norm2(pairs))))


class Distances(nn.Module):
    """Distances from noisy ones."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(1, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(TriangleBlock(width, heads) for _ in range(2))

    def forward(self, batch: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        noisy, true = batch
        pairs = self.embed(noisy[..., None])
        for block in self.blocks:
            pairs = block(pairs, attention)
        return F.mse_loss(noisy + self.read(pairs)[..., 0], true)

    @staticmethod
    def batches(seed: int, points: int = 40) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(points, 3, generator=generator)
            true = torch.cdist(x, x)
            noise = 0.5 * torch.randn(points, points, generator=generator)
            yield true + noise, true


# ---- T5 ----


class T5Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rel_bias: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = attention(q, k, v, softmax_scale=1.0, rel_bias=rel_bias)
        x = x + self.out(mixed.flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


def bidirectional_buckets(reach: int, buckets: int = 32) -> Tensor:
    """T5's bucket of every distance from -reach to reach, the largest that it tells apart.

    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020: half of the buckets for either direction, half of those for one distance
    each, the others growing logarithmically.
    """
    distance = torch.arange(-reach, reach + 1)
    half, exact = buckets // 2, buckets // 4
    far = distance.abs().clamp(min=1).float()
    grown = exact + (torch.log(far / exact) / math.log(reach / exact) * (half - exact)).long()
    bucket = torch.where(distance.abs() < exact, distance.abs(), grown.clamp(max=half - 1))
    return bucket + half * (distance > 0)


class Blanks(nn.Module):
    """Bytes of a text of which some were blanked out."""

    BLANK = 256

    def __init__(self, width: int = 64, heads: int = 4, reach: int = 128) -> None:
        super().__init__()
        self.register_buffer("buckets", bidirectional_buckets(reach))
        self.byte = nn.Embedding(257, width)
        self.position = nn.Embedding(32, heads)  # of all blocks, as in T5
        self.blocks = nn.ModuleList(T5Block(width, heads) for _ in range(2))
        self.norm, self.read = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05) if parameter.dim() == 2 else None

    def forward(self, batch: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        blanked, text = batch
        # The table of the library goes by distance: (heads, 2 reach + 1), clamped beyond.
        rel_bias = self.position(self.buckets).T
        x = self.byte(blanked)
        for block in self.blocks:
            x = block(x, rel_bias, attention)
        hidden = blanked == self.BLANK
        return F.cross_entropy(self.read(self.norm(x))[hidden], text[hidden])

    @staticmethod
    def batches(seed: int, rows: int = 8, length: int = 200) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        data = torch.tensor(list("\n\n".join(pydoc_data.topics.topics.values()).encode()))
        while True:
            start = torch.randint(len(data) - length, (rows, 1), generator=generator)
            text = data[start + torch.arange(length)]
            hidden = torch.rand(rows, length, generator=generator) < 0.15
            yield text.masked_fill(hidden, Blanks.BLANK), text


# ---- Training ----


def train(make: type[nn.Module], attention: Attention, steps: int) -> tuple[list[float], int]:
    """The losses of `steps` steps, and how many bytes a step keeps for its backward."""
    torch.manual_seed(0)
    model, batches = make(), make.batches(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        kept: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()  # noqa: B023
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(next(batches), attention)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sum(kept.values())


def compare(make: type[nn.Module], steps: int) -> bool:
    """Trains through both attentions, prints and judges."""
    fused, fused_bytes = train(make, fused_attention, steps)
    unfused, unfused_bytes = train(make, unfused_attention, min(steps, COMPARED))
    worst = max(abs(a - b) / b for a, b in zip(fused, unfused, strict=False))
    same, tail = worst <= TOLERANCE, max(5, steps // 10)
    first, last = fused[0], fmean(fused[-tail:])
    print(f"{make.__doc__}")
    print(f"  loss {first:.4f} -> {last:.4f}: {'fell' if last < first else 'DID NOT FALL'}")
    print(f"  fused and unfused, {len(unfused)} steps: largest relative difference {worst:.1e}, "
          f"allowed {TOLERANCE:.0e}: {'same' if same else 'DIFFERENT'}")  # fmt: skip
    print(f"  kept for the backward: {fused_bytes / 1e6:.1f} MB, unfused {unfused_bytes / 1e6:.1f}")
    return same and last < first


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of each training; default: 60")
    steps = parser.parse_args(arguments).steps
    results = [compare(make, steps) for make in (Distances, Blanks)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
