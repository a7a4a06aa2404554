"""Give this environment the Horovod that the trainer needs.

    elastic-trainer setup             build it for the torch that is installed, or take the wheel
                                      that is kept, and install it
    elastic-trainer setup --check     print what is missing, and do nothing

What always holds:
1. A second call changes nothing and takes milliseconds.
2. All that is missing on the machine is printed at once, before anything is done.
3. One build for each torch, Python and platform: the wheel is kept under ~/.cache (XDG_CACHE_HOME).
4. Two calls at once wait for each other.
5. A kept wheel is installed only if nobody else can have written it (host/trust.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastic_trainer.host import trust
from elastic_trainer.host.locks import take_or_tell
from elastic_trainer.setup import needs
from elastic_trainer.setup.build import Commands, SetupFailed, build, install, remove_remains
from elastic_trainer.setup.recipe import VERSION
from elastic_trainer.setup.sources import PatchRefused
from elastic_trainer.setup.target import (
    Target,
    here,
    installed_horovod,
    is_wheel_kept_for_some_torch,
    kept_wheel,
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
    options = parser.parse_args(argv)
    target = here()
    if target is not None and is_done(target):
        report(f"Horovod {VERSION} for torch {target.torch.version} is installed in {sys.prefix}. "
               f"Nothing to do.")
        return 0
    missing = lacks(target)
    if options.check and target is not None:
        report(plan(target))
    if missing:
        print(*(f"setup: {sentence}" for sentence in missing), sep="\n", file=sys.stderr)
    if missing or options.check or target is None:
        return FAILED
    try:
        set_up(target)
    except (SetupFailed, PatchRefused) as error:
        print(f"setup: {error}", file=sys.stderr)
        return FAILED
    return 0


def report(sentence: str) -> None:
    """Print a sentence at once."""
    print(f"setup: {sentence}", flush=True)


def is_done(target: Target) -> bool:
    """Return whether this environment has the Horovod that it needs."""
    found = installed_horovod()
    return found is not None and (found.version, found.made_for) == (VERSION, target.name)


def lacks(target: Target | None) -> list[str]:
    """Return what is missing to build and install Horovod here."""
    missing = list(needs.of_environment())
    kept = wheels() / target.name if target else None
    is_kept = kept_wheel(kept) if kept else is_wheel_kept_for_some_torch()
    missing += needs.of_trust(kept)
    if not is_kept:
        missing += needs.of_build()
        missing += needs.of_folder(wheels(), "for the built Horovod",
                                   "Or set XDG_CACHE_HOME to another folder")
    return missing


def plan(target: Target) -> str:
    """Return what the command would do."""
    wheel = kept_wheel(wheels() / target.name)
    how = f"installs the wheel {wheel}" if wheel else f"builds it from source ({DURATION})"
    return (f"Horovod {VERSION} for torch {target.torch.version} ({target.gpu}) is not installed "
            f"in {sys.prefix}. `elastic-trainer setup` {how}.")


def set_up(target: Target) -> None:
    """Build if no wheel is kept, and install. Raises SetupFailed, PatchRefused."""
    kept = wheels() / target.name
    trust.make_folder(kept)
    with locked(kept / "lock"):
        if is_done(target):  # by the call that this one waited for
            report(f"Horovod {VERSION} is installed in {sys.prefix}.")
            return
        before = installed_horovod()
        commands = Commands(Path(sys.prefix) / LOG)
        is_built = kept_wheel(kept) is None
        if is_built:
            report(f"building Horovod {VERSION} for torch {target.torch.version} ({target.gpu}); "
                   f"{DURATION}")
            report_missing_nccl(target)
            remove_remains(kept)
            build(target, kept, commands)
        wheel = kept_wheel(kept)
        assert wheel is not None
        if why := trust.why_not_trusted(wheel):  # again: by now the lock is held
            raise SetupFailed(needs.distrust(why))
        install(wheel, commands)
        done = "built" if is_built else "took the kept wheel of"
        place = f" in the place of Horovod {before.version}" if before else ""
        report(f"{done} Horovod {VERSION} for torch {target.torch.version} ({target.gpu}), and "
               f"installed it in {sys.prefix}{place}. The wheel is kept: {wheel}")


def report_missing_nccl(target: Target) -> None:
    """Report why a torch for GPUs gets a Horovod without NCCL."""
    if target.torch.cuda and target.gpu != "nccl":
        report(f"torch is built for CUDA {target.torch.cuda}, but nvcc or nccl.h is missing, so "
               f"Horovod is built without NCCL. To have NCCL, install the CUDA toolkit and "
               f"libnccl-dev, and run this again.")


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock; a second process prints that it waits."""
    with open(file, "w") as lock:
        take_or_tell(lock.fileno(), 0.0, lambda: report("waiting for another set-up to finish"))
        yield
