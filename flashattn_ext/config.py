"""show_config: what was built, what it runs on."""

from __future__ import annotations

import torch

from ._loader import build_info, load_native


def show_config() -> None:
    """Print the version, what the native module was built for, and the devices it finds.

    A build without CUDA says so here, with the reason.
    """
    from . import __version__

    info = build_info()
    if info["cuda"]:
        cuda = f"CUDA {info['cuda']} for compute capabilities {', '.join(info['archs'])}"
    else:
        cuda = f"no CUDA: {info['no_cuda_reason']}; only the CPU path runs"
    lines = [
        f"flashattn_ext {__version__}",
        f"  built for  torch {info['torch']}, Python {info['python']}, {cuda}",
        f"  sources    csrc sha256 {info['source_hash'][:16]}",
        f"  running    torch {torch.__version__}",
    ]
    lines += [f"  family     {name}: {what}" for name, what in load_native().FAMILIES]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        lines.append(
            f"  cuda:{index}     {device.name}, compute capability {device.major}.{device.minor}, "
            f"{device.multi_processor_count} SMs"
        )
    print("\n".join(lines))
