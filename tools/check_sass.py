"""Checks the machine code of every kernel: tensor-core instructions, and local memory.

    python -m tools.check_sass MODULE.so [--table]

A kernel named in `tools/sass_expectation.txt` holds at least the stated numbers of instructions.
Local loads and stores (LDL, STL: spills, or an array that did not stay in registers) stay within
`tools/ptxas_allowance.txt`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tools import check_ptxas
from tools.sass import Kernel, disassemble, parse

EXPECTATION = Path(__file__).with_name("sass_expectation.txt")
LOCAL_BYTES = 4  # the least that one LDL or STL moves

Expectation = list[tuple[re.Pattern[str], dict[str, int]]]  # rows: kernel pattern, least counts


def read_expectation(text: str) -> Expectation:
    """Rows of the expectation file; format in its own header."""
    rows = []
    for line in text.splitlines():
        pattern, *bounds = line.partition("#")[0].split() or [""]
        if pattern:
            least = {opcode: int(count) for opcode, _, count in (b.partition(">=") for b in bounds)}
            rows.append((re.compile(pattern), least))
    return rows


def findings(
    codes: list[Kernel],
    expectation: Expectation,
    allowance: check_ptxas.Allowance,
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
