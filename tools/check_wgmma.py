"""Checks that no kernel touches registers of warpgroup products (wgmma) that are still in flight.

    python -m tools.check_wgmma MODULE.so [--table]

wgmma runs asynchronously: its accumulator may be neither read nor written, and an operand in
registers not be written, from its issue to the wait that completes its group. The compiler promises
this, and has broken the promise (nvcc before 13.3, operand A in registers).

Each kernel's control flow is followed, both ways at every branch and around every loop, into called
functions and back to the caller. At each instruction we know the products that may be in flight on
some path, with the fewest groups committed since: a wait that leaves N groups pending completes
those with more. What is uncertain counts as in flight: a product under a predicate is issued, a
commit or a wait under one does not happen.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tools import check_ptxas
from tools.sass import (
    ADDRESS,
    ENDS_BLOCK,
    JUMPS,
    Instruction,
    Kernel,
    disassemble,
    goes_on,
    jump_target,
    parse,
    register_range,
    registers,
)

WGMMA = re.compile(r"[A-Z]GMMA$")
SHAPE = re.compile(r"64x(\d+)x\d+")  # m64nNkK
INPUT_REGISTERS = 4  # operand A: m64kK over 128 threads is 4 registers for every type
MAX_CALL_DEPTH = 8
MAX_SHOWN = 20  # findings of one kernel

# Products that may be in flight: address -> fewest groups committed since its issue, its own
# included. 0: not committed yet; k: its group is the k-th newest.
Flight = dict[int, int]


@dataclass(frozen=True)
class Wgmma:
    """A warpgroup product: its registers, and whether it ends (commits) a group."""

    accumulator: frozenset[int]
    inputs: frozenset[int]
    commits: bool


class Point(NamedTuple):
    """A place in a kernel: index of an instruction, and where the calls around it return to."""

    callers: tuple[int, ...]
    at: int


@dataclass
class Report:
    """What was found in one kernel."""

    products: int = 0
    waits: int = 0
    most_in_flight: int = 0
    findings: list[str] = field(default_factory=list)


def decode_wgmma(instruction: Instruction) -> Wgmma | None:
    """`HGMMA.64x128x16.F32 R24, R180, gdesc[UR16], R24, gsb0`; None for other instructions.

    An empty group is a product without registers: `HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, gsb0`.
    """
    if not WGMMA.match(instruction.opcode):
        return None
    shape = next(filter(None, map(SHAPE.match, instruction.modifiers)), None)
    if not shape:
        sys.exit(f"a wgmma of unknown shape: {instruction}")
    # fp16 sums are the only ones of two to a register; the sums' type follows the shape.
    narrow = instruction.modifiers[instruction.modifiers.index(shape[0]) + 1] == "F16"
    count = int(shape[1]) // (4 if narrow else 2)
    result, *sources = instruction.operands
    inputs: set[int] = set()
    if "gdesc" not in sources[0]:
        inputs |= register_range(sources[0], INPUT_REGISTERS)
    for source in sources[1:]:  # the addend, as a rule the accumulator itself
        if "gdesc" not in source and source != result:
            inputs |= register_range(source, count)
    return Wgmma(
        frozenset(register_range(result, count)), frozenset(inputs), "gsb0" in instruction.operands
    )


def merge(one: Flight, other: Flight) -> Flight:
    """In flight on either path, for as long as on the path where that is longer."""
    merged = dict(one)
    for address, groups in other.items():
        merged[address] = min(groups, merged.get(address, groups))
    return merged


def groups_left(instruction: Instruction) -> int | None:
    """N of `WARPGROUP.DEPBAR.LE gsb0, N`, the wait; None for other instructions."""
    if instruction.opcode != "WARPGROUP" or "DEPBAR" not in instruction.modifiers:
        return None
    if "LE" not in instruction.modifiers or not ADDRESS.match(instruction.operands[-1]):
        sys.exit(f"a wait of an unknown kind: {instruction}")
    return int(instruction.operands[-1], 16)


class Program:
    """A kernel's instructions by index, with their products and the flow between them."""

    def __init__(self, kernel: Kernel) -> None:
        self.code = kernel.instructions
        self.products = {
            instruction.address: product
            for instruction in self.code
            if (product := decode_wgmma(instruction))
        }
        self.index = {instruction.address: index for index, instruction in enumerate(self.code)}
        targets = {self.target(instruction) for instruction in self.code}
        self.leaders = {index for index in targets if index is not None}

    def target(self, instruction: Instruction) -> int | None:
        """Index of the instruction that a jump or call names, if it names one of this kernel."""
        return jump_target(instruction, self.index)

    def block(self, start: int) -> range:
        """Indices from `start` to the end of its basic block."""
        end = start + 1
        while (
            end < len(self.code)
            and end not in self.leaders
            and self.code[end - 1].opcode not in ENDS_BLOCK
        ):
            end += 1
        return range(start, end)

    def is_unknown(self, point: Point) -> bool:
        """Whether this instruction jumps to or calls what we cannot follow."""
        instruction = self.code[point.at]
        if instruction.opcode not in JUMPS:
            return False
        too_deep = instruction.opcode == "CALL" and len(point.callers) >= MAX_CALL_DEPTH
        return too_deep or self.target(instruction) is None

    def falls_through(self, point: Point) -> bool:
        """Whether control may go on with the instruction behind this one."""
        instruction = self.code[point.at]
        if instruction.opcode == "CALL" and not instruction.guard:  # a function elsewhere returns
            return self.is_unknown(point)
        return goes_on(instruction)

    def successors(self, point: Point) -> Iterator[Point]:
        """Where control may go after this instruction."""
        instruction, following = self.code[point.at], point.at + 1
        if instruction.opcode == "RET":
            if point.callers:
                yield Point(point.callers[:-1], point.callers[-1])
        elif (target := self.target(instruction)) is not None and not self.is_unknown(point):
            called = instruction.opcode == "CALL"
            yield Point((*point.callers, following) if called else point.callers, target)
        if self.falls_through(point) and following < len(self.code):
            yield Point(point.callers, following)

    def after(self, flight: Flight, instruction: Instruction) -> Flight:
        """What may be in flight behind the instruction."""
        result = flight
        left = groups_left(instruction)
        if product := self.products.get(instruction.address):
            result = {**flight, instruction.address: 0}
            if product.commits:
                result = {address: groups + 1 for address, groups in result.items()}
        elif left is not None:
            result = {address: groups for address, groups in flight.items() if groups <= left}
        return merge(flight, result) if instruction.guard else result

    def flights(self) -> dict[Point, Flight]:
        """What may be in flight at the start of every basic block that is reached."""
        first = Point((), 0)
        starts: dict[Point, Flight] = {first: {}}
        changed = [first]
        while changed:
            start = changed.pop()
            flight = starts[start]
            for index in self.block(start.at):
                flight = self.after(flight, self.code[index])
            for successor in self.successors(Point(start.callers, index)):
                known = starts.get(successor)
                merged = flight if known is None else merge(known, flight)
                if merged != known:
                    starts[successor] = merged
                    changed.append(successor)
        return starts

    def walk(self) -> Iterator[tuple[Point, Flight]]:
        """Every instruction that is reached, with what may be in flight before it."""
        for start, flight in self.flights().items():
            for index in self.block(start.at):
                yield Point(start.callers, index), flight
                flight = self.after(flight, self.code[index])

    def touched(self, instruction: Instruction, flight: Flight) -> Iterator[tuple[str, int]]:
        """(What the instruction does that it must not, address of the product) for each product."""
        product = self.products.get(instruction.address)
        if product:
            read, written = set(product.inputs), set(product.accumulator)
        else:
            read, written = registers(instruction)
        for address in flight:
            other = self.products[address]
            # A chain of products adds to one accumulator; the tensor core keeps them in order.
            chained = product is not None and product.accumulator == other.accumulator
            if read & other.accumulator:
                yield "reads the accumulator", address
            if written & other.accumulator and not chained:
                yield "writes the accumulator", address
            if written & other.inputs:
                yield "writes operands", address


def check(kernel: Kernel) -> Report:
    """Findings of one kernel: for each instruction, the first product that it disturbs."""
    program = Program(kernel)
    report = Report(
        products=len(program.products),
        waits=sum(groups_left(instruction) is not None for instruction in kernel.instructions),
    )
    if not program.products:
        return report
    found: dict[tuple[int, str], int] = {}
    unreached = set(program.products)
    for point, flight in program.walk():
        instruction = program.code[point.at]
        unreached.discard(instruction.address)
        report.most_in_flight = max(report.most_in_flight, len(flight))
        # Unknown code may touch any register. With nothing in flight it does no harm, and products
        # that only an unknown jump (a table of roles) leads to are found below.
        if program.is_unknown(point) and flight:
            found[instruction.address, "goes to unknown code behind"] = max(flight)
        for what, address in program.touched(instruction, flight):
            key = instruction.address, f"{what} of"
            found[key] = min(address, found.get(key, address))
    report.findings = [
        f"{program.code[program.index[at]]} {what} {program.code[program.index[address]]}"
        for (at, what), address in sorted(found.items())
    ]
    report.findings += [
        f"no path was found to {program.code[program.index[address]]}"
        for address in sorted(unreached)
    ]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", type=Path, help="flashattn_ext/_C.*.so or an object file")
    parser.add_argument("--table", action="store_true", help="print every kernel with wgmma")
    arguments = parser.parse_args()

    kernels = parse(disassemble(arguments.module))
    names = check_ptxas.demangle([kernel.name for kernel in kernels])
    reports = [(name, kernel.arch, check(kernel)) for name, kernel in zip(names, kernels)]
    reports = [(name, arch, report) for name, arch, report in reports if report.products]
    if arguments.table:
        for name, arch, report in sorted(reports, key=lambda row: row[:2]):
            print(
                f"{arch:7} {report.products:4} wgmma {report.waits:3} waits, at most "
                f"{report.most_in_flight:3} in flight, {len(report.findings)} findings  {name}"
            )
    for name, arch, report in reports:
        for text in report.findings[:MAX_SHOWN]:
            print(f"error: {name} ({arch}) {text}", file=sys.stderr)
        if len(report.findings) > MAX_SHOWN:
            print(f"... and {len(report.findings) - MAX_SHOWN} more", file=sys.stderr)
    found = sum(len(report.findings) for _, _, report in reports)
    print(f"wgmma: {len(kernels)} kernels, {len(reports)} with wgmma, {found} findings")
    return 1 if found or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
