"""Where the standbys of a user wait on a machine: one Unix socket each, named after its monitor.

monitor, pool, agent → here → the folder

driver/standby_shim.py has a copy of the first two names: it starts in 60 ms and imports nothing of
ours. A test compares the copies.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import psutil

from elastic_trainer.host.trust import is_of

FOLDER_VARIABLE = "ELASTIC_TRAINER_STANDBY_DIR"
"""Where monitors wait; the same for shim, monitors and agent of one machine."""


def standby_folder(env: Mapping[str, str], user: int | None = None) -> Path:
    """Return the folder of a user's standbys, by default of this process's user.

    The path is short, because that of a Unix socket has 107 bytes at most.
    """
    uid = os.getuid() if user is None else user
    return Path(env.get(FOLDER_VARIABLE) or f"/tmp/elastic-trainer-{uid}")


def socket_of(folder: Path, command: str, monitor: int) -> Path:
    """Return the path of the socket of a monitor (a pid), by its command's name."""
    return folder / f"{command}-{monitor}.sock"


def has_monitor(path: Path) -> bool:
    """True if the monitor after which a socket is named lives."""
    monitor = path.stem.rpartition("-")[2]
    return monitor.isdecimal() and len(monitor) < 10 and bool(psutil.pid_exists(int(monitor)))


def waiting_in(folder: Path, user: int | None = None) -> int:
    """Return how many standbys have booted and wait in the folder of a user, by default of this
    process's. In the folder of another user there are none: its name can be foreseen."""
    try:
        found = os.lstat(folder)
    except OSError:
        return 0
    if not (stat.S_ISDIR(found.st_mode) and is_of(found, 0o022, user)):
        return 0
    return sum(map(has_monitor, folder.glob("*.sock")))
