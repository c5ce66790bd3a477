"""Checks the layer rule and the size limits that CONTRIBUTING.md states.

    python tools/check_layers.py

    ptx <- tile <- attention <- sm80 | sm90 | smxx <- plan <- binding

A file under `csrc/` includes its own layer and those to the left. The kernel folders do not include
each other. From plan on, only `.h` files of a kernel folder are seen, never kernel bodies (`.cuh`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANK = {
    "ptx": 0,
    "tile": 1,
    "attention": 2,
    "sm80": 3,
    "sm90": 3,
    "smxx": 3,
    "plan": 4,
    "binding": 5,
}
CXX_SUFFIXES = {".h", ".cuh", ".cu", ".cpp"}
MAX_LINES = 600
MAX_COLUMNS = 100

INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", re.MULTILINE)
FRAMEWORK = re.compile(r"^(torch|ATen|c10|pybind11)/")
ASM = re.compile(r"\b(asm|__asm__)\b(\s+volatile|\s+__volatile__)?\s*\(")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def layer_problems(file: str, text: str) -> Iterator[str]:
    """What in one file under `csrc/` breaks the layer rule; `file` is relative to `csrc/`."""
    layer = file.split("/")[0]
    if layer not in RANK:
        yield f"csrc/{file}: {layer}/ is not a layer; the layers are {', '.join(RANK)}"
        return
    if layer != "ptx" and ASM.search(without_comments(text)):
        yield f"csrc/{file}: asm belongs in csrc/ptx/"
    for include in INCLUDE.findall(text):
        if FRAMEWORK.match(include):
            if layer != "binding":
                yield f"csrc/{file}: includes {include}; torch and pybind11 stop at csrc/binding/"
            elif include.startswith("pybind11/") != (file == "binding/module.cpp"):
                yield f"csrc/{file}: includes {include}; pybind11, and only it, in module.cpp"
        other = include.split("/")[0]
        if "/" not in include or other not in RANK or other == layer:
            continue
        if RANK[other] >= RANK[layer]:
            yield f"csrc/{file}: includes {include}; {layer}/ may not know {other}/"
        elif RANK[layer] >= RANK["plan"] and include.endswith(".cuh"):
            yield f"csrc/{file}: includes the kernel body {include}; {layer}/ sees .h files only"


def size_problems(file: str, text: str) -> Iterator[str]:
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"{file}: {len(lines)} lines, at most {MAX_LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield f"{file}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"
        if UNFINISHED.search(line) and file != "tools/check_layers.py":
            yield f"{file}:{number}: unfinished work: {line.strip()}"


def unused_headers(sources: dict[str, str]) -> Iterator[str]:
    """Headers of `csrc/` (paths relative to it) that no file includes."""
    included = {include for text in sources.values() for include in INCLUDE.findall(text)}
    for file in sources:
        if file.endswith((".h", ".cuh")) and file not in included:
            yield f"csrc/{file}: no file includes it"


def tracked_files() -> list[str]:
    """Tracked and new files, relative to the repository root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [file for file in answer.stdout.splitlines() if (ROOT / file).is_file()]


def problems() -> Iterator[str]:
    files = tracked_files()
    code = [file for file in files if Path(file).suffix in CXX_SUFFIXES | {".py"}]
    texts = {file: (ROOT / file).read_text() for file in code}
    csrc = {
        file.removeprefix("csrc/"): text for file, text in texts.items() if file.startswith("csrc/")
    }
    for file, text in texts.items():
        yield from size_problems(file, text)
    for file, text in csrc.items():
        yield from layer_problems(file, text)
    yield from unused_headers(csrc)


def main() -> int:
    found = list(problems())
    for problem in found:
        print(problem)
    print(f"layers and sizes: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
