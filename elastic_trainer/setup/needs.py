"""What a machine or an environment lacks for Horovod: all of it at once, before anything is done.

here → sentences: the fact, the remedy
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from elastic_trainer.host.trust import why_not_trusted
from elastic_trainer.setup.cuda import major, named_nccl
from elastic_trainer.setup.target import Target, kept_wheel

SPACE_MIB = 1024
"""For the build, and for what is installed."""


def of_build(env: Mapping[str, str] = os.environ, cxx: int | None = None) -> Iterator[str]:
    """Yield what is missing to build Horovod from source, by default for any torch."""
    compiler, path = env.get("CXX") or "c++", env.get("PATH")
    if not shutil.which(compiler, path=path):
        yield (f"A C++ compiler ({compiler}) is missing, and Horovod is built from source. "
               f"Install one, e.g. apt-get install g++.")
    elif cxx and not has_standard(compiler, cxx, env):
        yield (f"The C++ compiler ({compiler}) does not know C++{cxx}, which the headers of the "
               f"installed torch need. Install a newer one, and name it, e.g. apt-get install "
               f"g++-12; export CXX=g++-12.")
    if not shutil.which("make", path=path):
        yield ("make is missing, and Horovod is built from source. "
               "Install it, e.g. apt-get install make.")
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        yield (f"The headers of {sys.executable} are missing, and Horovod is built from source. "
               f"Install them, e.g. apt-get install python3-dev.")


def has_standard(compiler: str, cxx: int, env: Mapping[str, str]) -> bool:
    """True if a compiler knows a C++ standard."""
    done = subprocess.run([compiler, f"-std=c++{cxx}", "-fsyntax-only", "-xc++", os.devnull],
                          env=dict(env), stdin=subprocess.DEVNULL, capture_output=True)
    return done.returncode == 0


def of_nccl(target: Target, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield why a Horovod with NCCL cannot be had, if the target needs one."""
    if target.gpu != "nccl" or target.nccl:
        return
    cuda = target.torch.cuda or ""
    without = "Or build without it, which is slower: elastic-trainer setup --without-nccl."
    if folders := named_nccl(env):
        yield (f"nccl.h or libnccl.so.2 is missing in {', '.join(map(str, sum(folders, [])))}, "
               f"which HOROVOD_NCCL_HOME (or _INCLUDE, _LIB) names. Name the folder of an NCCL, "
               f"or unset the variable.")
    else:
        yield (f"torch {target.torch.version} is built for CUDA {cuda}, but NCCL (nccl.h and "
               f"libnccl.so.2) is neither in its packages nor in the system. Install it: "
               f"{sys.executable} -m pip install nvidia-nccl-cu{major(cuda)}. {without}")


def of_environment() -> Iterator[str]:
    """Yield what this environment lacks to have Horovod installed."""
    if importlib.util.find_spec("torch") is None:
        yield f"torch is not installed in {sys.prefix}. Install it first, e.g. pip install torch."
    if importlib.util.find_spec("pip") is None:
        yield (f"pip is not installed in {sys.prefix}. "
               f"Install it, e.g. {sys.executable} -m ensurepip.")
    yield from of_folder(Path(sysconfig.get_path("platlib")), "where Horovod is installed",
                         "Use a virtual environment of your own: python3 -m venv")


def of_trust(kept: Path | None) -> Iterator[str]:
    """Yield why a folder with a built Horovod, which may not exist yet, cannot be used."""
    if kept is None:
        return
    found = kept_wheel(kept) or kept
    while not found.exists():
        found = found.parent
    if why := why_not_trusted(found):
        yield distrust(why)


def distrust(why: str) -> str:
    """Return the sentences for a cache that others can write."""
    return (f"{why}, and what is kept there would run as you. Remove it or take the permission "
            f"away, or set XDG_CACHE_HOME to a folder of yours.")


def of_folder(folder: Path, use: str, remedy: str, needed_mib: int = SPACE_MIB) -> Iterator[str]:
    """Yield why a folder, which may not exist yet, cannot take files."""
    while not folder.is_dir():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        yield f"{folder} ({use}) cannot be written by this user. {remedy}."
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < needed_mib:
        yield (f"{folder} ({use}) has {free_mib} MiB free, where {needed_mib} MiB are needed. "
               f"Free some. {remedy}.")
