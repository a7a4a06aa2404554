"""How this worker computes: a fixed program of torch, and the names of what it runs on.

warm-up → here → Arithmetic → driver

What it does not do: time anything. It takes some milliseconds, once for each process.
"""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from elastic_trainer.world.replicas import fingerprint


def program(device: torch.device) -> int:
    """Return a checksum of what torch makes of fixed numbers: products, convolutions, sums,
    exponentials."""
    numbers = torch.Generator().manual_seed(20261123)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers).to(device).requires_grad_()

    a, b, weight, image = drawn(129, 257), drawn(257, 65), drawn(8, 3, 3, 3), drawn(2, 3, 17, 17)
    product = F.layer_norm(a @ b, (65,))
    convolved = torch.tanh(F.conv2d(image, weight))
    loss = torch.softmax(product, 1).square().sum() + convolved.exp().mean()
    torch.autograd.backward(loss)
    return fingerprint([loss, product, *(tensor.grad for tensor in (a, b, weight, image))])


def facts(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Return the names of what the bits depend on, by name."""
    found = {
        "cpu": cpu_model(), "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__, "blas": blas(), "threads": str(torch.get_num_threads())
    }
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn  # torch has no types for it
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda),
                  "cudnn": str(cudnn.version())}
    return tuple(sorted(found.items()))


def cpu_model() -> str:
    """Return the name of this machine's processor (proc(5), /proc/cpuinfo)."""
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.*)$",
                          Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def blas() -> str:
    """Return which libraries torch multiplies with."""
    found = re.findall(
        r"BLAS_INFO=(\w+)|(Intel\(R\) oneAPI Math Kernel Library Version \S+)|(MKL-DNN v\S+)",
        torch.__config__.show())
    return ", ".join(dict.fromkeys(name for names in found for name in names if name))
