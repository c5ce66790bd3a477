"""Train a small GPT on the text of Python's own documentation, through flashattn_ext.

    python examples/train_gpt.py              windows of equal length, flash_attn_func
    python examples/train_gpt.py --varlen     paragraphs packed end to end without padding,
                                              flash_attn_varlen_func

The text is `pydoc_data.topics`, which ships with Python; a token is one byte. The same seed is
then trained through attention written out as softmax(q k^T) v, which builds the N x N table that
the library never stores, and the losses are compared. The exit status is 1 when they differ or
when the loss did not fall. A GPU trains in bf16, the CPU in fp32.
"""

import argparse
import math
import pydoc_data.topics
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashattn_ext


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of one step, and how its losses are compared."""

    layers: int
    heads_q: int
    heads_k: int  # grouped-query attention: heads_q / heads_k query heads share a K/V head
    head_dim: int
    context: int  # longest sequence
    tokens: int  # per step: tokens / context windows, or as many packed paragraphs as fit
    compared_steps: int | None  # steps repeated through unfused attention; None = all of them
    tolerance: float  # largest relative difference of the losses

    @property
    def width(self) -> int:
        return self.heads_q * self.head_dim


# In fp32 every one of the first 50 losses is compared. bf16 rounding moves single steps apart, so
# there the mean of the last 20 losses is.
CPU = Config(4, 4, 2, 32, context=256, tokens=2048, compared_steps=50, tolerance=1e-4)
GPU = Config(6, 8, 4, 64, context=1024, tokens=16384, compared_steps=None, tolerance=1e-2)
TAIL = 20


@dataclass(frozen=True)
class Batch:
    """Windows of equal length one per row, or sequences of any length packed into one row."""

    inputs: Tensor  # (rows, length) int64
    targets: Tensor  # (rows, length) int64: the byte that follows each input
    positions: Tensor  # (rows, length) int64, counted from the start of each sequence
    cu_seqlens: Tensor | None = None  # (sequences + 1) int32: where each packed sequence starts

    def to(self, device: str) -> "Batch":
        return Batch(*(x if x is None else x.to(device) for x in vars(self).values()))


Attention = Callable[[Tensor, Tensor, Tensor, Batch], Tensor]


def call_arguments(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple:
    """Arguments of flash_attn_func or, for packed sequences, of flash_attn_varlen_func."""
    if batch.cu_seqlens is None:
        return (q, k, v)
    longest = q.shape[1]  # an upper bound is enough
    return (q[0], k[0], v[0], batch.cu_seqlens, batch.cu_seqlens, longest, longest)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """q (rows, length, heads_q, d), k and v (rows, length, heads_k, d) -> the shape of q."""
    arguments = call_arguments(q, k, v, batch)
    if batch.cu_seqlens is None:
        return flashattn_ext.flash_attn_func(*arguments, causal=True)
    return flashattn_ext.flash_attn_varlen_func(*arguments, causal=True)[None]


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """The same function, one packed sequence at a time, with the whole N x N table in memory."""
    if batch.cu_seqlens is None:
        return textbook_attention(q, k, v)
    lengths = batch.cu_seqlens.diff().tolist()
    sequences = zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([textbook_attention(*sequence) for sequence in sequences], dim=1)


def textbook_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = (config.heads_q, config.heads_k, config.heads_k)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, batch: Batch, attention: Attention) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (sum(self.heads), -1))
        q, k, v = heads.split(self.heads, dim=2)  # views of one tensor: strides, no copies
        x = x + self.out(attention(q, k, v, batch).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        """The mean cross-entropy, in nats per byte."""
        x = self.byte(batch.inputs) + self.position(batch.positions)
        for block in self.blocks:
            x = block(x, batch, attention)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), batch.targets.flatten())


def text() -> bytes:
    return "\n\n".join(pydoc_data.topics.topics.values()).encode()


def dense_batches(text: bytes, config: Config, seed: int) -> Iterator[Batch]:
    """Windows of `context` bytes from random places."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.tensor(list(text))
    rows = config.tokens // config.context
    positions = torch.arange(config.context).repeat(rows, 1)
    while True:
        start = torch.randint(len(data) - config.context, (rows, 1), generator=generator)
        yield Batch(data[start + positions], data[start + positions + 1], positions)


def packed_batches(text: bytes, config: Config, seed: int) -> Iterator[Batch]:
    """Random paragraphs, each cut after `context` bytes, until `tokens` bytes are filled."""
    generator = torch.Generator().manual_seed(seed)
    paragraphs = [p for p in re.split(rb"\n\s*\n", text) if len(p) > 1]
    while True:
        inputs, targets, positions, cu_seqlens = [], [], [], [0]
        while (room := config.tokens - len(inputs)) > 0:
            choice = int(torch.randint(len(paragraphs), (), generator=generator))
            piece = paragraphs[choice][: min(config.context, room) + 1]
            inputs += piece[:-1]
            targets += piece[1:]
            positions += range(len(piece) - 1)
            cu_seqlens.append(len(inputs))
        row = (torch.tensor([x]) for x in (inputs, targets, positions))
        yield Batch(*row, torch.tensor(cu_seqlens, dtype=torch.int32))


def show_progress(step: int, steps: int, loss: float, started: float) -> None:
    """A bar on a terminal; a line for every tenth of the way in a log."""
    rate = step / (time.perf_counter() - started)
    report = f"{step:4d}/{steps}  loss {loss:.4f}  {rate:5.1f} steps/s"
    if sys.stdout.isatty():
        bar = "#" * (30 * step // steps)
        print(f"\r  [{bar:.<30}] {report}", end="\n" if step == steps else "", flush=True)
    elif step in (1, steps) or step % max(1, steps // 10) == 0:
        print(f"  {report}", flush=True)


def train(attention: Attention, config: Config, args: argparse.Namespace, stop: int) -> list[float]:
    """The first `stop` losses of a run of `args.steps` steps: weights and text from `args.seed`."""
    torch.manual_seed(args.seed)
    model = GPT(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=args.steps)
    forward = torch.compile(model) if args.compile else model
    batches = (packed_batches if args.varlen else dense_batches)(text(), config, args.seed)
    losses, started = [], time.perf_counter()
    for step in range(1, stop + 1):
        batch = next(batches).to(args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            loss = forward(batch, attention)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not args.quiet:
            show_progress(step, stop, losses[-1], started)
    return losses


def largest_difference(fused: list[float], unfused: list[float], config: Config) -> float:
    """Relative: of each step that both have or, without compared_steps, of the last ones' mean."""
    if config.compared_steps is None:
        fused, unfused = [fmean(fused[-TAIL:])], [fmean(unfused[-TAIL:])]
    return max(abs(a - b) / b for a, b in zip(fused, unfused, strict=False))


def same_losses(fused: list[float], unfused: list[float], config: Config) -> bool:
    steps = config.compared_steps is not None
    what = f"each of the first {len(unfused)}" if steps else f"the mean of the last {TAIL}"
    worst = largest_difference(fused, unfused, config)
    same = worst <= config.tolerance
    print(f"fused and unfused losses, {what}: largest relative difference {worst:.1e}, allowed "
          f"{config.tolerance:.0e}: {'same' if same else 'DIFFERENT'}")  # fmt: skip
    return same


def explained_attention() -> Attention:
    """fused_attention that prints the plans of its forward and backward when first called."""
    explained = False

    def attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        nonlocal explained
        if not explained:
            explained, arguments = True, call_arguments(q, k, v, batch)
            for backward in (False, True):
                print(flashattn_ext.explain(*arguments, causal=True, backward=backward))
        return fused_attention(q, k, v, batch)

    return attention


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="default: 200")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the text")
    parser.add_argument("--varlen", action="store_true", help="packed paragraphs, no padding")
    parser.add_argument("--compile", action="store_true", help="the model through torch.compile")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(arguments)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = GPU if args.device == "cuda" else CPU

    name = "flash_attn_varlen_func" if args.varlen else "flash_attn_func"
    print(f"{name}, {args.steps} steps on {args.device}")
    fused = train(explained_attention(), config, args, args.steps)
    stop = min(args.steps, config.compared_steps or args.steps)
    print(f"unfused attention, the same seed, {stop} steps")
    unfused = train(unfused_attention, config, args, stop)

    same = same_losses(fused, unfused, config)
    first, last = fused[0], fmean(fused[-TAIL:])
    print(f"loss {first:.4f} -> {last:.4f}: {'fell' if last < first else 'DID NOT FALL'}")
    return 0 if same and last < first else 1


if __name__ == "__main__":
    sys.exit(main())
