"""Checks the machine code of every kernel: tensor-core instructions, and local memory.

    python -m tools.check_sass MODULE.so [--table]

A kernel named in `tools/sass_expectation.txt` holds at least the stated numbers of instructions.
Local loads and stores (LDL, STL: spills, or an array that did not stay in registers) stay within
`tools/ptxas_allowance.txt`. cuobjdump and nvdisasm come from PyPI (the dev extra).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tools import check_ptxas

EXPECTATION = Path(__file__).with_name("sass_expectation.txt")
ARCH = re.compile(r"^\s*arch = (sm_\w+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)\s*$")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
LOCAL_BYTES = 4  # the least that one LDL or STL moves


@dataclass
class Code:
    """One kernel's machine code for one arch."""

    name: str
    arch: str
    counts: Counter[str] = field(default_factory=Counter)


def cuda_tool(name: str) -> str:
    """Path of cuobjdump or nvdisasm, in the nvidia packages of this environment."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob(f"*/bin/{name}")):
            return str(path)
    sys.exit(f"no {name} in this environment: pip install nvidia-cuda-{name}, or run `make dev`")


def disassemble(module: Path) -> str:
    """cuobjdump's text of every kernel in the module (it finds nvdisasm on PATH)."""
    path = f"{Path(cuda_tool('nvdisasm')).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [cuda_tool("cuobjdump"), "--dump-sass", str(module)]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    if result.returncode:
        sys.exit(f"cuobjdump could not read {module}: {result.stderr.strip()}")
    return result.stdout


def parse(text: str) -> list[Code]:
    """Instruction counts by opcode (LDSM of `LDSM.16.M88.4`) of every kernel."""
    codes: list[Code] = []
    arch = ""
    for line in text.splitlines():
        if match := ARCH.match(line):
            arch = match[1]
        elif match := FUNCTION.match(line):
            codes.append(Code(match[1], arch))
        elif codes and (match := INSTRUCTION.match(line)):
            codes[-1].counts[match[1]] += 1
    return codes


def read_expectation(text: str) -> list[tuple[re.Pattern[str], dict[str, int]]]:
    """Rows (kernel pattern, least count by opcode); format in the file's own header."""
    rows = []
    for line in text.splitlines():
        pattern, *bounds = line.partition("#")[0].split() or [""]
        if pattern:
            least = {opcode: int(count) for opcode, _, count in (b.partition(">=") for b in bounds)}
            rows.append((re.compile(pattern), least))
    return rows


def findings(
    codes: list[Code],
    expectation: list[tuple[re.Pattern[str], dict[str, int]]],
    allowance: list[tuple[re.Pattern[str], str, int]],
) -> list[str]:
    """How the kernels depart from what is expected."""
    found = []
    for code in codes:
        local = LOCAL_BYTES * (code.counts["LDL"] + code.counts["STL"])
        allowed = check_ptxas.allowed_bytes(code.name, code.arch, allowance)
        if local > allowed:
            moved = f"moves {local} bytes or more through local memory, allowed {allowed}"
            found.append(f"{code.name} ({code.arch}) {moved}")
    for pattern, least in expectation:
        named = [code for code in codes if pattern.search(code.name)]
        if not named:  # a renamed kernel must not go unchecked
            found.append(f"no kernel of this module is named like {pattern.pattern}")
        found += [
            f"{code.name} ({code.arch}) holds {code.counts[opcode]} {opcode}, expected {count}"
            for code in named
            for opcode, count in least.items()
            if code.counts[opcode] < count
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", type=Path, help="flashattn_ext/_C.*.so or an object file")
    parser.add_argument("--table", action="store_true", help="print the counts of every kernel")
    arguments = parser.parse_args()

    codes = parse(disassemble(arguments.module))
    for code, name in zip(codes, check_ptxas.demangle([code.name for code in codes])):
        code.name = name
    if arguments.table:
        for code in sorted(codes, key=lambda code: (code.name, code.arch)):
            shown = ("HMMA", "HGMMA", "LDSM", "LDGSTS", "UTMALDG", "MUFU", "LDL", "STL")
            counts = "  ".join(f"{opcode} {code.counts[opcode]:4}" for opcode in shown)
            print(f"{code.arch:7} {counts}  {code.name}")
    found = findings(
        codes,
        read_expectation(EXPECTATION.read_text()),
        check_ptxas.read_allowance(check_ptxas.ALLOWANCE.read_text()),
    )
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    print(f"sass: {len(codes)} kernels, {len(found)} findings")
    return 1 if found or not codes else 0


if __name__ == "__main__":
    sys.exit(main())
