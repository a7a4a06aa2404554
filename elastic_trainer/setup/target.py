"""What Horovod is built for: this Python, its torch, and the GPU libraries of this machine.

torch/version.py, nvcc, nccl.h → here → the name of the folder that keeps the wheel

What always holds:
1. Nothing is imported from torch or Horovod: that takes seconds, and a second set-up takes
   milliseconds.
2. The name of the folder that its wheel came from identifies the installed Horovod (PEP 610,
   direct_url.json). The version does not: it is the same for every torch.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from elastic_trainer.setup.recipe import RECIPE, VERSION


@dataclass(frozen=True)
class Torch:
    """The torch of this environment."""

    version: str
    """As `torch.__version__`, e.g. 2.13.0+cpu."""
    cuda: str | None
    """The version of CUDA that it is built for; None for CPUs alone."""


@dataclass(frozen=True)
class Target:
    """What one wheel of Horovod is for."""

    torch: Torch
    gpu: str
    """gloo: CPU tensors only; cuda: GPU tensors through the CPU; nccl: GPU tensors through NCCL."""
    cuda_home: Path | None

    @property
    def name(self) -> str:
        """The folder that keeps this wheel."""
        return f"torch-{self.torch.version}-{python_and_libc()}-{self.gpu}-{RECIPE}"


@dataclass(frozen=True)
class Installed:
    """The Horovod of this environment."""

    version: str
    made_for: str
    """The name of its `Target`; "" for a Horovod that this package has not installed."""


def here(env: Mapping[str, str] = os.environ) -> Target | None:
    """Return what this environment needs; None without torch."""
    torch = installed_torch()
    return None if torch is None else target_of(torch, env)


def target_of(torch: Torch, env: Mapping[str, str]) -> Target:
    """Return what this machine needs for a torch."""
    home = cuda_home(env) if torch.cuda else None
    gpu = "gloo" if home is None else "nccl" if is_nccl_here(env, home) else "cuda"
    return Target(torch, gpu, home)


def installed_torch() -> Torch | None:
    """Return the torch that this Python would import."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).with_name("version.py")
    return torch_of(file.read_text()) if file.exists() else None


def torch_of(text: str) -> Torch:
    """Read torch/version.py."""
    values: dict[str, object] = {}
    for node in ast.parse(text).body:
        name = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(name, ast.Name) and isinstance(value, ast.Constant):
            values[name.id] = value.value
    cuda = values.get("cuda")
    return Torch(str(values["__version__"]), None if cuda is None else str(cuda))


def installed_horovod() -> Installed | None:
    """Return the Horovod that this Python would import, as its metadata describes it."""
    try:
        found = importlib.metadata.distribution("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(found.read_text("direct_url.json") or "{}").get("url", "")
    folder = PurePosixPath(unquote(urlsplit(origin).path)).parent.name
    return Installed(found.version, folder if folder.startswith("torch-") else "")


def wheels(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that keeps all wheels of this user."""
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-trainer" / "wheels"


def kept_wheel(folder: Path) -> Path | None:
    """Return the wheel that a folder keeps."""
    return next(iter(sorted(folder.glob(f"horovod-{VERSION}-*.whl"))), None)


def is_wheel_kept_for_some_torch(env: Mapping[str, str] = os.environ) -> bool:
    """True if a wheel for this Python and any torch is kept."""
    folders = wheels(env).glob(f"torch-*-{python_and_libc()}-*-{RECIPE}")
    return any(map(kept_wheel, folders))


def python_and_libc() -> str:
    """Return what else the wheel depends on, e.g. cpython-311-linux-x86_64-glibc2.36."""
    libc = "".join(platform.libc_ver())
    return f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}-{libc}"


def cuda_home(env: Mapping[str, str]) -> Path | None:
    """Return CUDA's folder, found as torch.utils.cpp_extension and Horovod's build find it."""
    nvcc = shutil.which("nvcc", path=env.get("PATH")) or "/usr/local/cuda/bin/nvcc"
    home = Path(env.get("CUDA_HOME") or Path(nvcc).parent.parent)
    return home if os.access(home / "bin" / "nvcc", os.X_OK) else None


def is_nccl_here(env: Mapping[str, str], home: Path) -> bool:
    """True if NCCL's header is where Horovod looks for it."""
    folders = (Path(env.get("HOROVOD_NCCL_HOME") or "/usr") / "include",
               Path(env.get("HOROVOD_NCCL_INCLUDE") or "/usr/include"), home / "include")
    return any((folder / "nccl.h").is_file() for folder in folders)
