"""Build the wheel of Horovod, and install one.

recipe (sources by hash, patches) → here → a wheel in the cache → here → this environment

What always holds:
1. A wheel appears in the cache whole, or not at all: it is built beside its place and moved there.
2. pip takes the files of an index by their hash alone (--require-hashes). It takes the tools as
   wheels, because to build a package runs its code. It compares the hash of Horovod's sources
   before it runs any of them.
3. The environment gets Horovod and nothing else. The tools lie in the folder of the build, which is
   removed at its end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_trainer.setup.cause import cause_of
from elastic_trainer.setup.cuda import OF_PIP, Toolkit, complete
from elastic_trainer.setup.recipe import (
    CMAKE,
    CXX_STANDARD,
    NCCL_INCLUDE,
    NCCL_LIBRARY,
    SETTINGS,
    SETUPTOOLS,
    SOURCES,
    TOOLKIT,
    VERSION,
    patches,
)
from elastic_trainer.setup.sources import apply_patches
from elastic_trainer.setup.target import Target

LOADS = "from horovod.torch.mpi_ops import gloo_built, nccl_built; assert gloo_built()"
"""`import horovod.torch` alone only prints that there is no library."""
LOADS_NCCL = f"""{LOADS}; assert nccl_built()
with open("/proc/self/maps") as maps:
    found = sorted({{line.split()[-1] for line in maps if "/libnccl" in line}})
assert len(found) == 1, f"not one NCCL is loaded, but {{found}}"
print("NCCL:", found[0])
"""
OLDEST_CMAKE_MINOR = 18
"""The first that knows C++20 and C++17 for CUDA."""


class SetupFailed(Exception):
    """A command of the set-up has failed; its log says why."""


class Commands:
    """Runs commands, and keeps what they print in one file."""

    def __init__(self, log: Path):
        self.log = log
        self.log.write_text("")

    def run(self, *command: str | Path, env: dict[str, str] | None = None) -> None:
        """Run one command. Raises SetupFailed with the cause that stands in the log."""
        with open(self.log, "a") as log:
            log.write(f"+ {' '.join(map(str, command))}\n")
            log.flush()
            begin = log.tell()
            done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=log,
                                  stderr=log)
        if done.returncode != 0:
            with open(self.log, errors="replace") as shown:
                shown.seek(begin)
                cause = cause_of(shown.read())
            raise SetupFailed(f"{cause}\nThe log of the failed command: {self.log}")

    def pip(self, *command: str | Path, env: dict[str, str] | None = None) -> None:
        """Run this environment's pip. Raises SetupFailed."""
        pip = (sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
        self.run(*pip, *command, env=env)


def build(target: Target, toolkit: Toolkit | None, kept: Path, commands: Commands) -> None:
    """Build the wheel into the folder that keeps it. Raises SetupFailed, PatchRefused."""
    work = Path(tempfile.mkdtemp(prefix=".build.", dir=kept))
    cmake = machines_cmake()
    env = _with_tools(work, commands, [SETUPTOOLS] if cmake else [SETUPTOOLS, CMAKE])
    sources = fetch(work, commands, env)
    apply_patches(sources, patches())
    env |= SETTINGS | {
        "MAKEFLAGS": env.get("MAKEFLAGS") or f"-j{len(os.sched_getaffinity(0))}",
        "HOROVOD_CMAKE": str(cmake or work / "tools" / "cmake" / "data" / "bin" / "cmake"),
        CXX_STANDARD: str(target.torch.cxx),
    }
    if toolkit:
        env |= for_gpus(target, toolkit.home or fetch_toolkit(work, commands), env)
    commands.pip("wheel", "--use-pep517", "--no-deps", "--no-build-isolation", "--no-cache-dir",
                 "--wheel-dir", work / "out", sources, env=env)
    for wheel in (work / "out").glob(f"horovod-{VERSION}-*.whl"):
        if not is_whole(wheel):
            raise SetupFailed(f"Horovod was built without its library for torch. "
                              f"The log: {commands.log}")
        wheel.chmod(0o644)  # independent of the umask (host/trust.py)
        wheel.replace(kept / wheel.name)
    shutil.rmtree(work)


def for_gpus(target: Target, home: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a build for GPUs: the toolkit, the GPUs, NCCL.

    The PATH, because cmake/build_utils.py asks the nvcc there. CUDA_HOME is for torch.
    """
    found = {"PATH": os.pathsep.join([str(home / "bin"), env.get("PATH", os.defpath)]),
             "CUDA_HOME": str(home), "HOROVOD_CUDA_HOME": str(home)}
    if target.architectures:
        found["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(
            one.replace(".", "") for one in target.architectures)
    if target.nccl:
        found |= {"HOROVOD_GPU_OPERATIONS": "NCCL", NCCL_INCLUDE: str(target.nccl.include),
                  NCCL_LIBRARY: str(target.nccl.library)}
    return found


def fetch_toolkit(work: Path, commands: Commands) -> Path:
    """Download CUDA's compiler into the folder of the build; returns the toolkit's folder.

    Raises SetupFailed.
    """
    commands.pip("install", "--no-deps", "--only-binary", ":all:", "--target", work / "cuda",
                 "--require-hashes", "--requirement", _listed(work / "cuda.txt", TOOLKIT))
    home = work / "cuda" / "nvidia" / f"cu{OF_PIP}"
    complete(home)
    return home


def remove_remains(kept: Path) -> None:
    """Remove what builds that were killed have left."""
    for folder in kept.glob(".build.*"):
        shutil.rmtree(folder)


def install(wheel: Path, commands: Commands, has_nccl: bool = False) -> None:
    """Install a kept wheel, and nothing else, and load it.

    Raises SetupFailed. A Horovod that cannot be loaded does not stay installed; neither does one
    beside which a second NCCL is loaded.
    """
    # Always anew: a Horovod for another torch bears the same version.
    commands.pip("install", "--force-reinstall", "--no-deps", wheel)
    try:
        commands.run(sys.executable, "-I", "-c", LOADS_NCCL if has_nccl else LOADS)
    except SetupFailed as error:
        commands.pip("uninstall", "--yes", "horovod")
        raise SetupFailed(
            f"{error}\nHorovod was installed from {wheel.parent} and cannot be loaded, so it was "
            f"removed again. If the wheel is damaged, delete that folder and run this again."
        ) from error


def fetch(work: Path, commands: Commands, env: dict[str, str]) -> Path:
    """Download Horovod's sources by their hash, and unpack them; returns their folder.

    Raises SetupFailed.
    """
    commands.pip("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod",
                 "--dest", work, "--require-hashes",
                 "--requirement", _listed(work / "sources.txt", [SOURCES]), env=env)
    with tarfile.open(work / f"horovod-{VERSION}.tar.gz") as archive:
        archive.extractall(work)
    return work / f"horovod-{VERSION}"


def _with_tools(work: Path, commands: Commands, pins: Sequence[str]) -> dict[str, str]:
    """Install tools of the build beside it; returns the environment in which Python finds them."""
    tools = work / "tools"
    commands.pip("install", "--no-deps", "--only-binary", ":all:", "--target", tools,
                 "--require-hashes", "--requirement", _listed(work / "tools.txt", pins))
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tools), *([before] if before else [])])}


def _listed(file: Path, pins: Sequence[str]) -> Path:
    file.write_text("".join(f"{pin}\n" for pin in pins))
    return file


def machines_cmake() -> str | None:
    """Return the machine's CMake if Horovod can use it."""
    found = shutil.which("cmake")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    return found if is_cmake_usable(version) else None


def is_cmake_usable(text: str) -> bool:
    """Say whether Horovod builds with the CMake that prints this: 3.18 or newer, but not 4."""
    version = re.match(r"cmake version 3\.(\d+)", text)
    return version is not None and int(version[1]) >= OLDEST_CMAKE_MINOR


def is_whole(wheel: Path) -> bool:
    """Say whether a wheel has the library for torch: the build succeeds without it, too."""
    with zipfile.ZipFile(wheel) as archive:
        return any(name.startswith("horovod/torch/mpi_lib_v2.") for name in archive.namelist())
