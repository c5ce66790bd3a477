"""Checks the machine code of every kernel: tensor-core instructions, and local memory.

    python -m tools.check_sass MODULE.so [--table]

A kernel named in `tools/sass_expectation.txt` holds at least the stated numbers of instructions,
and each of its key loops at most. Local loads and stores (LDL, STL: spills, or an array that did
not stay in registers) stay within `tools/ptxas_allowance.txt`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tools import check_ptxas
from tools.sass import Kernel, disassemble, natural_loops, parse

EXPECTATION = Path(__file__).with_name("sass_expectation.txt")
LOCAL_BYTES = 4  # the least that one LDL or STL moves

BOUND = re.compile(r"(?:(?P<least>\w+)>=|loop\.(?P<most>\w+)<=)(?P<count>\d+)")


@dataclass
class Row:
    """What the expectation file says of the kernels whose name a pattern is found in."""

    pattern: re.Pattern[str]
    least: dict[str, int] = field(default_factory=dict)  # of the whole kernel
    most: dict[str, int] = field(default_factory=dict)  # of each key loop


def read_expectation(text: str) -> list[Row]:
    """Rows of the expectation file; format in its own header."""
    rows = []
    for line in text.splitlines():
        pattern, *bounds = line.partition("#")[0].split() or [""]
        if not pattern:
            continue
        row = Row(re.compile(pattern))
        for bound in bounds:
            match = BOUND.fullmatch(bound)
            if match is None:
                raise ValueError(f"'{bound}' is neither OPCODE>=N nor loop.OPCODE<=N: {line}")
            kind = row.least if match["least"] else row.most
            kind[match["least"] or match["most"]] = int(match["count"])
        rows.append(row)
    return rows


def key_loops(code: Kernel) -> list[Counter[str]]:
    """Instructions by opcode of each loop over blocks of keys of a kernel of warpgroup products.

    Such a loop holds products and more special functions than these (the exponentials), and no
    other loop that does.
    """
    loops = []
    for loop in natural_loops(code):
        counts = Counter(instruction.opcode for instruction in loop)
        if counts["MUFU"] > counts["HGMMA"] > 0:
            loops.append(({instruction.address for instruction in loop}, counts))
    return [counts for body, counts in loops if not any(other < body for other, _ in loops)]


def findings(
    codes: list[Kernel],
    expectation: list[Row],
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
    for row in expectation:
        named = [code for code in codes if row.pattern.search(code.name)]
        if not named:  # a renamed kernel must not go unchecked
            found.append(f"no kernel of this module is named like {row.pattern.pattern}")
        found += [
            f"{code.name} ({code.arch}) holds {code.counts[opcode]} {opcode}, expected {count}"
            for code in named
            for opcode, count in row.least.items()
            if code.counts[opcode] < count
        ]
        for code in named if row.most else ():
            loops = key_loops(code)
            if not loops:
                found.append(f"{code.name} ({code.arch}) has no key loop to check")
            found += [
                f"{code.name} ({code.arch}): a key loop holds {counts[opcode]} {opcode}, "
                f"at most {count} expected"
                for counts in loops
                for opcode, count in row.most.items()
                if counts[opcode] > count
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
