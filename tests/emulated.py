"""Kernels on the CPU, by `tests/emulator/`: the sources of `csrc/` themselves, with fibers for
threads and the PTX wrappers written out. Slow, so for problems of a few tiles.

`run(x, options, forward, backward, rows)` gives what `harness.run` gives, by the kernels of the
named families, with the named rows of their tile tables.
"""

import ctypes
import functools
import importlib.util
import math
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from cases import Tensors

import flashattn_ext

ROOT = Path(__file__).resolve().parent.parent
CSRC, EMULATOR = ROOT / "csrc", ROOT / "tests" / "emulator"
FORWARDS = {"sm80": "sm80.fwd", "sm90": "sm90.fwd"}
BACKWARDS = {
    "sm80": ("sm80.bwd_dq", "sm80.bwd_dkv"),
    "sm90": ("sm90.bwd_dq", "sm90.bwd_dkv"),
    "sm90_fused": ("sm90.bwd_fused",),
}
UNLIMITED = 1 << 30  # attention/params.h
LAUNCH = re.compile(r"([\w:]+(?:<[\w:, ]+>)?)\s*<<<(.*?)>>>\(", re.DOTALL)
SOURCES = ("sm80/**/*.cu", "sm90/inst/*.cu", "sm90/launch.cu", "smxx/bwd_delta.cu")


def cuda_headers() -> Path | None:
    """The folder of the toolkit's headers: their 16-bit types work on the host as well."""
    nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
    toolkits = [nvcc.parent.parent, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    package = importlib.util.find_spec("nvidia")  # what torch's wheels bring
    for folder in package.submodule_search_locations or () if package else ():
        toolkits += sorted(Path(folder).glob("cu*"))
    headers = (toolkit / "include" for toolkit in toolkits)
    return next((folder for folder in headers if (folder / "cuda_bf16.h").is_file()), None)


def missing() -> str | None:
    """Why the kernels cannot be emulated here; None where they can."""
    if shutil.which("g++") is None:
        return "needs g++"
    return None if cuda_headers() else "needs the CUDA toolkit's headers"


def for_a_host_compiler(text: str) -> str:
    """Launches become calls, and dynamic shared memory an array like any other."""
    return LAUNCH.sub(r"emulator::Launch{\2}(\1, ", text).replace("extern __shared__", "extern")


def compile_one(source: Path, folder: Path, includes: Path = CSRC) -> Path:
    """An object file."""
    target = folder / ("-".join(source.parts[-3:]) + ".o")
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-x", "c++", "-Wno-psabi"]
    command += ["-D__CUDA_ARCH_FEAT_SM90_ALL", "-include", "emulator.h"]
    command += [f"-I{EMULATOR / 'include'}", f"-I{includes}", "-isystem", str(cuda_headers())]
    subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
    return target


@functools.cache
def library() -> ctypes.CDLL:
    """Compiled once a session: about half a minute on two cores."""
    folder = Path(tempfile.mkdtemp(prefix="flashattn_ext-emulator-"))
    csrc = folder / "csrc"
    for source in filter(Path.is_file, CSRC.rglob("*")):
        copy = csrc / source.relative_to(CSRC)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(for_a_host_compiler(source.read_text()))
    sources = [*EMULATOR.glob("*.cpp"), *(path for each in SOURCES for path in csrc.glob(each))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: compile_one(source, folder, csrc), sources))
    module = folder / "emulator.so"
    # Symbolic: torch has brought the CUDA runtime whose functions the emulator has its own of.
    link = ["g++", "-shared", "-Wl,-Bsymbolic", *map(str, objects), "-o", str(module)]
    subprocess.run(link, check=True)
    loaded = ctypes.CDLL(str(module))
    shutil.rmtree(folder)
    loaded.tile_of.restype = loaded.launch.restype = ctypes.c_bool
    assert loaded.params_bytes() == ctypes.sizeof(Params), "not the BwdParams of params.h"
    return loaded


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "row", "head")]


POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Params(ctypes.Structure):
    """`BwdParams` of attention/params.h, field by field."""

    _fields_ = [
        *((name, POINTER) for name in ("q", "k", "v")),
        *((f"{name}_strides", Strides) for name in ("q", "k", "v")),
        *((name, POINTER) for name in ("out", "lse")),
        ("out_strides", Strides),
        *((name, INT64) for name in ("lse_batch_stride", "lse_head_stride")),
        *((name, INT32) for name in ("batch", "num_heads_q", "num_heads_k", "seqlen_q")),
        *((name, INT32) for name in ("seqlen_k", "head_dim", "head_dim_v")),
        *((name, INT64) for name in ("total_q", "total_k")),
        *((name, POINTER) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")),
        *((name, FLOAT) for name in ("softmax_scale", "softcap")),
        *((name, INT32) for name in ("window_left", "window_right")),
        ("top_left", ctypes.c_bool),
        ("dtype", INT32),
        *((name, POINTER) for name in ("dout", "dlse")),
        ("dout_strides", Strides),
        *((name, INT64) for name in ("dlse_batch_stride", "dlse_head_stride", "dlse_row_stride")),
        *((name, POINTER) for name in ("dq", "dk", "dv")),
        *((f"{name}_strides", Strides) for name in ("dq", "dk", "dv")),
        *((name, POINTER) for name in ("delta", "lse_log2")),
    ]


def tiles(kernel: str) -> list[tuple[int, ...]]:
    """(bucket, that of Dv, block_m, block_n) of every row of the kernel's table."""
    rows, numbers = [], (INT32 * 4)()
    while library().tile_of(kernel.encode(), len(rows), numbers):
        rows.append(tuple(numbers))
    return rows


def row_for(kernel: str, head_dim: int, head_dim_v: int) -> int:
    """The first row whose buckets hold the head dims."""
    rows = enumerate(tiles(kernel))
    return next(row for row, tile in rows if head_dim <= tile[0] and head_dim_v <= tile[1])


def run(
    x: Tensors,
    options: dict,
    forward: str = "sm80",
    backward: str = "sm80",
    rows: dict[str, int] | None = None,
    *,
    with_dlse: bool = False,
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of one forward and backward; `rows`: of the tables, by kernel."""
    head_dim, head_dim_v = x.q.shape[-1], x.v.shape[-1]
    varlen = bool(x.lengths)
    *batch, rows_q, heads_q, _ = x.q.shape
    out = torch.full((*batch, rows_q, heads_q, head_dim_v), math.nan, dtype=x.q.dtype)
    lse = torch.full((*batch, heads_q, rows_q), math.nan)
    dq, dk, dv = (torch.full_like(t, math.nan, memory_format=torch.contiguous_format)
                  for t in (x.q, x.k, x.v))  # fmt: skip
    delta, lse_log2 = torch.full_like(lse, math.nan), torch.full_like(lse, math.nan)

    p = Params(dtype=int(x.q.dtype == torch.bfloat16))
    p.head_dim, p.head_dim_v, p.num_heads_q, p.num_heads_k = (
        head_dim, head_dim_v, heads_q, x.k.shape[-2]
    )  # fmt: skip
    if varlen:
        cu_seqlens = {name: t.contiguous() for name, t in x.lengths.items() if torch.is_tensor(t)}
        for name, t in cu_seqlens.items():
            setattr(p, name, t.data_ptr())
        p.batch = len(cu_seqlens["cu_seqlens_q"]) - 1
        p.seqlen_q, p.seqlen_k = (int(x.lengths[f"max_seqlen_{side}"]) for side in "qk")
        p.total_q, p.total_k = len(x.q), len(x.k)
        p.lse_head_stride = rows_q
    else:
        p.batch, p.seqlen_q, p.seqlen_k = batch[0], rows_q, x.k.shape[1]
        p.total_q, p.total_k = p.batch * rows_q, p.batch * p.seqlen_k
        p.lse_batch_stride, p.lse_head_stride = heads_q * rows_q, rows_q
    tensors = {"q": x.q, "k": x.k, "v": x.v, "out": out, "dout": x.dout}
    for name, t in {**tensors, "dq": dq, "dk": dk, "dv": dv}.items():
        setattr(p, name, t.data_ptr())
        row, head = t.stride()[-3:-1]
        setattr(p, f"{name}_strides", Strides(0 if varlen else t.stride(0), row, head))
    p.lse, p.delta, p.lse_log2 = lse.data_ptr(), delta.data_ptr(), lse_log2.data_ptr()
    if with_dlse:
        p.dlse = x.dlse.data_ptr()
        p.dlse_batch_stride = 0 if varlen else x.dlse.stride(0)
        p.dlse_head_stride, p.dlse_row_stride = x.dlse.stride()[-2:]

    window = flashattn_ext.explain(x.q, x.k, x.v, **x.lengths, **options).window
    p.window_left, p.window_right = (UNLIMITED if bound < 0 else bound for bound in window)
    p.top_left = options.get("causal") == "top_left"
    p.softcap = options.get("softcap", 0.0)
    p.softmax_scale = options.get("softmax_scale") or 1 / math.sqrt(head_dim)

    def launch(kernel: str) -> None:
        row = (rows or {}).get(kernel, row_for(kernel, head_dim, head_dim_v))
        assert library().launch(kernel.encode(), row, ctypes.byref(p)), kernel

    launch(FORWARDS[forward])
    library().launch_delta(ctypes.byref(p))
    for kernel in BACKWARDS[backward]:
        launch(kernel)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
