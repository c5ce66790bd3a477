"""A training step of a model of GPT-2 small's shape, through this library and through SDPA.

    python -m benchmarks.bench_training

The model is that of `examples/train_gpt.py` with twelve layers, twelve heads of 64 and windows of
1,024 bytes, sixteen a step, bf16 autocast, eager and compiled. Timed is one forward and backward of
the whole model, its candidates in turns; trained are 200 steps on the example's text, the same seed
through this library and through the fastest of SDPA's back ends.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import records, timing
from benchmarks.baselines import IMPLEMENTATIONS
from benchmarks.comparison import OURS
from examples import train_gpt

SIZES = train_gpt.Config(
    12, 12, 12, 64, context=1024, tokens=16384, compared_steps=None, tolerance=1e-2
)
PEERS = ("sdpa_flash", "sdpa_cudnn")
STEPS = 200
SOURCE = "benchmarks/bench_training.py"


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, batch: train_gpt.Batch) -> Tensor:
    """`train_gpt.fused_attention` for windows of equal length, through torch's own operation."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def attention_of(name: str) -> train_gpt.Attention:
    return train_gpt.fused_attention if name == OURS else sdpa_attention


def step_of(
    name: str, config: train_gpt.Config, device: str, compiled: bool
) -> Callable[[], object]:
    """One forward and backward of the model of seed 0 on the text's first batch."""
    torch.manual_seed(0)
    model = train_gpt.GPT(config).to(device)
    batch = next(train_gpt.dense_batches(train_gpt.text(), config, 0)).to(device)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        with IMPLEMENTATIONS[name].pinned():
            with torch.autocast(device, torch.bfloat16):
                loss = forward(batch, attention_of(name))
            loss.backward()
        model.zero_grad()

    return step


def losses_of(name: str, config: train_gpt.Config, device: str, compiled: bool, steps: int) -> list:
    args = argparse.Namespace(
        seed=0, steps=steps, varlen=False, device=device, compile=compiled, quiet=True
    )
    with IMPLEMENTATIONS[name].pinned():
        return train_gpt.train(attention_of(name), config, args, steps)


def measure(
    config: train_gpt.Config = SIZES,
    device: str = "cuda",
    peers: tuple[str, ...] = PEERS,
    modes: tuple[bool, ...] = (False, True),
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """Claim records of each mode: speed over the fastest peer, and the difference of losses."""
    lines: list[dict[str, Any]] = []
    print(
        f"\ntraining step, {config.layers} layers, {config.heads_q} heads of {config.head_dim}, "
        f"{config.tokens} tokens in windows of {config.context}"
    )
    for compiled in modes:
        mode = "compiled" if compiled else "eager"
        calls = {name: step_of(name, config, device, compiled) for name in (OURS, *peers)}
        times = timing.wall_alternating(calls)
        fastest = min(peers, key=times.__getitem__)
        ratio = times[fastest] / times[OURS]
        ours, theirs = (
            losses_of(name, config, device, compiled, steps) for name in (OURS, fastest)
        )
        difference = train_gpt.largest_difference(ours, theirs, config)
        milliseconds = "  ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
        print(f"  {mode:<9} {milliseconds}  {ratio:.2f}x {fastest}")
        print(f"  {'':<9} loss after {steps} steps {ours[-1]:.4f}, there {theirs[-1]:.4f}")
        shape = {"tokens": config.tokens, "layers": config.layers, "head_dim": config.head_dim}
        lines += [
            records.claim(
                f"training_step_{mode}",
                ratio,
                f"times the speed of {fastest}",
                holds=ratio >= 1,
                source=SOURCE,
                milliseconds={name: round(ms, 3) for name, ms in times.items()},
                **shape,
            ),
            records.claim(
                f"training_loss_{mode}",
                difference,
                f"relative difference from {fastest} after {steps} steps",
                holds=difference <= config.tolerance,
                source=SOURCE,
                losses=[round(losses[-1], 5) for losses in (ours, theirs)],
                **shape,
            ),
        ]
        torch.compiler.reset()
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    measure()


if __name__ == "__main__":
    main()
