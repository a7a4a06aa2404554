"""What Horovod is built for: this Python, its torch, NCCL and the GPUs of this machine.

torch/version.py, nccl.h, nvidia-smi → here → the name of the folder that keeps the wheel

What always holds:
1. Nothing is imported from torch or Horovod: that takes seconds, and a second set-up takes
   milliseconds.
2. A torch for CUDA gets a Horovod with NCCL, or none, unless the user asks for one without.
3. The name of the folder that its wheel came from identifies the installed Horovod (PEP 610,
   direct_url.json). The version does not: it is the same for every torch.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from elastic_trainer.setup.cuda import Nccl, architectures_here, find_nccl, has_code
from elastic_trainer.setup.recipe import RECIPE, VERSION

DEFAULT_CXX = 17
SM = "sm_"
"""Begins the GPUs in the name of a target."""


@dataclass(frozen=True)
class Torch:
    """The torch of this environment."""

    version: str
    """As `torch.__version__`, e.g. 2.13.0+cpu."""
    cuda: str | None
    """The version of CUDA that it is built for; None for CPUs alone."""
    cxx: int = DEFAULT_CXX
    """The C++ standard that its headers need."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user asks for."""

    without_nccl: bool = False
    architectures: tuple[str, ...] = ()
    """Compute capabilities, e.g. ("8.0", "9.0"). Empty: those of this machine's GPUs, and all if
    it has none."""


@dataclass(frozen=True)
class Target:
    """What one wheel of Horovod is for."""

    torch: Torch
    gpu: str
    """gloo: CPU tensors only; cuda: GPU tensors through the CPU; nccl: GPU tensors through NCCL."""
    nccl: Nccl | None = None
    """None in a target for NCCL: it was not found."""
    architectures: tuple[str, ...] = ()
    """The compute capabilities of the GPUs; empty: all."""

    @property
    def name(self) -> str:
        """The folder that keeps this wheel."""
        return self._name("_".join(self.architectures) or "all")

    def _name(self, architectures: str) -> str:
        parts = [self.gpu]
        if self.gpu == "nccl":
            parts = [f"nccl{self.nccl.version if self.nccl else ''}"]
        if self.gpu != "gloo":
            parts += [f"cuda{self.torch.cuda}", f"{SM}{architectures}"]
        return f"torch-{self.torch.version}-{python_and_libc()}-{'-'.join(parts)}-{RECIPE}"

    def is_met_by(self, name: str) -> bool:
        """True if the wheel of the folder with this name is for this target.

        It may have kernels for more GPUs.
        """
        if self.gpu == "gloo" or name == self.name:
            return name == self.name
        built = architectures_in(name)
        return (name == self._name("_".join(built) or "all")
                and (not built or bool(self.architectures)
                     and all(has_code(built, one) for one in self.architectures)))

    def __str__(self) -> str:
        version = f" {self.nccl.version}" if self.nccl else ""
        kind = {"gloo": "Gloo", "cuda": "Gloo; GPU tensors pass through the CPU",
                "nccl": f"Gloo and NCCL{version}"}[self.gpu]
        gpus = f", for {gpus_text(self.architectures)}" if self.gpu != "gloo" else ""
        return f"torch {self.torch.version} ({kind}{gpus})"


@dataclass(frozen=True)
class Installed:
    """The Horovod of this environment."""

    version: str
    made_for: str
    """The name of its `Target`; "" for a Horovod that this package has not installed."""


def here(env: Mapping[str, str] = os.environ, wish: Wish = Wish()) -> Target | None:
    """Return what this environment needs; None without torch."""
    torch = installed_torch()
    return None if torch is None else target_of(torch, env, wish, packages())


def target_of(torch: Torch, env: Mapping[str, str], wish: Wish = Wish(),
              packages: Sequence[Path] = ()) -> Target:
    """Return what this machine needs for a torch."""
    if not torch.cuda:
        return Target(torch, "gloo")
    architectures = wish.architectures or architectures_here(env)
    if wish.without_nccl:
        return Target(torch, "cuda", None, architectures)
    return Target(torch, "nccl", find_nccl(env, packages), architectures)


def packages() -> list[Path]:
    """Return the folders that may have the packages with torch's libraries, torch's own first."""
    found = importlib.util.find_spec("torch")
    beside = [Path(found.origin).parents[1]] if found and found.origin else []
    return list(dict.fromkeys([*beside, *(Path(folder) for folder in sys.path if folder)]))


def installed_torch() -> Torch | None:
    """Return the torch that this Python would import."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    if not (folder / "version.py").exists():
        return None
    torch = torch_of((folder / "version.py").read_text())
    header = folder / "include" / "ATen" / "ATen.h"
    return replace(torch, cxx=cxx_of(header.read_text()) if header.exists() else DEFAULT_CXX)


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


def cxx_of(header: str) -> int:
    """Read the C++ standard that ATen/ATen.h asks for, e.g. 20."""
    found = re.search(r"#error C\+\+(\d\d) or later", header)
    return int(found[1]) if found else DEFAULT_CXX


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


def wheel_for(target: Target, env: Mapping[str, str] = os.environ) -> Path | None:
    """Return a kept wheel for a target: the one of its name, else one for more GPUs."""
    folders = wheels(env).glob(f"torch-{target.torch.version}-*-{RECIPE}")
    fitting = sorted((folder for folder in folders if target.is_met_by(folder.name)),
                     key=lambda folder: (folder.name != target.name, folder.name))
    return next(filter(None, map(kept_wheel, fitting)), None)


def architectures_in(name: str) -> tuple[str, ...]:
    """Read the compute capabilities in the name of a target; empty: all, or a wheel for CPUs."""
    found = re.search(rf"-{SM}([\d._]+)-", name)
    return tuple(found[1].split("_")) if found else ()


def gpus_text(architectures: Sequence[str]) -> str:
    """Return for which GPUs kernels are built."""
    return f"GPUs of {', '.join(architectures)}" if architectures else "all GPUs"


def python_and_libc() -> str:
    """Return what else the wheel depends on, e.g. cpython-311-linux-x86_64-glibc2.36."""
    libc = "".join(platform.libc_ver())
    return f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}-{libc}"

