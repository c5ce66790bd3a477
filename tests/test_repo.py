"""The repository's own rules: layers, sizes, links, and checks that would notice a breach."""

import re
from pathlib import Path

import pytest
from sass_listing import listing

from tools import check_layers, check_links, check_ptxas, check_sass, sass

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def git_files():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: the checks ask git which files are the project's")
    return check_layers.tracked_files()


# ---- Layers and sizes ----


def test_layers_and_sizes(git_files):
    assert list(check_layers.problems()) == []


@pytest.mark.parametrize(
    ("file", "text", "wanted"),
    [
        ("tile/a.cuh", '#include "ptx/mma_sync.cuh"', None),
        ("tile/a.cuh", '#include "attention/mask.cuh"', "tile/ may not know attention/"),
        ("sm80/a.cuh", '#include "sm90/b.cuh"', "sm80/ may not know sm90/"),
        ("plan/a.h", '#include "sm80/tiles.h"', None),
        ("plan/a.h", '#include "sm80/fwd_kernel.cuh"', "sees .h files only"),
        ("plan/a.cpp", "#include <torch/library.h>", "stop at csrc/binding/"),
        ("binding/ops.cpp", "#include <torch/library.h>", None),
        ("binding/ops.cpp", "#include <pybind11/stl.h>", "pybind11, and only it, in module.cpp"),
        ("binding/module.cpp", "#include <ATen/core/Tensor.h>", "pybind11, and only it"),
        ("ptx/a.cuh", 'asm volatile("bar.sync 0;");', None),
        ("attention/a.cuh", 'asm volatile("bar.sync 0;");', "asm belongs in csrc/ptx/"),
        ("attention/a.cuh", "// asm (inline) lives elsewhere", None),
        ("other/a.h", "", "is not a layer"),
    ],
)
def test_layer_rule(file, text, wanted):
    found = " ".join(check_layers.layer_problems(file, text))
    assert (wanted in found) if wanted else not found


@pytest.mark.parametrize("text", ["\n" * 601, "x" * 101, "# " + "todo".upper()])
def test_size_rule(text):
    assert list(check_layers.size_problems("csrc/tile/a.cuh", text))


def test_unused_headers_are_found():
    sources = {"tile/a.cuh": "", "tile/b.cuh": "", "sm80/c.cu": '#include "tile/a.cuh"'}
    assert list(check_layers.unused_headers(sources)) == ["csrc/tile/b.cuh: no file includes it"]


# ---- Documents ----


def test_links_and_commands(git_files):
    assert list(check_links.problems()) == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("[build](CMakeLists.txt) and [web](https://example.org/x)", 0),
        ("[gone](no/such/file.md)", 1),
        ("# Two words\n[there](#two-words) and [not there](#three-words)", 1),
        ("`csrc/attention/params.h` and `csrc/attention/gone.h`", 1),
        ("```\nmake test\nmake demo   # make nothing of this\n```", 0),
        ("```\nmake believe\n```", 1),
        ("`python tools/check_links.py` and `python tools/gone.py`", 1),
        ("`python -m benchmarks.record --tests` and `python -m benchmarks.gone`", 1),
    ],
)
def test_document_check_notices(text, problems, tmp_path):
    document = ROOT / "README.md"
    targets = check_links.make_targets((ROOT / "Makefile").read_text())
    if "#two-words" in text:
        document = tmp_path / "document.md"
        document.write_text(text)
    found = [*check_links.link_problems(document, text), *check_links.code_problems(text, targets)]
    assert len(found) == problems, found


def test_readme_opens_with_its_two_commands():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^make (demo|test)\b", readme, re.MULTILINE)
    assert commands[:2] == ["demo", "test"]
    assert "make test\n" in (ROOT / ".ci" / "run").read_text()


def test_make_installs_what_pyproject_requires():
    pyproject = (ROOT / "pyproject.toml").read_text()
    required = re.search(r"^requires = \[(.*)\]$", pyproject, re.MULTILINE)[1]
    makefile = (ROOT / "Makefile").read_text()
    listed = re.search(r"^BUILD_REQUIRES = (.*)$", makefile, re.MULTILINE)[1]
    assert set(required.replace('"', "").split(", ")) == set(listed.replace('"', "").split())


# ---- The checks of compiler output ----

PTXAS_LOG = """\
ptxas info    : Compiling entry function '_Z4fwdk' for 'sm_90'
ptxas info    : Function properties for _Z4fwdk
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]
"""
C7510 = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async serialized in function f"


def run_check_ptxas(tmp_path, monkeypatch, log, allowance=""):
    (tmp_path / "a.o").touch()
    (tmp_path / "a.o.ptxas.log").write_text(log)
    (tmp_path / "allowance.txt").write_text(allowance)
    monkeypatch.setattr(check_ptxas, "ALLOWANCE", tmp_path / "allowance.txt")
    monkeypatch.setattr("sys.argv", ["check_ptxas", str(tmp_path), "--strict"])
    return check_ptxas.main()


def test_ptxas_log_is_read():
    (kernel,), notes = check_ptxas.parse_log(PTXAS_LOG.format(stores=8, loads=12))
    assert (kernel.name, kernel.arch, kernel.spill_bytes) == ("_Z4fwdk", "sm_90", 20)
    assert (kernel.registers, kernel.smem_bytes, notes) == (255, 128, [])


@pytest.mark.parametrize(
    ("spilled", "allowance", "status"),
    [
        (0, "", 0),
        (0, "8 sm_90 fwdk", 1),  # an allowance nobody needs
        (0, "8 sm_80 fwdk", 0),  # of an arch that was not built
        (4, "", 1),
        (4, "8 sm_90 fwdk", 0),
        (4, "8 sm_80 fwdk", 1),
        (4, "4 * fwdk", 1),
    ],
)
def test_spills_above_the_allowance_stop_a_strict_build(
    tmp_path, monkeypatch, spilled, allowance, status
):
    log = PTXAS_LOG.format(stores=spilled, loads=spilled)
    assert run_check_ptxas(tmp_path, monkeypatch, log, allowance) == status


def test_serialised_wgmma_stops_a_strict_build(tmp_path, monkeypatch):
    log = PTXAS_LOG.format(stores=0, loads=0) + C7510
    assert run_check_ptxas(tmp_path, monkeypatch, log) == 1


SASS = """\
	code for sm_90
Fatbin elf code:
================
arch = sm_90
		Function : fwd_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;  /* 0xa00 */
        /*0010*/              @!P0 LDSM.16.M88.4 R4, [R2] ;  /* 0x000000000204783b */
        /*0020*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;  /* 0x000000080404723c */
        /*0030*/              @!UP1 STL [R1], R4 ;  /* 0x0000000401007387 */
"""


def test_sass_is_counted():
    (code,) = check_sass.parse(SASS)
    assert (code.name, code.arch) == ("fwd_kernel", "sm_90")
    assert dict(code.counts) == {"LDC": 1, "LDSM": 1, "HMMA": 1, "STL": 1}


@pytest.mark.parametrize(
    ("expectation", "allowance", "wanted"),
    [
        ("", "", "moves 4 bytes or more through local memory, allowed 0"),
        ("", "4 sm_90 fwd", None),
        ("fwd HMMA>=1 LDSM>=1", "4 * fwd", None),
        ("fwd HMMA>=2", "4 * fwd", "holds 1 HMMA, expected 2"),
        ("bwd HMMA>=1", "4 * fwd", "no kernel of this module is named like bwd"),
    ],
)
def test_sass_expectation(expectation, allowance, wanted):
    rows = check_sass.read_expectation(expectation), check_ptxas.read_allowance(allowance)
    found = check_sass.findings(check_sass.parse(SASS), *rows)
    assert len(found) == (wanted is not None)
    assert not wanted or wanted in found[0]


# A tile loop around two key loops, and a waiting loop behind the code that jumps back into one.
LOOPS = listing(
    "LDC R1, c[0x0][0x28]",
    "tiles:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R2",  # 0x10
    "first:",
    "HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR4], RZ, !UPT",  # 0x20
    "R2UR UR4, R3",
    "@!P0 BRA {wait}",
    "waited:",
    "MUFU.EX2 R24, R24",  # 0x50
    "MUFU.EX2 R25, R25",
    "@P1 BRA {first}",
    "second:",
    "HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR4], RZ, !UPT",  # 0x80
    "MUFU.EX2 R24, R24",
    "MUFU.EX2 R25, R25",
    "LDL R7, [R1]",
    "@P1 BRA {second}",
    "HGMMA.64x64x16.F32.BF16 R24, R152, gdesc[UR4], RZ, !UPT",
    "STL [R1], R7",
    "@P2 BRA {tiles}",
    "EXIT",
    "wait:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R2",  # 0x110
    "@!P0 BRA {wait}",
    "BRA {waited}",
)


def test_loops_of_machine_code():
    (kernel,) = sass.parse(LOOPS)
    bodies = [sorted(line.address for line in loop) for loop in sass.natural_loops(kernel)]
    wait = [0x110, 0x120]
    first = [*range(0x20, 0x80, 0x10), *wait, 0x130]
    second = [*range(0x80, 0xD0, 0x10)]
    tile = sorted({*range(0x10, 0x100, 0x10), *first})
    assert sorted(bodies) == sorted([wait, first, second, tile])
    loops = check_sass.key_loops(kernel)
    assert [(loop["R2UR"], loop["LDL"], loop["STL"]) for loop in loops] == [(1, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize(
    ("bounds", "wanted"),
    [
        ("HGMMA>=3 loop.R2UR<=1 loop.LDL<=1 loop.STL<=0", None),
        ("loop.R2UR<=0", "a key loop holds 1 R2UR, at most 0 expected"),
        ("loop.LDL<=0", "a key loop holds 1 LDL, at most 0 expected"),
    ],
)
def test_bounds_of_key_loops(bounds, wanted):
    allowance = check_ptxas.read_allowance("8 * fwd")
    expectation = check_sass.read_expectation(f"fwd {bounds}")
    found = check_sass.findings(sass.parse(LOOPS), expectation, allowance)
    assert len(found) == (wanted is not None)
    assert not wanted or wanted in found[0]


def test_a_kernel_without_key_loops_is_noticed():
    expectation = check_sass.read_expectation("fwd loop.LDL<=0")
    found = check_sass.findings(
        sass.parse(listing("EXIT")), expectation, check_ptxas.read_allowance("")
    )
    assert found == ["fwd_kernel (sm_90a) has no key loop to check"]


def test_bounds_that_cannot_be_read():
    with pytest.raises(ValueError, match=r"neither OPCODE>=N nor loop.OPCODE<=N"):
        check_sass.read_expectation("fwd HGMMA<=3")
