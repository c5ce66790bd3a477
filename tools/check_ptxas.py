"""Checks what ptxas said about every kernel of a build: spills, and C75xx notes.

    python tools/check_ptxas.py build/NAME [--strict] [--table]

Spill bytes above `tools/ptxas_allowance.txt` and notes that ptxas serialised a wgmma pipeline
(C7508, C7510 ... C7519) are warnings. With --strict (CI) they are errors, and so are rows of that
file that no kernel needs. --table prints every kernel's registers, static shared memory and spills.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ALLOWANCE = Path(__file__).with_name("ptxas_allowance.txt")
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(sm_\w+)'")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
STATIC_SMEM = re.compile(r"(\d+) bytes smem")
NOTE = re.compile(r"\bC75\d\d\b")

Allowance = list[tuple[re.Pattern[str], str, int]]  # rows: kernel pattern, arch, bytes


@dataclass
class Kernel:
    """One kernel on one arch, as ptxas reported it."""

    name: str
    arch: str
    spill_bytes: int = 0
    registers: int = 0
    smem_bytes: int = 0


def parse_log(text: str) -> tuple[list[Kernel], list[str]]:
    """The kernels of one ptxas log, and its C75xx notes."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if entry := ENTRY.search(line):
            kernels.append(Kernel(entry[1], entry[2]))
        elif kernels and (spill := SPILL.search(line)):
            kernels[-1].spill_bytes += int(spill[1]) + int(spill[2])
        elif kernels and (used := USED.search(line)):
            kernels[-1].registers = int(used[1])
            if smem := STATIC_SMEM.search(line):
                kernels[-1].smem_bytes = int(smem[1])
    return kernels, [line.strip() for line in text.splitlines() if NOTE.search(line)]


def demangle(names: list[str]) -> list[str]:
    """Readable kernel names without arguments, where binutils' c++filt is there."""
    if not names or not shutil.which("c++filt"):
        return names
    command = ["c++filt", "--no-params"]
    result = subprocess.run(
        command, input="\n".join(names), capture_output=True, text=True, check=True
    )
    return [
        name.removeprefix("void ").replace("flashattn_ext::", "")
        for name in result.stdout.splitlines()
    ]


def read_allowance(text: str) -> Allowance:
    """Rows of the allowance file; format in its own header."""
    rows = []
    for line in text.splitlines():
        fields = line.partition("#")[0].split(maxsplit=2)
        if fields:
            rows.append((re.compile(fields[2].strip()), fields[1], int(fields[0])))
    return rows


def allowed_bytes(name: str, arch: str, allowance: Allowance) -> int:
    """The largest allowance of the rows that name this kernel; 0 when none does."""
    rows = (
        spill_bytes
        for pattern, row_arch, spill_bytes in allowance
        if row_arch in ("*", arch) and pattern.search(name)
    )
    return max(rows, default=0)


def unused_rows(kernels: list[Kernel], allowance: Allowance) -> list[str]:
    """Allowances for an arch that was built which no spilling kernel needs: they hide the next."""
    archs = {kernel.arch for kernel in kernels}
    return [
        f"no kernel needs the allowance of {spill_bytes} bytes for {pattern.pattern} ({arch})"
        for pattern, arch, spill_bytes in allowance
        if arch in archs | {"*"}
        and not any(
            kernel.spill_bytes and arch in ("*", kernel.arch) and pattern.search(kernel.name)
            for kernel in kernels
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="build folder that holds *.ptxas.log files")
    parser.add_argument("--strict", action="store_true", help="exit 1 on any finding")
    parser.add_argument("--table", action="store_true", help="print every kernel")
    arguments = parser.parse_args()

    # A log without its object belongs to a source file that is gone.
    logs = sorted(arguments.build.rglob("*.ptxas.log"))
    logs = [log for log in logs if Path(str(log).removesuffix(".ptxas.log")).is_file()]
    kernels: list[Kernel] = []
    findings: list[str] = []
    for log in logs:
        found, notes = parse_log(log.read_text())
        kernels += found
        findings += notes
    for kernel, name in zip(kernels, demangle([kernel.name for kernel in kernels])):
        kernel.name = name
    allowance = read_allowance(ALLOWANCE.read_text())
    for kernel in kernels:
        allowed = allowed_bytes(kernel.name, kernel.arch, allowance)
        if kernel.spill_bytes > allowed:
            spilled = f"spills {kernel.spill_bytes} bytes, allowed {allowed}"
            findings.append(f"{kernel.name} ({kernel.arch}) {spilled}")
    if arguments.strict:
        findings += unused_rows(kernels, allowance)
    if arguments.table:
        for kernel in sorted(kernels, key=lambda kernel: (kernel.name, kernel.arch)):
            print(
                f"{kernel.arch:8} {kernel.registers:4} registers {kernel.smem_bytes:7} B smem "
                f"{kernel.spill_bytes:5} B spilled  {kernel.name}"
            )
    for finding in findings:
        print(f"{'error' if arguments.strict else 'warning'}: {finding}", file=sys.stderr)
    print(f"ptxas: {len(kernels)} kernels in {len(logs)} files, {len(findings)} findings")
    return 1 if findings and arguments.strict else 0


if __name__ == "__main__":
    sys.exit(main())
