"""Prints, as JSON, what the native build must know about one Python environment.

Run by the interpreter the extension is built for (`CMakeLists.txt` and `setup.py` do that):

    python cmake/python_facts.py [torch folder]

torch is located and its `version.py` is read as text, never imported: an environment that merely
holds torch's files is enough, so this machine can build for another one.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import sysconfig
from pathlib import Path


def find_torch(folder: str | None = None) -> Path | None:
    """The torch package's folder: `folder` when given, else where `import torch` would look."""
    if folder:
        return Path(folder) if (Path(folder) / "version.py").is_file() else None
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def read_version(torch: Path) -> tuple[str, str]:
    """(version, CUDA version or "") as torch's `version.py` states them."""
    text = (torch / "version.py").read_text()
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    if version is None:
        sys.exit(f"{torch / 'version.py'} does not state a __version__: reinstall torch there.")
    return version[1], cuda[1] if cuda else ""


def python_facts(torch_folder: str | None = None) -> dict[str, str]:
    """Facts about the running interpreter and its torch; the torch values are "" without torch."""
    torch = find_torch(torch_folder)
    version, cuda = read_version(torch) if torch else ("", "")
    return {
        "python": "cp{}{}".format(*sys.version_info),
        "include": sysconfig.get_paths()["include"],
        "ext_suffix": sysconfig.get_config_var("EXT_SUFFIX"),
        "torch": str(torch or ""),
        "torch_version": version,
        "torch_cuda": cuda,
    }


if __name__ == "__main__":
    print(json.dumps(python_facts(*sys.argv[1:2])))
