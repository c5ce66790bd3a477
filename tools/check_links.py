"""Checks that what the documents point at exists.

    python tools/check_links.py

In every Markdown file: relative links and their #anchors, repository paths written as `code`,
`make` targets, and the files behind `python file.py` and `python -m module`. Links to the web are
left alone: a build must not depend on other people's servers.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
REPOSITORY_PATH = re.compile(
    r"^(csrc|flashattn_ext|tests|benchmarks|examples|docs|tools|cmake|\.github|\.ci)/[\w./-]*$"
)
MAKE = re.compile(r"(?:^|[\s(])make ([a-z][\w-]*(?: [a-z][\w-]*)*)")  # an aligned remark ends it
PYTHON_FILE = re.compile(r"\bpython3?\s+((?!-)[\w./-]+\.py)\b")
PYTHON_MODULE = re.compile(r"\bpython3?\s+-m\s+(benchmarks|tools|examples|flashattn_ext)\.([\w.]+)")


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    text = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(text: str) -> set[str]:
    prose = FENCE.sub("", text)
    return {anchor(heading) for heading in re.findall(r"^#+\s+(.+)$", prose, re.MULTILINE)}


def make_targets(makefile: str) -> set[str]:
    return {
        name
        for line in re.findall(r"^([a-z][\w -]*):(?!=)", makefile, re.M)
        for name in line.split()
    }


def link_problems(file: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        linked = (file.parent / path).resolve() if path else file
        if not linked.exists():
            yield f"link to {target}, which does not exist"
        elif fragment and linked.suffix == ".md" and fragment not in anchors(linked.read_text()):
            yield f"link to {target}, which has no such heading"


def code_problems(text: str, targets: set[str]) -> Iterator[str]:
    """Paths and commands in `code` and in fenced blocks."""
    fenced = FENCE.findall(text)
    inline = CODE.findall(FENCE.sub("", text))
    for code in inline:
        if REPOSITORY_PATH.match(code) and not (ROOT / code).exists():
            yield f"path {code}, which does not exist"
    for code in inline + fenced:
        for line in code.splitlines():
            for words in MAKE.findall(line.partition("#")[0]):
                for target in set(words.split()) - targets:
                    yield f"command make {target}, which the Makefile lacks"
            for script in PYTHON_FILE.findall(line):
                if not (ROOT / script).is_file():
                    yield f"command python {script}, which does not exist"
            for package, module in PYTHON_MODULE.findall(line):
                path = ROOT / package / module.replace(".", "/")
                if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
                    yield f"command python -m {package}.{module}, which does not exist"


def documents() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / file for file in answer.stdout.splitlines() if (ROOT / file).is_file()]


def problems() -> Iterator[str]:
    targets = make_targets((ROOT / "Makefile").read_text())
    for file in documents():
        text = file.read_text()
        for problem in (*link_problems(file, text), *code_problems(text, targets)):
            yield f"{file.relative_to(ROOT)}: {problem}"


def main() -> int:
    found = list(problems())
    for problem in found:
        print(problem)
    print(f"links and commands: {len(found)} problems in {len(documents())} documents")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
