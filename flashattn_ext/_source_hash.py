"""The hash that names one state of `csrc/`: in the native module's stamp and in GPU records.

Also a script, run by every native build (it imports nothing of the package, hence no torch):

    python flashattn_ext/_source_hash.py TEMPLATE OUTPUT    fills @SOURCE_HASH@
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def csrc_sha256(repository: Path = REPOSITORY) -> str | None:
    """sha256 over every file under `csrc/`: path, NUL, bytes, NUL; None without a `csrc/`.

    Files are sorted by their POSIX path relative to the repository root.
    """
    files = [path for path in (repository / "csrc").rglob("*") if path.is_file()]
    if not files:
        return None
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(repository).as_posix(), path) for path in files):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def main(template: str, output: str) -> None:
    """Write `output` only when it changes, so that an unchanged `csrc/` recompiles nothing."""
    text = Path(template).read_text().replace("@SOURCE_HASH@", csrc_sha256() or "")
    target = Path(output)
    if not target.is_file() or target.read_text() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
