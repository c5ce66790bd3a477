"""Machine code to test the readers of tools/sass.py with."""


def listing(*lines: str) -> str:
    """cuobjdump's text of one kernel; `name:` labels the next instruction, `{name}` names it."""
    labels, code = {}, []
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = hex(16 * len(code))
        else:
            code.append(line)
    text = [
        f"\t/*{16 * i:04x}*/  {line.format(**labels)} ;  /* 0x0 */" for i, line in enumerate(code)
    ]
    return "\n".join(["arch = sm_90a", "\t\tFunction : fwd_kernel", *text])
