"""Imports the native module `_C`, after checking that it was built for the torch that is running.

A module built for another torch minor version fails to load with an undefined symbol, or loads and
crashes. Every build carries a stamp (`cmake/flashattn_ext_build_info.h.in`), a JSON text that is
read from the file before it is loaded; a mismatch is an ImportError that says what to do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import mmap
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ._source_hash import csrc_sha256

MARKER = b"flashattn_ext-stamp:"
REBUILD = "Build it for this torch: pip install --no-build-isolation ."


def minor(version: str | None) -> str:
    """ "2.11" of "2.11.0+cu130"; "" of None."""
    return ".".join((version or "").split(".")[:2])


def read_stamp(path: Path) -> dict[str, str]:
    """The stamp in the file of a native module, found without loading it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(MARKER)
        if start < 0:
            raise ImportError(f"{path} carries no stamp of flashattn_ext. {REBUILD}")
        start += len(MARKER)
        return json.loads(data[start : data.find(b"\0", start)])


def mismatch(stamp: dict[str, str], torch_version: str, torch_cuda: str | None) -> str:
    """Why a module with this stamp must not be loaded into this torch; "" when it may."""
    if minor(stamp["torch"]) != minor(torch_version):
        return f"was built for torch {minor(stamp['torch'])}.x and found torch {torch_version}"
    if stamp["cuda"] and not torch_cuda:
        return (
            f"was built for CUDA {stamp['cuda']} and found torch {torch_version}, a CPU-only build"
        )
    if stamp["cuda"] and stamp["cuda"].split(".")[0] != (torch_cuda or "").split(".")[0]:
        return f"was built for CUDA {stamp['cuda']} and found a torch for CUDA {torch_cuda}"
    return ""


@functools.cache
def find_native() -> Path:
    """The file of `_C` for the running interpreter."""
    spec = importlib.util.find_spec(f"{__package__}._C")
    if spec is None or spec.origin is None:
        raise ImportError(
            "flashattn_ext has no native module for this Python: the package was not built, or "
            f"was built for another Python. {REBUILD}"
        )
    return Path(spec.origin)


@functools.cache
def load_native() -> ModuleType:
    """Import `flashattn_ext._C` (torch's libraries are loaded by then).

    Raises ImportError when it is missing, or was built for another torch or CUDA. Warns when a
    checkout's `csrc/` has changed since it was built.
    """
    path = find_native()
    stamp = read_stamp(path)
    if reason := mismatch(stamp, torch.__version__, torch.version.cuda):
        raise ImportError(f"flashattn_ext {reason}. {REBUILD}")
    try:
        native = importlib.import_module(f"{__package__}._C")
    except ImportError as error:
        raise ImportError(
            f"flashattn_ext, built for torch {stamp['torch']}, does not load into torch "
            f"{torch.__version__} ({error}). {REBUILD}"
        ) from error
    if csrc_sha256() not in (None, stamp["source_hash"]):
        warnings.warn(
            "csrc/ has changed since flashattn_ext was built: run `make build`.",
            RuntimeWarning,
            stacklevel=2,
        )
    return native


def build_info() -> dict[str, Any]:
    """Facts about the native module that is installed, for `show_config()`.

    Returns:
        torch: version it was built for, such as "2.11.0+cu130".
        cuda: version of the CUDA toolkit, "" when it holds the CPU path only.
        archs: compute capabilities it holds machine code for, such as ["8.0", "9.0"].
        python: "cp312".
        source_hash: `csrc_sha256()` of its sources.
        no_cuda_reason: why it holds the CPU path only; "" when it does not.
    """
    stamp = read_stamp(find_native())
    return {**stamp, "archs": stamp["archs"].split()}
