"""Give this environment the Horovod that the trainer needs.

    elastic-trainer setup             build it for the torch that is installed, or take the wheel
                                      that is kept, and install it
    elastic-trainer setup --check     print what is missing, and do nothing
    elastic-trainer setup --cuda-arch 8.0,9.0       with kernels for these GPUs
    elastic-trainer setup --without-nccl            GPU tensors then pass through the CPU

What always holds:
1. A second call changes nothing and takes milliseconds.
2. All that is missing on the machine is printed at once, before anything is done.
3. One build for each torch, Python, platform, NCCL and list of GPUs: the wheel is kept under
   ~/.cache (XDG_CACHE_HOME).
4. Two calls at once wait for each other.
5. A kept wheel is installed only if nobody else can have written it (host/trust.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from elastic_trainer.host import trust
from elastic_trainer.host.locks import take_or_tell
from elastic_trainer.setup import needs
from elastic_trainer.setup.build import Commands, SetupFailed, build, install, remove_remains
from elastic_trainer.setup.cuda import Toolkit, architectures_of, find_toolkit
from elastic_trainer.setup.recipe import VERSION
from elastic_trainer.setup.sources import PatchRefused
from elastic_trainer.setup.target import (
    Target,
    Wish,
    architectures_in,
    here,
    installed_horovod,
    is_wheel_kept_for_some_torch,
    wheel_for,
    wheels,
)

LOG = "horovod-setup.log"
FAILED = 1
DURATION = "about 4 minutes on 2 cores"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. With --check it is 0 when nothing is to be done."""
    parser = argparse.ArgumentParser(prog="elastic-trainer setup", allow_abbrev=False,
                                     description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true",
                        help="print what is missing, and do nothing")
    parser.add_argument("--without-nccl", action="store_true",
                        help="for a torch with CUDA: build without NCCL. Each tensor of a GPU then "
                             "passes through the CPU")
    parser.add_argument("--cuda-arch", metavar="LIST", default="",
                        help="for a torch with CUDA: the compute capabilities of the GPUs, e.g. "
                             "8.0,9.0 (default: those of this machine, or all if it has no GPU)")
    options = parser.parse_args(argv)
    try:
        architectures = architectures_of(options.cuda_arch) if options.cuda_arch else ()
    except ValueError as error:
        parser.error(str(error))
    target = here(wish=Wish(without_nccl=options.without_nccl, architectures=architectures))
    if target is not None and is_done(target):
        report(f"Horovod {VERSION} for torch {target.torch.version} is installed in {sys.prefix}. "
               f"Nothing to do.")
        return 0
    toolkit = find_toolkit(target.torch.cuda, os.environ) if target and target.torch.cuda else None
    missing = lacks(target, toolkit)
    if options.check and target is not None:
        report(plan(target))
    if missing:
        print(*(f"setup: {sentence}" for sentence in missing), sep="\n", file=sys.stderr)
    if missing or options.check or target is None:
        return FAILED
    try:
        set_up(target, toolkit)
    except (SetupFailed, PatchRefused) as error:
        print(f"setup: {error}", file=sys.stderr)
        return FAILED
    return 0


def report(*sentences: str) -> None:
    """Print sentences at once."""
    for sentence in sentences:
        print(f"setup: {sentence}", flush=True)


def is_done(target: Target) -> bool:
    """Return whether this environment has the Horovod that it needs.

    Where no GPU is seen and none is named, kernels for any GPU do.
    """
    found = installed_horovod()
    if found is None or found.version != VERSION:
        return False
    wanted = target.architectures or architectures_in(found.made_for)
    return replace(target, architectures=wanted).is_met_by(found.made_for)


def lacks(target: Target | None, toolkit: Toolkit | None = None) -> list[str]:
    """Return what is missing to build and install Horovod here."""
    missing = list(needs.of_environment())
    wheel = wheel_for(target) if target else None
    is_kept = wheel is not None if target else is_wheel_kept_for_some_torch()
    if target:
        missing += needs.of_nccl(target)
        missing += needs.of_trust(wheel or wheels() / target.name)
    if not is_kept:
        missing += needs.of_build(cxx=target.torch.cxx if target else None)
        if toolkit and toolkit.flaw:
            missing.append(toolkit.flaw)
        missing += needs.of_folder(wheels(), "for the built Horovod",
                                   "Or set XDG_CACHE_HOME to another folder")
    return missing


def plan(target: Target) -> str:
    """Return what the command would do."""
    wheel = wheel_for(target)
    how = f"installs the wheel {wheel}" if wheel else f"builds it from source ({DURATION})"
    return (f"Horovod {VERSION} for {target} is not installed "
            f"in {sys.prefix}. `elastic-trainer setup` {how}.")


def set_up(target: Target, toolkit: Toolkit | None = None) -> None:
    """Build if no wheel is kept, and install. Raises SetupFailed, PatchRefused."""
    kept = wheels() / target.name
    trust.make_folder(kept)
    with locked(kept / "lock"):
        if is_done(target):  # by the call that this one waited for
            report(f"Horovod {VERSION} is installed in {sys.prefix}.")
            return
        before = installed_horovod()
        commands = Commands(Path(sys.prefix) / LOG)
        is_built = wheel_for(target) is None
        if is_built:
            report(f"building Horovod {VERSION} for {target}; {DURATION}")
            report_libraries(target, toolkit)
            remove_remains(kept)
            build(target, toolkit, kept, commands)
        wheel = wheel_for(target)
        assert wheel is not None
        if why := trust.why_not_trusted(wheel):  # again: by now the lock is held
            raise SetupFailed(needs.distrust(why))
        install(wheel, commands, target.gpu == "nccl")
        done = "built" if is_built else "took the kept wheel of"
        place = f" in the place of Horovod {before.version}" if before else ""
        report(f"{done} Horovod {VERSION} for {target}, and "
               f"installed it in {sys.prefix}{place}. The wheel is kept: {wheel}")


def report_libraries(target: Target, toolkit: Toolkit | None) -> None:
    """Report which NCCL and which CUDA toolkit a build uses."""
    if target.nccl:
        report(f"NCCL {target.nccl.version} is {target.nccl.library}.")
    if toolkit:
        report(*toolkit.passed_over,
               f"The CUDA toolkit is {toolkit.home}." if toolkit.home else
               "CUDA's compiler is fetched with pip, for this build alone.")


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock; a second process prints that it waits."""
    with open(file, "w") as lock:
        take_or_tell(lock.fileno(), 0.0, lambda: report("waiting for another set-up to finish"))
        yield
