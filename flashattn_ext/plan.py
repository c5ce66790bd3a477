"""explain: which kernels a call runs, with which tiles and memory, and why not others.

A plan is made from shapes, strides, options and a device's facts, never from data, so it can be
asked for on a machine without a GPU. The rules are in `csrc/plan/`; this file only asks and prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ._loader import load_native
from .interface import _options

_native = load_native()

KIB = 1024
SCALAR_TYPES = {
    torch.float16: _native.ScalarType.float16,
    torch.bfloat16: _native.ScalarType.bfloat16,
    torch.float32: _native.ScalarType.float32,
    torch.float64: _native.ScalarType.float64,
}


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan depends on. `DEVICES` holds those of well-known GPUs, by name."""

    name: str
    compute_capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    smem_per_block_bytes: int = 0  # largest a kernel can opt into
    smem_per_sm_bytes: int = 0
    is_cuda: bool = True

    def __str__(self) -> str:
        if not self.is_cuda:
            return self.name
        major, minor = self.compute_capability
        return (
            f"{self.name} (compute capability {major}.{minor}, {self.num_sms} SMs, "
            f"{self.smem_per_block_bytes // KIB} KB of shared memory per block)"
        )


CPU = DeviceFacts("cpu", is_cuda=False)
DEVICES = {
    "cpu": CPU,
    "a100": DeviceFacts("a100", (8, 0), 108, 163 * KIB, 164 * KIB),
    "rtx3090": DeviceFacts("rtx3090", (8, 6), 82, 99 * KIB, 100 * KIB),
    "rtx4090": DeviceFacts("rtx4090", (8, 9), 128, 99 * KIB, 100 * KIB),
    "l40s": DeviceFacts("l40s", (8, 9), 142, 99 * KIB, 100 * KIB),
    "h100": DeviceFacts("h100", (9, 0), 132, 227 * KIB, 228 * KIB),
    "h200": DeviceFacts("h200", (9, 0), 132, 227 * KIB, 228 * KIB),
    "b200": DeviceFacts("b200", (10, 0), 148, 227 * KIB, 228 * KIB),
    "rtx5090": DeviceFacts("rtx5090", (12, 0), 170, 99 * KIB, 100 * KIB),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a plan. Small kernels that choose their own grid have zeros for the tile."""

    name: str
    grid: int  # CTAs
    block_m: int  # query rows of a tile
    block_n: int  # keys of a tile
    num_warps: int
    stages: int  # tiles in flight
    smem_bytes: int

    def __str__(self) -> str:
        if not self.grid:
            return self.name
        return (
            f"{self.name}: tile {self.block_m}x{self.block_n}, {self.num_warps} warps, "
            f"{self.stages} stage{'s' if self.stages > 1 else ''}, "
            f"{self.smem_bytes / KIB:g} KB of shared memory, grid {self.grid}"
        )


@dataclass(frozen=True)
class Plan:
    """What a call runs. `print(plan)` shows it, `as_dict()` gives plain data."""

    op: str  # "fwd", "bwd", "varlen_fwd" or "varlen_bwd"
    device: DeviceFacts
    family: str | None  # None: nothing runs the call, it raises `error`
    error: str | None
    kernels: tuple[Kernel, ...]  # in launch order
    rejected: dict[str, str]  # every other family, with the reason
    copies: tuple[str, ...]  # inputs whose layout makes a contiguous copy necessary
    window: tuple[int, int]  # (left, right) after causal and lengths are taken in; -1 unlimited
    empty: bool  # nothing to compute: the outputs are filled
    deterministic: bool  # the results are the same bits in every run
    workspace_bytes: int  # beside outputs and copies
    workspace_formula: str  # "" where the workspace is empty

    @property
    def summary(self) -> str:
        """One short line, such as "sm80 fwd 128x64 4 warps 2 stages"."""
        tiles = " + ".join(
            f"{kernel.block_m}x{kernel.block_n} {kernel.num_warps} warps {kernel.stages} stages"
            for kernel in self.kernels
            if kernel.grid
        )
        return " ".join(filter(None, (self.family or "nothing", self.op, tiles)))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.family is None:
            return f"{self.op} on {self.device}: raises\n  {self.error}"
        lines = [f"{self.op} on {self.device}: {self.family}"]
        lines += [f"  {kernel}" for kernel in self.kernels]
        if self.empty:
            lines.append("  nothing to compute: the outputs are filled")
        if not self.deterministic:
            lines.append("  dq is summed in no fixed order: deterministic=True makes it repeatable")
        if self.device.is_cuda:
            formula = f" = {self.workspace_formula}" if self.workspace_formula else ""
            lines.append(f"  workspace: {self.workspace_bytes} bytes{formula}")
            lines.append(
                f"  copied to a contiguous tensor first: {', '.join(self.copies) or 'none'}"
            )
        left, right = ("unlimited" if bound < 0 else bound for bound in self.window)
        lines.append(f"  window: left {left}, right {right}")
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines)


def explain(
    q: Tensor | Sequence[int],
    k: Tensor | Sequence[int],
    v: Tensor | Sequence[int],
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    mask: Tensor | None = None,
    rel_bias: Tensor | None = None,
    sink: Tensor | None = None,
    block_mask: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    plan: str | None = None,
    backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | DeviceFacts | None = None,
) -> Plan:
    """What `flash_attn_func` (or, given cu_seqlens, `flash_attn_varlen_func`) would run.

    Nothing is computed and no tensor's data is read.

    Args:
        q, k, v: tensors on any device ("meta" too), whose strides then count, or shapes.
        cu_seqlens_q, cu_seqlens_k: tensors, or their shape (batch + 1,).
        max_seqlen_q, max_seqlen_k: as in the call.
        backward: explain the backward of the call instead.
        dtype: of q, k and v, where they are shapes.
        device: a torch device, a name in `flashattn_ext.plan.DEVICES` ("h200", "a100", "rtx4090",
            "cpu", ...) or DeviceFacts. None: that of q; for shapes and meta tensors the current
            CUDA device, or the CPU where there is none.
        The other arguments are the call's.

    Returns:
        A `Plan`. Where no kernel runs the call its family is None and its error the sentence that
        the call would raise.

    Raises:
        RuntimeError: for shapes and values that the call itself would refuse.
        ValueError: `device` names nothing known, `causal` is none of its values, or cu_seqlens_q
            comes without cu_seqlens_k, max_seqlen_q and max_seqlen_k.
    """
    facts = device_facts(device, q)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        mask, rel_bias, sink, block_mask, None, plan,
    )  # fmt: skip
    extra = {"bias": bias, "key_bias": key_bias, "seqused_q": seqused_q, "seqused_k": seqused_k}
    options |= {name: value for name, value in extra.items() if value is not None}
    tensors = [as_meta(x, dtype) for x in (q, k, v)]
    lengths: tuple = ()
    if cu_seqlens_q is not None:
        if cu_seqlens_k is None or max_seqlen_q is None or max_seqlen_k is None:
            raise ValueError(
                "flashattn_ext: with cu_seqlens_q go cu_seqlens_k, max_seqlen_q and max_seqlen_k"
            )
        cu_seqlens = (as_meta(x, torch.int32) for x in (cu_seqlens_q, cu_seqlens_k))
        lengths = (*cu_seqlens, int(max_seqlen_q), int(max_seqlen_k))
    check(tensors, lengths, options)

    problem = make_problem(tensors, lengths, options, backward)
    for name, x in zip("qkv", (q, k, v)):
        if isinstance(x, Tensor) and not x.is_meta:
            layout = getattr(problem, name)
            layout.aligned = x.data_ptr() % 16 == 0
    native = _native.explain(problem, native_device(facts), plan or "")
    return Plan(
        op=("varlen_" if lengths else "") + ("bwd" if backward else "fwd"),
        device=facts,
        family=native.family or None,
        error=f"flashattn_ext: {native.error}" if native.error else None,
        kernels=tuple(
            Kernel(**{name: getattr(kernel, name) for name in Kernel.__dataclass_fields__})
            for kernel in native.kernels
        ),
        rejected={rejection.family: rejection.reason for rejection in native.rejected},
        copies=tuple(native.copies),
        window=native.window,
        empty=native.empty,
        deterministic=native.deterministic,
        workspace_bytes=native.workspace_bytes,
        workspace_formula=native.workspace_formula,
    )


def device_facts(device: str | torch.device | DeviceFacts | None, q: Any = None) -> DeviceFacts:
    """The facts of `device` as `explain` takes it; `q` decides where it is None."""
    if isinstance(device, DeviceFacts):
        return device
    if isinstance(device, str) and device in DEVICES:
        return DEVICES[device]
    if device is None:
        if isinstance(q, Tensor) and not q.is_meta:
            device = q.device
        else:
            device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"flashattn_ext: device must be a torch device or one of {', '.join(DEVICES)}, "
            f"got {device!r}"
        ) from None
    if device.type != "cuda":
        return CPU
    facts: Any = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        name=facts.name,
        compute_capability=(facts.major, facts.minor),
        num_sms=facts.multi_processor_count,
        smem_per_block_bytes=facts.shared_memory_per_block_optin,
        smem_per_sm_bytes=facts.shared_memory_per_multiprocessor,
    )


def native_device(facts: DeviceFacts) -> Any:
    """`facts` as csrc/plan/device_info.h has them."""
    device = _native.DeviceInfo()
    device.is_cuda = facts.is_cuda
    device.cc_major, device.cc_minor = facts.compute_capability
    device.num_sms = facts.num_sms
    device.smem_per_block_bytes = facts.smem_per_block_bytes
    device.smem_per_sm_bytes = facts.smem_per_sm_bytes
    return device


def as_meta(x: Tensor | Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without data of the shape and strides of `x`, which may be just a shape."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.empty(tuple(x), dtype=dtype, device="meta")


def check(tensors: list[Tensor], lengths: tuple, options: dict[str, Any]) -> None:
    """Raise what the call itself would raise before it asks for a plan."""
    ops = torch.ops.flashattn_ext
    op = ops.varlen_fwd.default if lengths else ops.fwd.default
    meta = {
        name: as_meta(value, value.dtype) if isinstance(value, Tensor) else value
        for name, value in options.items()
        if name != "plan"  # an unknown name is part of the explanation
    }
    op(*tensors, *lengths, **meta)


def layout(tensor: Tensor) -> Any:
    """How `tensor` lies in memory, as csrc/plan/problem.h has it."""

    def stride(dim: int) -> int:
        return tensor.stride(dim) if tensor.shape[dim] > 1 else 0

    native = _native.Layout()
    strides = _native.Strides()
    strides.batch = stride(0) if tensor.dim() == 4 else 0
    strides.row, strides.head = stride(-3), stride(-2)
    native.strides = strides
    native.contiguous_last = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    return native


def make_problem(
    tensors: list[Tensor], lengths: tuple, options: dict[str, Any], backward: bool
) -> Any:
    """A call as csrc/plan/problem.h has it; `make_problem` of csrc/binding/cuda.cpp in Python."""
    q, k, v = tensors
    problem = _native.Problem()
    problem.op = _native.Op.backward if backward else _native.Op.forward
    problem.dtype = SCALAR_TYPES.get(q.dtype, _native.ScalarType.other)
    problem.varlen = bool(lengths)
    problem.num_heads_q, problem.head_dim = q.shape[-2:]
    problem.num_heads_k, problem.head_dim_v = v.shape[-2:]
    if lengths:
        problem.batch = lengths[0].shape[0] - 1
        problem.total_q, problem.total_k = q.shape[0], k.shape[0]
        problem.seqlen_q = min(lengths[2], problem.total_q)
        problem.seqlen_k = min(lengths[3], problem.total_k)
    else:
        problem.batch, problem.seqlen_q = q.shape[:2]
        problem.seqlen_k = k.shape[1]
        problem.total_q = problem.batch * problem.seqlen_q
        problem.total_k = problem.batch * problem.seqlen_k
    problem.q, problem.k, problem.v = layout(q), layout(k), layout(v)
    if backward:  # out is the forward's own, and dout is taken to lie like it
        problem.out = layout(torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="meta"))
        problem.dout = problem.out
    problem.causal = options.get("causal", False)
    problem.top_left = options.get("top_left", False)
    problem.window_left = options.get("window_left", -1)
    problem.window_right = options.get("window_right", -1)
    for name, bit in _native.OPTION_BITS.items():
        if name in options:
            problem.options |= bit
    problem.plain_logits = not options.get("softcap", 0) and options.get("softmax_scale", 1) > 0
    problem.rather_deterministic = torch.are_deterministic_algorithms_enabled()
    problem.deterministic = options.get("deterministic", False) or (
        problem.rather_deterministic and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return problem
