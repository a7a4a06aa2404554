"""CUDA's toolkit, NCCL and the GPUs of this machine, as a build of Horovod needs them.

environment, nvcc, nvidia-smi, the packages of torch → here → target (what is built), build (how)

What always holds:
1. NCCL is taken from where torch takes it. Both then load one library: the loader knows a library
   by its name, libnccl.so.2, and torch has loaded it before Horovod is.
2. What the user names (HOROVOD_CUDA_HOME, CUDA_HOME, HOROVOD_NCCL_HOME) is taken or refused.
   Nothing else is taken in its place.
3. A toolkit of another major version than torch's CUDA is not used.

Source of the places in torch: the run path of libtorch_cuda.so ($ORIGIN/../../nvidia/nccl/lib), and
torch/__init__.py, _preload_cuda_deps, which looks in each folder of sys.path.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/usr/local/cuda")
OF_PIP = "13"
"""The major version of CUDA whose compiler is a wheel (recipe.TOOLKIT). The wheels for CUDA 12 have
no nvcc."""
NAMED = ("HOROVOD_CUDA_HOME", "CUDA_HOME")


@dataclass(frozen=True)
class Nccl:
    """One NCCL: its header, its library, and its version."""

    include: Path
    library: Path
    version: str


@dataclass(frozen=True)
class Toolkit:
    """The CUDA toolkit for a build."""

    home: Path | None
    """None: its wheels are fetched into the folder of the build."""
    flaw: str = ""
    """Why it cannot be used, and the remedy: two sentences."""
    passed_over: tuple[str, ...] = ()
    """Why others that were found are not used."""


# --- NCCL -----------------------------------------------------------------------------------------


def find_nccl(env: Mapping[str, str], packages: Iterable[Path]) -> Nccl | None:
    """Return the NCCL of the user's choice, else that of torch's packages, else the system's."""
    if chosen := named_nccl(env):
        includes, libraries = chosen
        return _nccl(includes, libraries)
    for folder in packages:
        home = folder / "nvidia" / "nccl"
        if found := _nccl([home / "include"], [home / "lib"]):
            return found
    homes = [Path("/usr"), Path("/usr/local"), SYSTEM]
    return _nccl([home / "include" for home in homes],
                 [folder for home in homes for folder in _library_folders(home)])


def named_nccl(env: Mapping[str, str]) -> tuple[list[Path], list[Path]] | None:
    """Return the folders of the header and of the library that the user has named."""
    home, include, library = (env.get(f"HOROVOD_NCCL_{name}") for name in ("HOME", "INCLUDE",
                                                                          "LIB"))
    if not (home or include or library):
        return None
    includes = [Path(include)] if include else []
    libraries = [Path(library)] if library else []
    if home:
        includes.append(Path(home) / "include")
        libraries.extend(_library_folders(Path(home)))
    return includes, libraries


def _nccl(includes: Iterable[Path], libraries: Sequence[Path]) -> Nccl | None:
    for include in includes:
        if (include / "nccl.h").is_file():
            for folder in libraries:
                for name in ("libnccl.so.2", "libnccl.so"):
                    if (folder / name).is_file():
                        text = (include / "nccl.h").read_text(errors="replace")
                        return Nccl(include, folder / name, nccl_version(text))
    return None


def nccl_version(header: str) -> str:
    """Read the version in nccl.h, e.g. 2.29.7."""
    found = [re.search(rf"^#define NCCL_{part} +(\d+)", header, re.M)
             for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(one[1] for one in found if one)


def _library_folders(home: Path) -> list[Path]:
    return [home / "lib64", home / "lib", *sorted(home.glob("lib/*-linux-gnu")),
            *sorted(home.glob("targets/*-linux/lib"))]


# --- the toolkit ----------------------------------------------------------------------------------


def find_toolkit(cuda: str, env: Mapping[str, str], system: Path = SYSTEM) -> Toolkit:
    """Return the toolkit for a torch that is built for this version of CUDA.

    The order: what the user names, /usr/local/cuda, the toolkit of the nvcc on PATH, and wheels
    that are fetched for the build.
    """
    for name in NAMED:
        if home := env.get(name):
            flaw = flaw_of(Path(home), cuda)
            return Toolkit(Path(home), flaw and f"{name} is {home}, {flaw}. Set {name} to a "
                                                f"toolkit of CUDA {cuda}, or unset it.")
    nvcc = shutil.which("nvcc", path=env.get("PATH"))
    passed_over = dict[Path, str]()
    for found in (system, *([home_of(Path(nvcc))] if nvcc else [])):
        if not (found / "bin" / "nvcc").exists():
            continue
        flaw = flaw_of(found, cuda)
        if not flaw:
            return Toolkit(found, passed_over=tuple(passed_over.values()))
        passed_over.setdefault(found.resolve(), f"The toolkit in {found}, {flaw}, is not used.")
    if major(cuda) == OF_PIP:
        return Toolkit(None, passed_over=tuple(passed_over.values()))
    return Toolkit(None, " ".join([
        f"torch is built for CUDA {cuda}, and no CUDA toolkit of this major version was found.",
        *passed_over.values(),
        f"Install one, e.g. apt-get install cuda-toolkit-{cuda.replace('.', '-')}, or set "
        f"CUDA_HOME to its folder."]))


def flaw_of(home: Path, cuda: str) -> str:
    """Return why a folder is no toolkit for this version of CUDA, as a relative clause; "" if it
    is one."""
    version = version_of(home / "bin" / "nvcc")
    if not version:
        return "whose bin/nvcc is missing or cannot be run"
    if major(version) != major(cuda):
        return f"which is of CUDA {version} (torch is built for CUDA {cuda})"
    homes = [home, Path("/usr")]
    headers = [home / "include", *home.glob("targets/*-linux/include"), Path("/usr/include")]
    if not any((folder / "cuda_runtime.h").is_file() for folder in headers):
        return "which has no include/cuda_runtime.h"
    folders = [folder for one in homes for folder in _library_folders(one)]
    missing = [name for name in ("libcudart.so", "libcudart_static.a")
               if not any((folder / name).exists() for folder in folders)]
    return f"which has no lib64/{missing[0]}" if missing else ""


def home_of(nvcc: Path) -> Path:
    """Return the folder of the toolkit to which an nvcc belongs. It may be a wrapper script."""
    shown = _output(str(nvcc), "--dryrun", "x.cu")
    found = re.search(r"^#\$ TOP=(.+)$", shown, re.M)
    return (Path(found[1]) if found else nvcc.resolve().parent.parent).resolve()


def version_of(nvcc: Path) -> str:
    """Return the version of CUDA of an nvcc, e.g. 13.0; "" if it cannot be run."""
    found = re.search(r"release (\d+\.\d+)", _output(str(nvcc), "--version"))
    return found[1] if found else ""


def major(version: str) -> str:
    """Return 13 for 13.0."""
    return version.partition(".")[0]


def complete(home: Path) -> None:
    """Add the names that the linker and CMake look for to a toolkit that is made of wheels."""
    (home / "lib64").symlink_to("lib")
    for library in list((home / "lib").glob("lib*.so.*")):
        plain = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)


# --- the GPUs -------------------------------------------------------------------------------------


def architectures_here(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the compute capabilities of this machine's GPUs, e.g. ("9.0",); empty without one."""
    asks = shutil.which("nvidia-smi", path=env.get("PATH"))
    shown = _output(asks, "--query-gpu=compute_cap", "--format=csv,noheader") if asks else ""
    return in_order(line.strip() for line in shown.splitlines()
                    if re.fullmatch(r"\d+\.\d+", line.strip()))


def architectures_of(text: str) -> tuple[str, ...]:
    """Read --cuda-arch, e.g. 8.0,9.0. Raises ValueError."""
    named = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d+\.\d", part) for part in named):
        raise ValueError(f"--cuda-arch is {text!r}. Name compute capabilities, e.g. 8.0,9.0.")
    return in_order(named)


def in_order(architectures: Iterable[str]) -> tuple[str, ...]:
    """Return each once, the oldest first."""
    return tuple(sorted(set(architectures), key=_numbers))


def unfit(built: Sequence[str], gpus: Iterable[str]) -> Iterator[str]:
    """Yield the GPUs on which kernels that are built for these architectures do not run.

    For the newest architecture of a build PTX is kept, which the driver compiles for any newer GPU.
    """
    for gpu in in_order(gpus):
        if not has_code(built, gpu) and _numbers(in_order(built)[-1]) > _numbers(gpu):
            yield gpu


def has_code(built: Sequence[str], gpu: str) -> bool:
    """True if a build has machine code for a GPU: code for 8.0 runs on 8.6, but not on 9.0.

    No architecture at all: it is built for all of them.
    """
    wanted = _numbers(gpu)
    return not built or any(one[0] == wanted[0] and one <= wanted for one in map(_numbers, built))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _output(*command: str) -> str:
    """Return what a command prints; "" if it cannot be run."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
