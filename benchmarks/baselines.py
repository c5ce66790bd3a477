"""The implementations that are timed, each behind one signature.

`make(problem)` returns `attend(inputs) -> out`, or raises `Unavailable` with the reason: a package
that is not installed, an option the implementation does not have. `heads_first` says that it wants
(B, H, S, D), which `arrange` gives it as views of the same memory. `pinned()` is the context to
hold around the calls; SDPA's back end is chosen there, outside any loop, because choosing it costs
more than a call.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.problems import Inputs, Problem

Attend = Callable[[Inputs], torch.Tensor]


class Unavailable(Exception):
    """This implementation cannot run this problem here."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    name: str
    make: Callable[[Problem], Attend]
    version: Callable[[], str]
    heads_first: bool = False
    pinned: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    deterministic: bool = False  # asked for gradients that are equal from run to run

    def arrange(self, inputs: Inputs) -> Inputs:
        """`inputs` in this implementation's layout, as leaves over the same memory."""
        return inputs.heads_first() if self.heads_first else inputs

    def restore(self, result: torch.Tensor) -> torch.Tensor:
        """A result of this implementation in the library's layout."""
        return result.transpose(1, 2) if self.heads_first else result


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def _package_version(package: str) -> Callable[[], str]:
    def version() -> str:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{package} (from the source tree)"

    return version


def _refuse(problem: Problem, name: str, *, window: bool = False) -> None:
    if problem.lengths:
        raise Unavailable(f"{name} has no varlen form here")
    if problem.window != (-1, -1) and not window:
        raise Unavailable(f"{name} takes no window")


def _first(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """out of a function that may return more."""
    return result[0] if isinstance(result, tuple) else result


def make_flashattn_ext(
    problem: Problem, plan: str | None = None, deterministic: bool = False
) -> Attend:
    import flashattn_ext

    options: dict[str, Any] = {"causal": problem.causal}  # no more than needed: see bench_overhead
    if problem.window != (-1, -1):
        options["window_size"] = problem.window
    if plan is not None:
        options["plan"] = plan
    if deterministic:
        options["deterministic"] = True
    if problem.lengths:
        longest = max(problem.lengths)

        def attend_varlen(x: Inputs) -> torch.Tensor:
            return flashattn_ext.flash_attn_varlen_func(
                x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, longest, longest, **options
            )

        return attend_varlen

    def attend(x: Inputs) -> torch.Tensor:
        return flashattn_ext.flash_attn_func(x.q, x.k, x.v, **options)

    return attend


def make_sdpa(problem: Problem) -> Attend:
    _refuse(problem, "scaled_dot_product_attention")
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise Unavailable("scaled_dot_product_attention aligns causal top-left")
    options: dict[str, Any] = {"is_causal": problem.causal}
    if problem.heads_q != problem.heads_k:
        options["enable_gqa"] = True
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend(x: Inputs) -> torch.Tensor:
        return sdpa(x.q, x.k, x.v, **options)

    return attend


def make_torch_varlen(problem: Problem) -> Attend:
    """torch's own entry to the FA2 kernels for packed sequences."""
    if not problem.lengths:
        raise Unavailable("varlen_attn is the packed form")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no varlen_attn") from error
    longest, band = max(problem.lengths), problem.band

    def attend(x: Inputs) -> torch.Tensor:
        cu_seqlens = x.cu_seqlens
        return _first(
            varlen_attn(x.q, x.k, x.v, cu_seqlens, cu_seqlens, longest, longest, window_size=band)
        )

    return attend


def keep_backward_buffers() -> None:
    """Lets the backward of a function compiled from now on keep its graph, as timing does.

    A backward that was compiled while its graph was let go overwrites what was saved, and refuses
    to run otherwise. The switch is the process's; a torch that has none does not overwrite.
    """
    if hasattr(torch._functorch.config, "donated_buffer"):
        torch._functorch.config.donated_buffer = False


def _compiled_flex() -> Callable:
    """FlexAttention for one problem: what was compiled for others counts against no limit."""
    from torch.nn.attention.flex_attention import flex_attention

    keep_backward_buffers()
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def make_flex(problem: Problem) -> Attend:
    """FlexAttention, compiled; its block mask is built here, outside any timing."""
    from torch.nn.attention.flex_attention import create_block_mask

    _refuse(problem, "this FlexAttention baseline", window=True)
    left, right = problem.band
    offset = problem.seqlen_k - problem.seqlen_q

    def visible(_b, _h, i, j):
        seen = j >= 0
        if left >= 0:
            seen = seen & (j >= i + offset - left)
        if right >= 0:
            seen = seen & (j <= i + offset + right)
        return seen

    block_mask = None
    if (left, right) != (-1, -1):
        block_mask = create_block_mask(visible, None, None, problem.seqlen_q, problem.seqlen_k)
    flex, gqa = _compiled_flex(), problem.heads_q != problem.heads_k

    def attend(x: Inputs) -> torch.Tensor:
        return flex(x.q, x.k, x.v, block_mask=block_mask, enable_gqa=gqa)

    return attend


def _make_flash_attn(
    problem: Problem,
    module: str,
    unlimited: tuple[int | None, int | None],
    deterministic: bool = False,
) -> Attend:
    """Any of the flash-attn packages: FA2, FA3 and FA4 share the names that are used here."""
    try:
        flash = importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{module} is not importable: {error}") from error
    window = unlimited if problem.window == (-1, -1) else problem.window
    options: dict[str, Any] = {"causal": problem.causal, "window_size": window}
    if deterministic:
        options["deterministic"] = True

    if problem.lengths:
        longest = max(problem.lengths)

        def attend_varlen(x: Inputs) -> torch.Tensor:
            return _first(
                flash.flash_attn_varlen_func(
                    x.q,
                    x.k,
                    x.v,
                    cu_seqlens_q=x.cu_seqlens,
                    cu_seqlens_k=x.cu_seqlens,
                    max_seqlen_q=longest,
                    max_seqlen_k=longest,
                    **options,
                )
            )

        return attend_varlen

    def attend(x: Inputs) -> torch.Tensor:
        return _first(flash.flash_attn_func(x.q, x.k, x.v, **options))

    return attend


def _sdpa(name: str, backend: SDPBackend) -> Implementation:
    return Implementation(name, make_sdpa, _torch_version, True, lambda: sdpa_kernel(backend))


def _flash_attn(
    name: str,
    module: str,
    package: str,
    unlimited: tuple[int | None, int | None],
    deterministic: bool = False,
) -> Implementation:
    make = functools.partial(
        _make_flash_attn, module=module, unlimited=unlimited, deterministic=deterministic
    )
    return Implementation(name, make, _package_version(package), deterministic=deterministic)


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("flashattn_ext", make_flashattn_ext, _package_version("flashattn_ext")),
        _sdpa("sdpa_flash", SDPBackend.FLASH_ATTENTION),
        _sdpa("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
        _sdpa("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION),
        Implementation("torch_varlen", make_torch_varlen, _torch_version),
        Implementation("flex", make_flex, _torch_version, heads_first=True),
        _flash_attn("fa2", "flash_attn", "flash-attn", (-1, -1)),
        _flash_attn("fa3", "flash_attn_interface", "flash-attn-3", (-1, -1)),
        _flash_attn("fa4", "flash_attn.cute", "flash-attn-4", (None, None)),
        _flash_attn("fa4_deterministic", "flash_attn.cute", "flash-attn-4", (None, None), True),
    )
}
