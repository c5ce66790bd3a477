"""Compiler launcher: runs nvcc and keeps what ptxas said beside the object file.

    python cmake/log_ptxas.py nvcc ... -o OBJECT ...

`-Xptxas -v` prints registers and spills of every kernel. They go to OBJECT.ptxas.log, which
`tools/check_ptxas.py` reads; the terminal gets everything else (errors, warnings).
"""

from __future__ import annotations

import re
import subprocess
import sys

# The lines of `ptxas -v`, and its spill warnings: the check judges and names those.
CHATTER = re.compile(
    r"^ptxas info\s*:|^ptxas warning : Registers are spilled|^\s+\d+ bytes stack frame|^\s*$"
)


def main(command: list[str]) -> int:
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    if result.returncode == 0 and "-o" in command:
        with open(command[command.index("-o") + 1] + ".ptxas.log", "w") as log:
            log.write(result.stderr)
    for line in result.stderr.splitlines():
        if not CHATTER.match(line):
            print(line, file=sys.stderr)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
