"""Machine code (SASS) of every kernel in a module or object file, as cuobjdump prints it.

`parse(disassemble(path))` gives the kernels; `registers(instruction)` what one of them reads and
writes. cuobjdump and nvdisasm come from PyPI (the dev extra).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ARCH = re.compile(r"^\s*arch = (sm_\w+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)\s*$")
INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*([^;]*?)\s*;"
)
REGISTER = re.compile(r"(?<![\w.])R(\d+)(\.64)?")
PREDICATE = re.compile(r"!?U?P(?:\d|T)")
DESTINATION = re.compile(r"R(?:\d|Z)")

MEMORY = re.compile(r"LD|ST|ATOM|RED$")
DOUBLE = re.compile(r"D(?:ADD|MUL|FMA|MNMX|SETP)$")
CONVERSION = re.compile(r"[FI]2[FI]|FRND|MATCH")
# What is first and a register in these is read.
READS_FIRST = {"BAR", "BRX", "CALL", "JMP", "JMX", "NANOSLEEP", "RET", "WARPSYNC"}
WRITES_PREDICATES = re.compile(r"SETP|FCHK")
ADDRESS = re.compile(r"0x[0-9a-f]+$")
JUMPS = {"BRA", "BRX", "CALL", "JMP", "JMX"}
ENDS_BLOCK = JUMPS | {"EXIT", "KILL", "RET", "WARPSYNC"}
WARP_MMA_WIDTHS = (4, 4, 2, 4)  # D, A, B and C of m16n8k16 with fp32 sums, the widest


@dataclass(frozen=True)
class Instruction:
    """`@!P0 LDSM.16.M88.4 R4, [R2]` at byte `address` of its kernel."""

    address: int
    guard: str  # "@!P0", or "" where it always executes
    opcode: str  # "LDSM"
    modifiers: tuple[str, ...]  # ("16", "M88", "4")
    operands: tuple[str, ...]  # ("R4", "[R2]")

    def __str__(self) -> str:
        name = ".".join((self.opcode, *self.modifiers))
        words = (f"/*{self.address:04x}*/", self.guard, name, ", ".join(self.operands))
        return " ".join(filter(None, words))


@dataclass
class Kernel:
    """One kernel's machine code for one arch; functions that it calls lie behind its own code."""

    name: str
    arch: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of instructions by opcode without modifiers."""
        return Counter(instruction.opcode for instruction in self.instructions)


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


def parse(text: str) -> list[Kernel]:
    """The kernels of cuobjdump's text, in its order."""
    kernels: list[Kernel] = []
    arch = ""
    for line in text.splitlines():
        if match := ARCH.match(line):
            arch = match[1]
        elif match := FUNCTION.match(line):
            kernels.append(Kernel(match[1], arch))
        elif kernels and (match := INSTRUCTION.match(line)):
            address, guard, opcode, modifiers, operands = match.groups()
            kernels[-1].instructions.append(
                Instruction(
                    int(address, 16),
                    guard or "",
                    opcode,
                    tuple(modifiers.split(".")[1:]),
                    tuple(operand.strip() for operand in operands.split(",")) if operands else (),
                )
            )
    return kernels


def natural_loops(kernel: Kernel) -> list[list[Instruction]]:
    """The instructions of each loop: of a jump back to a place that every path to it has passed.

    Waiting loops that the compiler puts behind the code, and that jump back into it, are none.
    """
    code = kernel.instructions
    index = {instruction.address: i for i, instruction in enumerate(code)}
    targets = [jump_target(instruction, index) for instruction in code]
    leaders = {0, *(target for target in targets if target is not None)}
    leaders |= {i + 1 for i, instruction in enumerate(code) if instruction.opcode in ENDS_BLOCK}
    starts = sorted(leader for leader in leaders if leader < len(code))
    block_of = {start: number for number, start in enumerate(starts)}
    ends = [*starts[1:], len(code)]

    successors: list[list[int]] = []
    for number, end in enumerate(ends):
        last, target = code[end - 1], targets[end - 1]
        calls = last.opcode == "CALL"  # and comes back: the callee's loops are its own
        following = [] if target is None or calls else [block_of[target]]
        if (calls or goes_on(last)) and number + 1 < len(starts):
            following.append(number + 1)
        successors.append(following)
    predecessors: list[list[int]] = [[] for _ in starts]
    for number, following in enumerate(successors):
        for successor in following:
            predecessors[successor].append(number)

    everything = set(range(len(starts)))
    dominators = [{0}, *(everything for _ in starts[1:])]
    changed = True
    while changed:
        changed = False
        for number in range(1, len(starts)):
            before = [dominators[other] for other in predecessors[number]]
            now = {number} | (set.intersection(*before) if before else set())
            if now != dominators[number]:
                dominators[number], changed = now, True

    loops = []
    for number, following in enumerate(successors):
        for head in following:
            if head not in dominators[number]:
                continue
            body, waiting = {head, number}, [number]
            while waiting:
                block = waiting.pop()
                if block != head:
                    new = set(predecessors[block]) - body
                    body |= new
                    waiting += new
            loops.append(
                [line for block in sorted(body) for line in code[starts[block] : ends[block]]]
            )
    return loops


def jump_target(instruction: Instruction, index: dict[int, int]) -> int | None:
    """Index of the instruction that a jump or call names, if `index` (by address) has it."""
    if instruction.opcode not in ENDS_BLOCK or not instruction.operands:
        return None
    operand = instruction.operands[-1]
    return index.get(int(operand, 16)) if ADDRESS.match(operand) else None


def goes_on(instruction: Instruction) -> bool:
    """Whether control may go on with the instruction behind this one, which is no call."""
    if instruction.guard or instruction.opcode not in ENDS_BLOCK:
        return True
    if instruction.opcode == "BRA":  # `BRA P1, 0x10` and `BRA.DIV UR4, 0x10` are conditional
        return bool(instruction.modifiers) or len(instruction.operands) > 1
    return instruction.opcode == "WARPSYNC"


def register_range(operand: str, count: int) -> set[int]:
    """`count` registers from the one that the operand names; none for RZ and other operands."""
    match = REGISTER.search(operand)
    return set(range(int(match[1]), int(match[1]) + count)) if match else set()


def registers(instruction: Instruction) -> tuple[set[int], set[int]]:
    """General registers that the instruction reads, and those it writes.

    Widths that the text leaves open are taken at their widest. Warpgroup products (HGMMA and its
    kin), which outlive their issue, are not for this function.
    """
    read: set[int] = set()
    written: set[int] = set()
    operands = [word for word in instruction.operands if not PREDICATE.fullmatch(word)]
    writes = instruction.opcode not in READS_FIRST and not WRITES_PREDICATES.search(
        instruction.opcode
    )
    for position, operand in enumerate(operands):
        width = operand_width(instruction, position)
        if position == 0 and writes and DESTINATION.match(operand):
            written = register_range(operand, width)
        elif "[" in operand:
            for match in REGISTER.finditer(operand):
                read |= register_range(match[0], 2 if match[2] else 1)
        else:
            read |= register_range(operand, width)
    return read, written


def operand_width(instruction: Instruction, position: int) -> int:
    """Registers of an operand that is no address; predicates are not counted in its position."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    has_64_bits = any(word.endswith("64") for word in modifiers)
    if opcode.endswith("MMA"):
        return WARP_MMA_WIDTHS[min(position, 3)]
    if opcode in ("LDSM", "STSM"):
        return int(modifiers[-1]) if modifiers[-1] in ("2", "4") else 1
    if MEMORY.match(opcode):
        return 4 if "128" in modifiers else 2 if has_64_bits else 1
    if opcode == "IMAD":  # d = a * b + c: c has 64 bits with WIDE and HI, d with WIDE
        return 2 if position in {"WIDE": (0, 3), "HI": (3,)}.get((*modifiers, "")[0], ()) else 1
    if opcode == "CS2R":
        return 1 if "32" in modifiers else 2
    if CONVERSION.match(opcode):
        return 2 if has_64_bits else 1
    return 2 if DOUBLE.match(opcode) or opcode in ("LEPC", "RET") else 1
