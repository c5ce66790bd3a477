"""The build: what it decides, what it says when it cannot go on, and the stamp it leaves."""

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashattn_ext import _loader, _source_hash

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup_py():
    """The functions of setup.py."""
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def make_torch(folder: Path, version: str, cuda: str | None) -> Path:
    """A torch package of which only the text of `version.py` is usable."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    (package / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"
    )
    return package


def run_facts(*arguments: object, **environment: str) -> dict[str, str]:
    command = [sys.executable, ROOT / "cmake" / "python_facts.py", *arguments]
    environment = {**os.environ, **environment}
    return json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    )


def run_setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


# ---- Locating torch ----


@pytest.mark.parametrize(("cuda", "wanted"), [("13.0", "13.0"), (None, "")])
def test_torch_is_located_without_importing_it(tmp_path, cuda, wanted):
    folder = make_torch(tmp_path, "2.12.3+local", cuda)
    by_path = run_facts(PYTHONPATH=str(tmp_path))
    by_folder = run_facts(folder)
    for facts in (by_path, by_folder):
        assert facts["torch"] == str(folder)
        assert (facts["torch_version"], facts["torch_cuda"]) == ("2.12.3+local", wanted)
        assert facts["python"] == "cp{}{}".format(*sys.version_info)


def test_build_without_torch_says_what_to_do(tmp_path):
    result = run_setup("build_ext", FLASHATTN_EXT_TORCH_DIR=str(tmp_path))
    assert result.returncode != 0
    assert "pip install --no-build-isolation ." in result.stderr


def test_metadata_needs_no_torch(tmp_path):
    result = run_setup("--version", FLASHATTN_EXT_TORCH_DIR=str(tmp_path))
    assert result.stdout.strip().splitlines()[-1].count(".") == 2, result.stderr


def test_build_without_a_compiler_says_what_to_do():
    result = run_setup("build_ext", CXX="no-such-compiler")
    assert result.returncode != 0
    assert "C++20 compiler" in result.stderr


# ---- Choices of setup.py ----


@pytest.fixture
def no_archs_given(monkeypatch):
    monkeypatch.delenv("FLASHATTN_EXT_CUDA_ARCHS", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("FLASHATTN_EXT_CUDA_ARCHS", "9.0", "9.0"),
        ("FLASHATTN_EXT_CUDA_ARCHS", "8.0, 9.0", "8.0;9.0"),
        ("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX", "8.0;9.0a"),
    ],
)
@pytest.mark.usefixtures("no_archs_given")
def test_archs_come_from_the_environment(setup_py, monkeypatch, variable, value, wanted):
    monkeypatch.setenv(variable, value)
    assert setup_py["cuda_archs"]() == wanted


@pytest.mark.usefixtures("no_archs_given")
def test_archs_without_a_gpu_are_both(setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_py["cuda_archs"]() == "8.0;9.0"


@pytest.mark.usefixtures("no_archs_given")
def test_archs_are_those_of_the_visible_gpus(setup_py, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 9.0\necho 8.6\necho 9.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert setup_py["cuda_archs"]() == "8.6;9.0"


def test_jobs_fit_the_memory(setup_py, monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    max_jobs = setup_py["max_jobs"]
    monkeypatch.setitem(max_jobs.__globals__, "free_bytes", lambda: 1 << 28)
    assert max_jobs() == 1
    monkeypatch.setitem(max_jobs.__globals__, "free_bytes", lambda: 1 << 50)
    assert 1 <= max_jobs() <= os.cpu_count()
    monkeypatch.setenv("MAX_JOBS", "7")
    assert max_jobs() == 7


# ---- The stamp ----


def test_source_hash_is_the_documented_one(tmp_path):
    (tmp_path / "csrc" / "b").mkdir(parents=True)
    (tmp_path / "csrc" / "b" / "x.h").write_bytes(b"one")
    (tmp_path / "csrc" / "a.cu").write_bytes(b"two")
    wanted = hashlib.sha256(b"csrc/a.cu\0two\0csrc/b/x.h\0one\0").hexdigest()
    assert _source_hash.csrc_sha256(tmp_path) == wanted
    (tmp_path / "csrc" / "a.cu").rename(tmp_path / "csrc" / "c.cu")
    assert _source_hash.csrc_sha256(tmp_path) != wanted


def test_source_hash_of_an_installed_package_is_unknown(tmp_path):
    assert _source_hash.csrc_sha256(tmp_path) is None


def test_module_was_built_from_this_tree():
    assert _loader.build_info()["source_hash"] == _source_hash.csrc_sha256(), "run `make build`"


def test_build_info_says_what_the_module_holds():
    info = _loader.build_info()
    assert bool(info["cuda"]) == bool(info["archs"])
    assert bool(info["cuda"]) != bool(info["no_cuda_reason"])


@pytest.mark.parametrize(
    ("built", "running", "wanted"),
    [
        (("2.11.0+cu130", "13.0"), ("2.11.2+cu130", "13.0"), ""),
        (("2.11.0+cu130", ""), ("2.11.0+cu130", "13.0"), ""),
        (("2.11.0+cu130", "13.0"), ("2.14.1+cu130", "13.0"), "was built for torch 2.11.x"),
        (("2.11.0+cu130", "13.0"), ("2.11.0+cpu", None), "a CPU-only build"),
        (("2.11.0+cu130", "13.0"), ("2.11.0+cu128", "12.8"), "found a torch for CUDA 12.8"),
    ],
)
def test_stamp_of_another_torch_is_refused(built, running, wanted):
    reason = _loader.mismatch({"torch": built[0], "cuda": built[1]}, *running)
    assert wanted in reason
    assert bool(wanted) == bool(reason)


def test_module_for_another_torch_is_not_loaded(tmp_path, monkeypatch):
    module = tmp_path / "_C.so"
    stamp = {"torch": "1.13.1", "cuda": "", "archs": "", "python": "cp310", "source_hash": ""}
    module.write_bytes(b"\x7fELF..." + _loader.MARKER + json.dumps(stamp).encode() + b"\0...")
    monkeypatch.setattr(_loader, "find_native", lambda: module)
    with pytest.raises(ImportError, match=r"built for torch 1\.13\.x.*--no-build-isolation"):
        _loader.load_native.__wrapped__()


def test_module_without_a_stamp_is_refused(tmp_path):
    module = tmp_path / "_C.so"
    module.write_bytes(b"\x7fELF")
    with pytest.raises(ImportError, match="no stamp"):
        _loader.read_stamp(module)


# ---- A small build, from CMakeLists.txt to machine code ----

MODULE = """
#include <pybind11/pybind11.h>
#include "flashattn_ext_build_info.h"
PYBIND11_MODULE(_C, m) { m.attr("stamp") = flashattn_ext::build_info::kStamp; }
"""
PORTABLE = "__global__ void portable_kernel(int* p) { *p = 1; }\n"
HOPPER = '__global__ void hopper_kernel() { asm volatile("wgmma.fence.sync.aligned;"); }\n'


def build_small_tree(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Configure and build this CMakeLists.txt with one tiny source per folder."""
    cmake = pytest.importorskip("cmake", reason="needs cmake from PyPI")
    ninja = pytest.importorskip("ninja", reason="needs ninja from PyPI")
    for name in ("CMakeLists.txt", "cmake", "tools"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    sources = {
        "flashattn_ext/_source_hash.py": (ROOT / "flashattn_ext/_source_hash.py").read_text(),
        "tools/ptxas_allowance.txt": "",
        "csrc/binding/module.cpp": MODULE,
        "csrc/plan/plan.cpp": "int plan() { return 1; }\n",
        "csrc/binding/cuda.cpp": "#include <cuda_runtime_api.h>\n",
        "csrc/smxx/small.cu": PORTABLE,
        "csrc/sm90/hopper.cu": HOPPER,
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
    configure = [program, "-S", str(tmp_path), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}"]
    configure += [f"-DFLASHATTN_EXT_PYTHON={sys.executable}", *options]
    subprocess.run(configure, check=True, capture_output=True, text=True)
    build = [program, "--build", str(tmp_path / "build"), "--parallel", "1"]
    return subprocess.run(build, capture_output=True, text=True)


def small_module(tmp_path: Path) -> Path:
    (module,) = (tmp_path / "build" / "flashattn_ext").glob("_C.*")
    return module


@pytest.mark.slow
def test_build_without_cuda(tmp_path):
    result = build_small_tree(tmp_path, "-DFLASHATTN_EXT_SKIP_CUDA=ON")
    assert result.returncode == 0, result.stdout + result.stderr
    stamp = _loader.read_stamp(small_module(tmp_path))
    assert stamp["cuda"] == stamp["archs"] == ""
    assert stamp["no_cuda_reason"] == "FLASHATTN_EXT_SKIP_CUDA was set"
    assert stamp["source_hash"] == _source_hash.csrc_sha256(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA torch")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_every_folder_gets_its_archs(tmp_path):
    result = build_small_tree(tmp_path, "-DFLASHATTN_EXT_STRICT=ON")
    assert result.returncode == 0, result.stdout + result.stderr
    assert _loader.read_stamp(small_module(tmp_path))["archs"] == "8.0 9.0"
    check = [sys.executable, ROOT / "tools" / "check_ptxas.py", tmp_path / "build", "--table"]
    table = subprocess.run(check, check=True, capture_output=True, text=True).stdout.splitlines()
    built = {(line.split()[-1], line.split()[0]) for line in table if line.startswith("sm_")}
    assert built == {
        ("portable_kernel", "sm_80"),
        ("portable_kernel", "sm_90"),
        ("hopper_kernel", "sm_90a"),
    }
