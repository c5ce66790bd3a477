"""Drives CMake; everything about the package itself is in pyproject.toml.

`CMakeLists.txt` describes the native build. This file decides for whom (which Python and torch),
for which GPUs and with how many jobs, and keeps one build folder per combination under build/, so
that a rebuild compiles only what changed. torch is located, not imported.

Environment:
    MAX_JOBS                      compilers at once (default: from cores and free memory)
    FLASHATTN_EXT_CUDA_ARCHS      such as "8.0;9.0" (default: TORCH_CUDA_ARCH_LIST, then the GPU
                                  that is visible, then both)
    FLASHATTN_EXT_SKIP_CUDA=1     build the CPU path only
    FLASHATTN_EXT_STRICT=1        spills above the allowance stop the build
    FLASHATTN_EXT_LINEINFO=1      keep source lines in the kernels, for profilers
    FLASHATTN_EXT_PYTHON          build for this interpreter and its torch instead
    FLASHATTN_EXT_TORCH_DIR       torch's folder, where that interpreter does not find it
    CUDA_HOME, CXX, CMAKE_ARGS    as everywhere; -DFLASHATTN_EXT_DEVICE_TESTS=ON is of use
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = "8.0;9.0"
FLAGS = [f"FLASHATTN_EXT_{name}" for name in ("SKIP_CUDA", "STRICT", "LINEINFO")]
JOB_BYTES = 2 << 30  # one compiler at work: g++ on torch's headers peaks near 1.5 GB

NO_TORCH = (
    "flashattn_ext is built against the torch it will run with, and this build sees none. Install "
    "torch first, then run: pip install --no-build-isolation ."
)
NO_COMPILER = (
    "flashattn_ext needs a C++20 compiler and found none: install g++ 11 or newer (Debian and "
    "Ubuntu: the package g++), or set CXX to yours."
)


def environment_flag(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def target_python() -> str:
    """The interpreter to build for.

    An environment's python, python3 and python3.x are one: always the same name, because the name
    is part of the compile commands and a new command recompiles everything.
    """
    versioned = Path(sys.executable).with_name("python{}.{}".format(*sys.version_info))
    running = str(versioned) if versioned.exists() else sys.executable
    return os.environ.get("FLASHATTN_EXT_PYTHON", running)


def python_facts() -> dict[str, str]:
    """What `cmake/python_facts.py` says about the interpreter to build for."""
    command = [target_python(), str(ROOT / "cmake" / "python_facts.py")]
    if torch_folder := os.environ.get("FLASHATTN_EXT_TORCH_DIR"):
        command.append(torch_folder)
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def build_folder(facts: dict[str, str]) -> Path:
    cuda = "" if environment_flag("FLASHATTN_EXT_SKIP_CUDA") else facts["torch_cuda"]
    version = facts["torch_version"].partition("+")[0]
    return ROOT / "build" / f"{facts['python']}-torch{version}-{f'cu{cuda}' if cuda else 'cpu'}"


def pypi_tool(name: str, folder: str) -> str:
    """Path of cmake or ninja from its PyPI package: a distribution's own may be too old."""
    try:
        return str(Path(getattr(importlib.import_module(name), folder)) / name)
    except (ImportError, AttributeError):  # AttributeError: found this repository's cmake/ instead
        sys.exit(f"flashattn_ext builds with {name} from PyPI: pip install 'cmake>=3.26' ninja")


def cuda_archs() -> str:
    """Compute capabilities to build for, as CMake's list."""
    for variable in ("FLASHATTN_EXT_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        if value := os.environ.get(variable):
            return ";".join(re.split(r"[;,\s]+", value.replace("+PTX", "").strip()))
    if nvidia_smi := shutil.which("nvidia-smi"):
        query = [nvidia_smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True)
        if archs := sorted(set(re.findall(r"^\d+\.\d$", answer.stdout, re.MULTILINE))):
            return ";".join(archs)
    return DEFAULT_ARCHS


def free_bytes() -> int:
    """Memory that may be used: the machine's, or what the container's limit leaves."""
    free = sys.maxsize
    with contextlib.suppress(OSError):
        if available := re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text()):
            free = int(available[1]) << 10
    with contextlib.suppress(OSError, ValueError):  # ValueError: memory.max is the word "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


def max_jobs() -> int:
    if jobs := os.environ.get("MAX_JOBS"):
        return max(1, int(jobs))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, free_bytes() // JOB_BYTES))


class CMakeBuild(build_ext):
    """Builds `flashattn_ext._C` in build/<python>-torch<version>-<cuda or cpu>/."""

    def finalize_options(self) -> None:
        self.facts = python_facts()
        super().finalize_options()
        if "FLASHATTN_EXT_PYTHON" in os.environ:
            # Another Python's module stays out of build/lib*, whose content goes into wheels.
            self.build_lib = str(build_folder(self.facts))

    def get_ext_filename(self, fullname: str) -> str:
        """Named for the interpreter built for, which need not be the running one."""
        return str(Path(*fullname.split("."))) + self.facts["ext_suffix"]

    def build_extension(self, ext: Extension) -> None:
        if not self.facts["torch"]:
            sys.exit(NO_TORCH)
        if not shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]):
            sys.exit(NO_COMPILER)
        folder = build_folder(self.facts)
        options = {
            "CMAKE_MAKE_PROGRAM": pypi_tool("ninja", "BIN_DIR"),
            "FLASHATTN_EXT_PYTHON": target_python(),
            "FLASHATTN_EXT_TORCH_DIR": os.environ.get("FLASHATTN_EXT_TORCH_DIR", ""),
            "FLASHATTN_EXT_CUDA_ARCHS": cuda_archs(),
            **{name: environment_flag(name) for name in FLAGS},
        }
        cmake = pypi_tool("cmake", "CMAKE_BIN_DIR")
        configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
        configure += [f"-D{name}={value}" for name, value in options.items()]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        jobs = max_jobs()
        print(f"flashattn_ext: building in {folder} with {jobs} jobs", flush=True)
        for command in (configure, [cmake, "--build", str(folder), "--parallel", str(jobs)]):
            if code := subprocess.call(command):
                sys.exit(f"flashattn_ext: the native build failed ({code}); its output is above.")

        built = folder / self.get_ext_filename(ext.name)
        wanted = Path(self.get_ext_fullpath(ext.name))
        if built != wanted:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built, wanted)


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("flashattn_ext._C", sources=[])],
        cmdclass={"build_ext": CMakeBuild},
    )
