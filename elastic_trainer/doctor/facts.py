"""Facts of this machine, as far as a run depends on them: probed here, judged in checks.py.

this machine, store → here → checks.py, or as JSON over ssh → commands/doctor.py

What always holds: a probe that fails is a fact, with its error. No probe raises, and none leaves
anything behind.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from elastic_trainer.host import own

LIBRARIES_S = 120.0
"""The time to import torch and Horovod."""
WRITTEN_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """What a store did. "" is success, other texts are the error."""

    url: str
    write: str = ""
    conditional: str = ""
    """Whether put-if-absent is honoured."""
    read: str = ""
    list: str = ""
    delete: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one machine is and has."""

    host: str
    python: str = platform.python_version()
    executable: str = sys.executable
    torch: str = ""
    torch_error: str = ""
    cuda: str = ""
    """The version of CUDA that torch was built for; "": for the CPU alone."""
    gpus: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    """The compute capability of each GPU, e.g. 9.0."""
    has_nvidia: bool = False
    """There is a device of NVIDIA's driver, or its command."""
    horovod: str = ""
    horovod_error: str = ""
    made_for: str = ""
    """The torch for which our build of Horovod was made; "": unknown."""
    recipe: str = ""
    """The number of our patches with which it was built (setup/recipe.py); "": unknown."""
    kernels: tuple[str, ...] = ()
    """The compute capabilities for which its kernels were built; empty: all, or unknown."""
    gloo: bool = False
    nccl: bool = False
    processor: str = ""
    interfaces: tuple[str, ...] = ()
    """Those that are up and have an address, as name=address, without loopback."""
    address: str = ""
    """This machine's address on the way to the other hosts."""
    folder: str = ""
    folder_error: str = ""
    folder_free_bytes: int = 0
    temporary_error: str = ""
    shared_memory_bytes: int = 0
    """Free in /dev/shm; 0: there is none."""
    open_files: int = 0
    """The hard limit."""
    ssh: str = ""
    """The path of ssh here."""
    sees_mark: bool | None = None
    """The runs' folder is the coordinator's; None: not asked."""
    store: StoreFacts | None = None

    @staticmethod
    def from_json(found: dict[str, Any]) -> Facts:
        """Read what `dataclasses.asdict` has made. Raises TypeError for another version's."""
        store = found.pop("store", None)
        known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                                 for name, value in found.items()}
        return Facts(**known, store=StoreFacts(**store) if store else None)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to look at."""

    host: str = ""
    folder: str = "runs"
    """Where the runs are kept."""
    store: str = ""
    towards: str = ""
    """An address of the other hosts."""
    mark: str = ""
    """A file that the coordinator has made in the runs' folder."""


def probe(wanted: Wanted) -> Facts:
    """Return the facts of this machine. Costs: the import of torch, in another process."""
    found: dict[str, Any] = _libraries()
    known = {one.name for one in fields(Facts)}
    found = {name: value for name, value in found.items() if name in known}
    return Facts(
        host=wanted.host or socket.gethostname(), **{**found, **_horovod()},
        has_nvidia=os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None,
        processor=_processor(), interfaces=_interfaces(), address=_address(wanted.towards),
        folder=str(Path(wanted.folder).absolute()), folder_error=_failed_write(wanted.folder),
        folder_free_bytes=_free(wanted.folder),
        temporary_error=_failed_write(tempfile.gettempdir()),
        shared_memory_bytes=_free("/dev/shm") if os.path.isdir("/dev/shm") else 0,
        open_files=_open_files(), ssh=shutil.which("ssh") or "",
        sees_mark=os.path.exists(wanted.mark) if wanted.mark else None,
        store=probe_store(wanted.store) if wanted.store else None)


def _libraries() -> dict[str, Any]:
    try:
        done = subprocess.run(own.command("elastic_trainer.doctor.libraries"), capture_output=True,
                              text=True, timeout=LIBRARIES_S)
    except subprocess.TimeoutExpired:
        return {"torch_error": f"its import takes more than {LIBRARIES_S:.0f} s"}
    _, mark, text = done.stdout.rpartition("\nFACTS")
    if not mark:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"horovod_error": f"the import ended with exit code {done.returncode}: {last}"}
    return dict(json.loads(text))


def _horovod() -> dict[str, Any]:
    from elastic_trainer.setup.target import architectures_in, installed_horovod

    found = installed_horovod()
    name = found.made_for if found else ""
    parts = name.split("-") if name else ["", "", ""]
    return {"horovod": found.version if found else "", "made_for": parts[1], "recipe": parts[-1],
            "kernels": architectures_in(name)}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _interfaces() -> tuple[str, ...]:
    import psutil

    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    return tuple(f"{name}={one.address}" for name, addresses in psutil.net_if_addrs().items()
                 for one in addresses
                 if name in up and one.family == socket.AF_INET
                 and not one.address.startswith("127."))


def _address(towards: str) -> str:
    from elastic_trainer.world.reach import own_address_towards

    with suppress(OSError):
        return own_address_towards(towards) if towards else ""
    return ""


def nearest(folder: str) -> Path:
    """Return the folder, or the nearest of its parents that exists."""
    path = Path(folder).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _free(folder: str) -> int:
    with suppress(OSError):
        return shutil.disk_usage(nearest(folder)).free
    return 0


def _failed_write(folder: str) -> str:
    """Write and sync a file of 1 MiB; returns the error, "" for success."""
    path = nearest(folder) / f".doctor-{secrets.token_hex(8)}"
    try:
        with open(path, "xb") as file:
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error.strerror}: {path.parent}"
    finally:
        with suppress(OSError):
            path.unlink()
    return ""


def _open_files() -> int:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if most == resource.RLIM_INFINITY else most


def probe_store(url: str) -> StoreFacts:
    """Write, read, list and delete an object under the store's prefix.

    Network: about eight requests.
    """
    from elastic_trainer.state.stores.by_url import open_store
    from elastic_trainer.state.stores.store import StoreUnavailable, prove_put_if_absent

    try:
        store = open_store(url)
    except StoreUnavailable as error:
        return StoreFacts(url=url, write=str(error))
    name = f"probe/doctor-{secrets.token_hex(8)}"

    def failed(act: Callable[[], Any]) -> str:
        try:
            act()
            return ""
        except (StoreUnavailable, FileNotFoundError) as error:
            return str(error) or type(error).__name__

    if write := failed(lambda: store.put(name, b"doctor")):
        return StoreFacts(url=url, write=write)
    try:
        return StoreFacts(
            url=url, read=failed(lambda: store.get(name)),
            list=failed(lambda: _require_listed(store.list("probe"), name)),
            conditional=failed(lambda: prove_put_if_absent(store)),
            delete=failed(lambda: store.delete([name])))
    finally:
        with suppress(StoreUnavailable):
            store.delete([name])


def _require_listed(names: list[str], name: str) -> None:
    if name not in names:
        raise FileNotFoundError("an object that was just written is not listed")
