"""Checks the machine code of every kernel: tensor-core instructions, and no local memory.

    python tools/check_sass.py MODULE.so [--table]

Kernels named in `tools/sass_expectation.txt` must hold at least the stated numbers of instructions;
local loads and stores (LDL, STL: spills, or an array that did not stay in registers) may be at
most what it allows, by default none. cuobjdump and nvdisasm come from PyPI (the dev extra).
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

EXPECTATION = Path(__file__).with_name("sass_expectation.txt")
ARCH = re.compile(r"^\s*arch = (sm_\w+)", re.MULTILINE)
FUNCTION = re.compile(r"^\s*Function : (\S+)\s*$")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
LOCAL_MEMORY = ("LDL", "STL")


@dataclass
class Code:
    """One kernel's machine code for one arch."""

    kernel: str
    arch: str
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Row:
    """One line of the expectation: `minimum` and `maximum` count instructions by opcode."""

    pattern: re.Pattern[str]
    arch: str
    minimum: dict[str, int]
    maximum: dict[str, int]


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


def read_expectation(text: str) -> list[Row]:
    """Rows `ARCH PATTERN OPCODE>=N OPCODE<=N ...`; the format is explained in the file."""
    rows = []
    for line in text.splitlines():
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        minimum: dict[str, int] = {}
        maximum: dict[str, int] = {}
        for bound in fields[2:]:
            opcode, relation, number = re.fullmatch(r"(\w+)([<>]=)(\d+)", bound).groups()
            (minimum if relation == ">=" else maximum)[opcode] = int(number)
        rows.append(Row(re.compile(fields[1]), fields[0], minimum, maximum))
    return rows


def findings(code: Code, rows: list[Row]) -> list[str]:
    """How one kernel departs from the expectation."""
    rows = [row for row in rows if row.arch in ("*", code.arch) and row.pattern.search(code.kernel)]
    minimum: dict[str, int] = {}
    maximum = dict.fromkeys(LOCAL_MEMORY, 0)
    for row in rows:  # a later row overrides an earlier one
        minimum |= row.minimum
        maximum |= row.maximum
    name = f"{code.kernel} ({code.arch})"
    found = [
        f"{name}: {code.counts[opcode]} {opcode}, at least {number} expected"
        for opcode, number in minimum.items()
        if code.counts[opcode] < number
    ]
    return found + [
        f"{name}: {code.counts[opcode]} {opcode}, at most {number} allowed"
        for opcode, number in maximum.items()
        if code.counts[opcode] > number
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", type=Path, help="flashattn_ext/_C.*.so or an object file")
    parser.add_argument("--table", action="store_true", help="print the counts of every kernel")
    arguments = parser.parse_args()

    codes = parse(disassemble(arguments.module))
    rows = read_expectation(EXPECTATION.read_text())
    if arguments.table:
        shown = ("HMMA", "LDSM", "LDGSTS", "HGMMA", "MUFU", "BAR", *LOCAL_MEMORY)
        for code in sorted(codes, key=lambda code: (code.kernel, code.arch)):
            counts = "  ".join(f"{opcode} {code.counts[opcode]}" for opcode in shown)
            print(f"{code.arch:7} {counts}  {code.kernel}")
    found = [problem for code in codes for problem in findings(code, rows)]
    # An expectation that names no kernel says nothing: a renamed kernel must not go unchecked.
    found += [
        f"{row.pattern.pattern} ({row.arch}): no kernel of this module has that name"
        for row in rows
        if not any(
            row.pattern.search(code.kernel) and row.arch in ("*", code.arch) for code in codes
        )
    ]
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    print(f"sass: {len(codes)} kernels, {len(found)} findings")
    return 1 if found or not codes else 0


if __name__ == "__main__":
    sys.exit(main())
