"""A standby's own side: it waits for its place and becomes the worker that has it.

monitor → place (environment, output) → here → train()

The output before the place is printed when the place comes. Variables that the script or its
wrapper has set stay set, and so does a file into which the script has redirected its output.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_trainer.config import EXIT_LEFT
from elastic_trainer.state.configuration import RUN, taken
from elastic_trainer.state.configuration import VARIABLE as VARIABLE_OF_CONFIGURATION

VARIABLE = "ELASTIC_TRAINER_STANDBY"
"""Monitor's descriptor, time of the start (ns), and padding: NAME_BYTES in all."""
NAME_BYTES = 4608
"""Room for a worker's name and its run's folder in a standby's first environment, where
/proc/PID/environ shows them. A path has at most 4096 bytes (PATH_MAX)."""
WHO = ("ELASTIC_TRAINER_WORKER", "ELASTIC_TRAINER_ATTEMPT", "ELASTIC_TRAINER_RUN_DIR")
"""The only variables of the place that are written there: every process of the same user can read
them, and they appear in logs."""
DEVICE = "ELASTIC_TRAINER_STANDBY_DEVICE"
"""cpu: a standby uses no GPU before it has its place."""
OF_A_GPU = ("CUDA_VISIBLE_DEVICES", "NCCL_")
"""The variables with which a place names its GPU."""
OF_THE_PLACE = ("HOROVOD_", "_HOROVOD_", "ELASTIC_TRAINER_")
REASON_BYTES = 2000


def is_standby() -> bool:
    """True until this process has its place."""
    return VARIABLE in os.environ


def wait_for_place() -> dict[str, float]:
    """Wait until a shim comes, and become its worker: environment, output, name.

    Returns the seconds that this process has waited, for the event log; {}: it is no standby. Call
    it before the first code that depends on the worker's place.
    """
    if not is_standby():
        return {}
    number_of_monitor, began_ns, _ = os.environ.pop(VARIABLE).split(",")
    monitor = socket.socket(fileno=int(number_of_monitor))
    monitor.set_inheritable(False)
    sys.stdout.flush()
    sys.stderr.flush()
    since = time.monotonic()
    loaded = stamps(own_files())
    monitor.send(b"waiting")
    _, descriptors, _, _ = socket.recv_fds(monitor, 64, 6)
    if not descriptors:
        os._exit(EXIT_LEFT)  # the monitor has ended
    roots = (os.getcwd(), *filter(None, sys.path))
    if changed := changed_files(loaded, stamps(loaded), int(began_ns), roots):
        monitor.send(", ".join(changed).encode()[:REASON_BYTES])
        os._exit(EXIT_LEFT)
    if reads_otherwise(read_environment(descriptors[-2]), os.environ,
                       read_environment(descriptors[0])):
        monitor.send(b"the run has another configuration")
        os._exit(EXIT_LEFT)
    _take_place(descriptors)
    monitor.send(b"here")
    if monitor.recv(64) != b"go":
        os._exit(EXIT_LEFT)  # the shim did not wait: the command itself runs in this place
    monitor.close()
    write_name(os.environ)
    return {"waited_s": round(time.monotonic() - since, 3)}


def stays_off_gpu(env: Mapping[str, str]) -> bool:
    return env.get(DEVICE) == "cpu"


def stay_off_gpu() -> None:
    """Let a standby that should stay off the GPU wait for its place at the first use of one. Its
    place then names the GPU, because CUDA reads its variables at that time.

    Source: torch/csrc/utils/device_lazy_init.cpp calls the attribute `torch.cuda._lazy_init`.
    """
    if not (is_standby() and stays_off_gpu(os.environ)):
        return
    import torch  # later: the monitor imports this module

    cuda: Any = torch.cuda
    begin = cuda._lazy_init

    def wait_and_begin() -> None:
        wait_for_place()
        cuda._lazy_init = begin
        begin()

    cuda._lazy_init = wait_and_begin


def reads_otherwise(booted_with: Mapping[str, str], now: Mapping[str, str],
                    place: Mapping[str, str]) -> bool:
    """True if the script has read another configuration than the run has. The section `run` is
    the launcher's."""
    if booted_with.get(VARIABLE_OF_CONFIGURATION, "") == place.get(VARIABLE_OF_CONFIGURATION, ""):
        return False  # also where the script has named a file itself, as every worker's does
    mine, theirs = (taken(env.get(VARIABLE_OF_CONFIGURATION, "")).as_dict()
                    for env in (now, place))
    return {**mine, RUN: None} != {**theirs, RUN: None}


def _take_place(descriptors: list[int]) -> None:
    """Take over the environment and the output of the place."""
    place, *places, booted_with, printed = descriptors
    environment = merged(read_environment(booted_with), os.environ, read_environment(place))
    os.environ.clear()
    os.environ.update(environment)
    given = os.stat(os.devnull), os.fstat(printed), os.fstat(printed)
    for number, (of_place, of_monitor) in enumerate(zip(places, given, strict=True)):
        with suppress(OSError):  # a script has closed it
            if os.path.samestat(os.fstat(number), of_monitor):  # else a script has redirected it
                os.dup2(of_place, number)
    for descriptor in descriptors:
        os.close(descriptor)


def write_environment(variables: Mapping[str, str]) -> int:
    """Write an environment into memory; returns its descriptor."""
    descriptor = os.memfd_create("environment")
    os.write(descriptor, json.dumps(dict(variables)).encode())
    return descriptor


def read_environment(descriptor: int) -> dict[str, str]:
    """Read an environment that `write_environment` has written."""
    return dict(json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0)))


def merged(booted_with: Mapping[str, str], now: Mapping[str, str],
           place: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a place, with the changes of the script or its wrapper.

    The variables that name the worker come from the place alone: a script may have set defaults
    for them.
    """
    removed = booted_with.keys() - now.keys()
    changed = {name: value for name, value in now.items() if booted_with.get(name) != value}
    who = {name: value for name, value in place.items() if name.startswith(OF_THE_PLACE)}
    kept = {name: value for name, value in place.items() if name not in removed}
    return kept | changed | who


def own_files() -> list[str]:
    """Return the files of all loaded modules but those of libraries.

    Libraries have thousands of files, which are not edited while a run waits.
    """
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    modules = list(sys.modules.values())
    files = {getattr(module, "__dict__", {}).get("__file__") or "" for module in modules} - {""}
    return sorted(file for file in files
                  if not file.startswith(libraries) and f"-packages{os.sep}" not in file)


def stamps(files: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return for each name the file's inode and the time of its last change (ns); zeros: none."""
    found = {}
    for file in files:
        try:
            facts = os.stat(file)
            found[file] = facts.st_ino, facts.st_mtime_ns
        except OSError:
            found[file] = 0, 0
    return found


def changed_files(loaded: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]],
                  began_ns: int, roots: tuple[str, ...] = ()) -> list[str]:
    """Return the files that may differ from those that a standby has loaded.

    Under `roots` these are also the files that were written since it started to boot: it may have
    read the older text. Elsewhere compilers (torch's, for one) write modules of their own.
    """
    return [file for file, (inode, written_ns) in loaded.items()
            if now[file] != (inode, written_ns)
            or (written_ns > began_ns and file.startswith(roots))]


def write_name(environment: Mapping[str, str]) -> None:
    """Write this worker's name into the room that /proc/PID/environ has for it.

    That memory is the environment with which this process was started. Nothing else of it is
    changed. psutil cannot write it, so this is done by hand.
    """
    if not environment.get("ELASTIC_TRAINER_WORKER"):
        return  # plain horovodrun gives no names
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, proc(5)
    names = (f"{name}={environment[name]}" for name in WHO if name in environment)
    entry = b"\0".join(map(os.fsencode, names))
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        at = memory.read(end - start).find(f"{VARIABLE}=".encode())
        if at >= 0 and len(entry) <= NAME_BYTES:
            memory.seek(start + at)
            memory.write(entry.ljust(NAME_BYTES, b"\0"))
