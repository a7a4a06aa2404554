"""The set-up of Horovod for GPUs: where NCCL and the CUDA toolkit come from, and what is refused.

No test needs a GPU: the folders are those of wheels, of NVIDIA's packages and of Debian's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_trainer.setup import command, needs, recipe, target
from elastic_trainer.setup.build import Commands, SetupFailed, for_gpus
from elastic_trainer.setup.cause import cause_of
from elastic_trainer.setup.cuda import (
    Nccl,
    Toolkit,
    architectures_here,
    architectures_of,
    complete,
    find_nccl,
    find_toolkit,
    home_of,
    unfit,
)
from elastic_trainer.setup.target import Installed, Target, Torch, Wish, cxx_of, target_of

GPUS, CPUS = Torch("2.13.0", "13.0"), Torch("2.13.0+cpu", None)
NOWHERE = {"PATH": "/nowhere"}


def written(path: Path, text: str = "", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def nccl_in(home: Path, version: str, library: str = "lib/libnccl.so.2") -> Nccl:
    """Make an NCCL as its wheel has it: there is no libnccl.so."""
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    text = "".join(f"#define NCCL_{name} {value}\n" for name, value in parts)
    written(home / "include" / "nccl.h", text)
    return Nccl(home / "include", written(home / library), version)


def toolkit_in(home: Path, version: str, libraries: str = "lib64") -> Path:
    """Make a CUDA toolkit: an nvcc that says its version and its folder, a header, the runtime."""
    written(home / "bin/nvcc", f"""#!/bin/sh
case $1 in
    --version) echo 'Cuda compilation tools, release {version}, V{version}.88' ;;
    *) printf '#$ _HERE_={home}/bin\\n#$ TOP={home}/bin/..\\n' >&2 ;;
esac
""", 0o755)
    written(home / "include/cuda_runtime.h")
    for name in ("libcudart.so", "libcudart_static.a"):
        written(home / libraries / name)
    return home


# --- NCCL ----------------------------------------------------------------------------------------


def test_nccl_comes_from_torchs_packages_and_the_users_choice_wins(tmp_path: Path) -> None:
    """torch's own folder first. A second NCCL in the process would be another library."""
    of_torch = nccl_in(tmp_path / "site/nvidia/nccl", "2.29.7")
    nccl_in(tmp_path / "other/nvidia/nccl", "2.18.1")
    packages = [tmp_path / "empty", tmp_path / "site", tmp_path / "other"]
    assert find_nccl(NOWHERE, packages) == of_torch
    chosen = nccl_in(tmp_path / "mine", "2.30.1", "lib64/libnccl.so.2")
    env = {"HOROVOD_NCCL_HOME": str(tmp_path / "mine")}
    assert find_nccl(env, packages) == chosen
    apart = {"HOROVOD_NCCL_INCLUDE": str(tmp_path / "mine/include"),
             "HOROVOD_NCCL_LIB": str(tmp_path / "site/nvidia/nccl/lib")}
    assert find_nccl(apart, []) == replace(chosen, library=of_torch.library)
    # What is named and not there is not replaced by another.
    assert find_nccl({"HOROVOD_NCCL_HOME": str(tmp_path / "empty")}, packages) is None


def test_a_torch_for_cuda_without_nccl_is_an_error_with_the_command_that_brings_it(
        tmp_path: Path) -> None:
    """No slower Horovod is built instead, unless it is asked for."""
    lacking = Target(GPUS, "nccl")
    (said,) = needs.of_nccl(lacking, NOWHERE)
    assert said == (
        "torch 2.13.0 is built for CUDA 13.0, but NCCL (nccl.h and libnccl.so.2) is neither in its "
        f"packages nor in the system. Install it: {sys.executable} -m pip install "
        "nvidia-nccl-cu13. Or build without it, which is slower: elastic-trainer setup "
        "--without-nccl.")
    assert said in command.lacks(lacking)
    (said,) = needs.of_nccl(lacking, {"HOROVOD_NCCL_HOME": "/opt/nccl"})
    assert "/opt/nccl/include" in said and "HOROVOD_NCCL_HOME" in said and "unset" in said
    assert target_of(GPUS, NOWHERE, Wish(without_nccl=True)) == Target(GPUS, "cuda")
    assert list(needs.of_nccl(Target(GPUS, "cuda"), NOWHERE)) == []
    found = nccl_in(tmp_path / "nvidia/nccl", "2.29.7")
    assert target_of(GPUS, NOWHERE, packages=[tmp_path]) == Target(GPUS, "nccl", found)
    assert target_of(CPUS, NOWHERE, packages=[tmp_path]) == Target(CPUS, "gloo")


# --- the toolkit ---------------------------------------------------------------------------------


def test_the_toolkit_is_looked_for_in_the_documented_order(tmp_path: Path) -> None:
    """A variable, /usr/local/cuda, the folder that nvcc itself names, wheels of pip."""
    system, by_path = tmp_path / "local/cuda", toolkit_in(tmp_path / "cuda-13.1", "13.1")
    wrapper = written(tmp_path / "bin/nvcc", f'#!/bin/sh\nexec {by_path}/bin/nvcc "$@"\n', 0o755)
    env = {"PATH": str(wrapper.parent)}
    assert home_of(wrapper) == by_path.resolve()
    assert find_toolkit("13.0", NOWHERE, system) == Toolkit(None)
    assert find_toolkit("13.0", env, system) == Toolkit(by_path.resolve())
    toolkit_in(system, "13.0", "targets/x86_64-linux/lib")
    assert find_toolkit("13.0", env, system) == Toolkit(system)
    named = toolkit_in(tmp_path / "named", "13.2", "lib")
    assert find_toolkit("13.0", env | {"CUDA_HOME": str(named)}, system) == Toolkit(named)
    horovods = env | {"CUDA_HOME": "/nowhere", "HOROVOD_CUDA_HOME": str(named)}
    assert find_toolkit("13.0", horovods, system) == Toolkit(named)


def test_a_toolkit_of_another_major_version_is_refused(tmp_path: Path) -> None:
    """Both versions are in the sentence. One that is named is an error; of the others, the next is
    taken, and it is said."""
    old = toolkit_in(tmp_path / "cuda-12.4", "12.4")
    named = find_toolkit("13.0", {"CUDA_HOME": str(old)}, tmp_path / "none")
    assert named.flaw == (
        f"CUDA_HOME is {old}, which is of CUDA 12.4 (torch is built for CUDA 13.0). Set CUDA_HOME "
        f"to a toolkit of CUDA 13.0, or unset it.")
    assert named.flaw in command.lacks(Target(GPUS, "cuda"), named)
    passed = find_toolkit("13.0", NOWHERE, old)
    assert (passed.home, passed.flaw) == (None, "")
    assert passed.passed_over == (f"The toolkit in {old}, which is of CUDA 12.4 (torch is built "
                                  f"for CUDA 13.0), is not used.",)
    # pip has no compiler of CUDA 12.
    new = toolkit_in(tmp_path / "cuda-13.0", "13.0")
    none = find_toolkit("12.8", NOWHERE, new)
    assert "torch is built for CUDA 12.8, and no CUDA toolkit" in none.flaw
    assert "of CUDA 13.0" in none.flaw and "apt-get install cuda-toolkit-12-8" in none.flaw


@pytest.mark.parametrize(("missing", "said"), [
    ("bin/nvcc", "whose bin/nvcc is missing"), ("include/cuda_runtime.h", "cuda_runtime.h"),
    ("lib64/libcudart.so", "no lib64/libcudart.so"),
    ("lib64/libcudart_static.a", "no lib64/libcudart_static.a")])
def test_an_incomplete_toolkit_is_found_before_anything_is_compiled(tmp_path: Path, missing: str,
                                                                    said: str) -> None:
    """As a package of the compiler without that of the runtime."""
    home = toolkit_in(tmp_path / "cuda", "13.0")
    (home / missing).unlink()
    assert said in find_toolkit("13.0", {"CUDA_HOME": str(home)}).flaw


def test_a_toolkit_of_wheels_gets_the_names_that_the_linker_needs(tmp_path: Path) -> None:
    """The wheels have lib/libcudart.so.13 alone."""
    home = toolkit_in(tmp_path, "13.0", "lib")
    (home / "lib/libcudart.so").rename(home / "lib/libcudart.so.13")
    assert "libcudart.so" in find_toolkit("13.0", {"CUDA_HOME": str(home)}).flaw
    complete(home)
    assert find_toolkit("13.0", {"CUDA_HOME": str(home)}) == Toolkit(home)
    assert (home / "lib64/libcudart.so").resolve().name == "libcudart.so.13"


# --- the GPUs and the name of a wheel ------------------------------------------------------------


def test_kernels_are_built_for_the_gpus_of_the_machine_or_for_a_list(tmp_path: Path) -> None:
    """Each compute capability once; a machine without a GPU builds for all."""
    smi = written(tmp_path / "nvidia-smi", "#!/bin/sh\nprintf '9.0\\n8.6\\n9.0\\n'\n", 0o755)
    env = {"PATH": str(tmp_path)}
    assert architectures_here(env) == ("8.6", "9.0") and architectures_here(NOWHERE) == ()
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver' >&2; exit 9\n")
    assert architectures_here(env) == ()
    assert architectures_of("10.0, 9.0,8.0") == ("8.0", "9.0", "10.0")
    for wrong in ("90", "sm_90", "9.0;8.0"):
        with pytest.raises(ValueError, match="e.g. 8.0,9.0"):
            architectures_of(wrong)
    wish = Wish(architectures=("8.0", "9.0"))
    built = for_gpus(target_of(GPUS, env, wish), Path("/cuda"), {"PATH": "/bin"})
    assert built == {"PATH": "/cuda/bin:/bin", "CUDA_HOME": "/cuda", "HOROVOD_CUDA_HOME": "/cuda",
                     "HOROVOD_BUILD_CUDA_CC_LIST": "80,90"}
    for_all = for_gpus(Target(GPUS, "nccl", Nccl(Path("/i"), Path("/l/libnccl.so.2"), "2.29.7")),
                       Path("/cuda"), {})
    assert "HOROVOD_BUILD_CUDA_CC_LIST" not in for_all
    assert for_all[recipe.NCCL_LIBRARY] == "/l/libnccl.so.2"


@pytest.mark.parametrize(("built", "gpus", "misfits"), [
    ("8.0", "8.6", []), ("8.6", "8.0", ["8.0"]), ("8.0", "9.0", []), ("9.0", "8.0 9.0", ["8.0"]),
    ("8.0 10.0", "9.0", ["9.0"]), ("8.0 10.0", "12.0", []), ("", "7.5 9.0", [])])
def test_code_for_a_gpu_runs_on_later_ones_of_its_kind_and_the_newest_on_all_later_ones(
        built: str, gpus: str, misfits: list[str]) -> None:
    """NVIDIA's rule: the same major version; for the newest, PTX is kept."""
    assert list(unfit(built.split(), gpus.split())) == misfits


def test_the_name_of_a_kept_wheel_has_all_that_it_depends_on() -> None:
    """torch, CUDA, NCCL, the Python, the libc, the GPUs, the recipe."""
    nccl = Nccl(Path("/i"), Path("/l"), "2.29.7")
    one = Target(GPUS, "nccl", nccl, ("8.0", "9.0"))
    where = target.python_and_libc()
    assert one.name == f"torch-2.13.0-{where}-nccl2.29.7-cuda13.0-sm_8.0_9.0-{recipe.RECIPE}"
    assert re.match(rf"cpython-3{sys.version_info[1]}-.*(glibc|musl)", where)
    assert Target(CPUS, "gloo").name == f"torch-2.13.0+cpu-{where}-gloo-{recipe.RECIPE}"
    others = [Target(CPUS, "gloo"), replace(one, torch=Torch("2.13.0", "12.8")),
              replace(one, torch=Torch("2.12.0", "13.0")), replace(one, architectures=()),
              replace(one, nccl=replace(nccl, version="2.30.7")), Target(GPUS, "cuda")]
    assert len({one.name, *(other.name for other in others)}) == 7
    assert not any(one.is_met_by(other.name) for other in others if other.architectures)
    assert target.architectures_in(one.name) == ("8.0", "9.0")
    assert target.architectures_in(others[0].name) == target.architectures_in(others[3].name) == ()


def test_a_kept_wheel_for_more_gpus_is_taken_and_one_for_others_is_not(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So workers with GPUs take the wheel of a coordinator without one."""
    nccl = Nccl(Path("/i"), Path("/l"), "2.29.7")
    mine, every = Target(GPUS, "nccl", nccl, ("9.0",)), Target(GPUS, "nccl", nccl)
    env = {"XDG_CACHE_HOME": str(tmp_path)}

    def keep(kept: Target) -> Path:
        return written(target.wheels(env) / kept.name / f"horovod-{recipe.VERSION}-any.whl")

    keep(replace(mine, architectures=("8.0",)))  # its PTX would be compiled at each start
    keep(replace(mine, architectures=("10.0",)))
    keep(replace(mine, nccl=replace(nccl, version="2.30.7")))
    assert target.wheel_for(mine, env) is None and target.wheel_for(every, env) is None
    of_all = keep(every)
    assert target.wheel_for(mine, env) == of_all == target.wheel_for(every, env)
    assert target.wheel_for(mine, env) != keep(mine) == target.wheel_for(mine, env)
    # What is installed is kept where no GPU is seen; a list that it does not serve builds anew.
    installed = Installed(recipe.VERSION, mine.name)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: _Metadata(installed))
    assert command.is_done(mine) and command.is_done(every)
    assert not command.is_done(replace(mine, architectures=("8.0",)))
    assert not command.is_done(Target(GPUS, "cuda", None, ("9.0",)))


class _Metadata:
    """What importlib.metadata has of an installed wheel of the cache."""

    def __init__(self, installed: Installed):
        self.version = installed.version
        self.url = f"file:///cache/{installed.made_for}/horovod-{installed.version}-any.whl"

    def read_text(self, name: str) -> str:
        return f'{{"url": "{self.url}"}}'


# --- the compiler --------------------------------------------------------------------------------


def test_the_build_takes_the_standard_that_torchs_headers_ask_for() -> None:
    """As ATen/ATen.h says it: C++17 up to torch 2.13, C++20 since 2.14."""
    line = "#error C++{} or later compatible compiler is required to use ATen.\n"
    assert [cxx_of(line.format(number)) for number in (17, 20, 23)] == [17, 20, 23]
    assert cxx_of("") == 17
    here = target.installed_torch()
    assert here is not None and here.cxx >= 17


def test_a_compiler_that_is_too_old_for_torch_is_found_before_the_build(tmp_path: Path) -> None:
    """The standard is in the sentence."""
    written(tmp_path / "c++", "#!/bin/sh\necho unrecognized option $1 >&2; exit 1\n", 0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = [one for one in needs.of_build(env, 20) if "C++20" in one]
    assert said and "export CXX=" in said[0]
    assert [one for one in needs.of_build(os.environ, 17) if "C++" in one] == []


# --- the error of a failed build -----------------------------------------------------------------

CMAKE_LOG = """\
+ /venv/bin/python -m pip wheel /tmp/horovod-0.28.1
  -- Could not find CCache. Consider installing CCache to speed up compilation.
  CMake Error at /usr/share/cmake-3.25/Modules/FindPackageHandleStandardArgs.cmake:230 (message):
    Could NOT find CUDAToolkit (missing: CUDA_CUDART) (found version
    "13.0.88")

  Call Stack (most recent call first):
    cmake/upstream/FindCUDAToolkit.cmake:1052 (find_package_handle_standard_args)

  -- Configuring incomplete, errors occurred!
  Traceback (most recent call last):
    File "/tmp/horovod-0.28.1/setup.py", line 211, in <module>
  subprocess.CalledProcessError: Command '['cmake']' returned non-zero exit status 1.
  error: subprocess-exited-with-error
  ERROR: Failed building wheel for horovod
ERROR: Failed to build one or more wheels
"""
OF_TORCH = "/venv/torch/include/ATen/ATen.h:5:2: error: #error C++20 or later compatible compiler"


@pytest.mark.parametrize(("log", "cause"), [
    (CMAKE_LOG, "CMake Error at /usr/share/cmake-3.25/Modules/FindPackageHandleStandardArgs.cmake"
                ':230 (message):\n  Could NOT find CUDAToolkit (missing: CUDA_CUDART) (found '
                'version\n  "13.0.88")'),
    (f"  a.cc:1:1: warning: old\n  {OF_TORCH}\n  b.cc:2:3: error: later\n{CMAKE_LOG}", OF_TORCH),
    ("  c++: fatal error: Killed signal terminated program cc1plus\n  make: *** Error 1\n",
     "c++: fatal error: Killed signal terminated program cc1plus"),
    ("  /x/k.cu(12): error: identifier \"__half\" is undefined\n",
     '/x/k.cu(12): error: identifier "__half" is undefined'),
    ("  nvcc fatal   : Unsupported gpu architecture 'compute_70'\n",
     "nvcc fatal   : Unsupported gpu architecture 'compute_70'"),
    ("  /usr/bin/ld: cannot find -lcudart_static: No such file\n  collect2: error: ld returned 1\n",
     "/usr/bin/ld: cannot find -lcudart_static: No such file"),
    ("ERROR: No matching distribution found for nvidia-nvvm\n[notice] a new pip\n",
     "ERROR: No matching distribution found for nvidia-nvvm"),
    ("Traceback (most recent call last):\nImportError: libnccl.so.2: cannot open\n\n",
     "ImportError: libnccl.so.2: cannot open")])
def test_the_error_of_a_build_is_its_cause(log: str, cause: str) -> None:
    """The first error of CMake or the compiler, not the end of a traceback."""
    assert cause_of(log) == cause


def test_a_command_that_fails_shows_its_own_cause_and_where_the_log_is(tmp_path: Path) -> None:
    """Not the errors of commands before it in the same log."""
    commands = Commands(tmp_path / "log")
    commands.run("sh", "-c", f"echo '{OF_TORCH}'")
    source = written(tmp_path / "broken.cc", "int main() { return nothing; }\n")
    with pytest.raises(SetupFailed) as failed:
        commands.run("c++", "-c", source, "-o", tmp_path / "broken.o")
    first, last = str(failed.value).splitlines()
    assert first.startswith(f"{source}:1:21: error: ") and last.endswith(f"{tmp_path / 'log'}")


def test_a_configure_step_that_fails_shows_cmakes_own_sentence(tmp_path: Path) -> None:
    """CMake's, from a real run."""
    written(tmp_path / "CMakeLists.txt", "cmake_minimum_required(VERSION 3.13)\nproject(a NONE)\n"
            "include(FindPackageHandleStandardArgs)\nset(NOT_THERE NOT_THERE-NOTFOUND)\n"
            "find_package_handle_standard_args(Toolkit REQUIRED_VARS NOT_THERE)\n"
            "if(NOT TOOLKIT_FOUND)\n  message(FATAL_ERROR \"no toolkit was found\")\nendif()\n")
    done = subprocess.run(["cmake", "--version"], capture_output=True)
    if done.returncode:
        pytest.skip("no CMake is here")
    with pytest.raises(SetupFailed) as failed:
        Commands(tmp_path / "log").run("cmake", "-S", tmp_path, "-B", tmp_path / "build")
    said = str(failed.value).splitlines()
    assert said[0] == "CMake Error at CMakeLists.txt:7 (message):"
    assert said[1].strip() == "no toolkit was found" and said[2].startswith("The log of the ")
