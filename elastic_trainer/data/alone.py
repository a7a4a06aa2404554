"""Let one process of this user on this machine do something at a time.

index.py (build an index), adapters/lightning.py (download) → here → a lock in a private folder

What always holds:
1. Locks lie in a folder that belongs to this user and that others cannot enter. A folder for which
   that is not true is an error, so that no other user can hold a lock, or lead us elsewhere.
2. Whoever waits for longer than TOLD_AFTER_S says so once on stderr, with the process that it waits
   for.
3. The file of a lock is removed by its holder. A process that waited for the removed file takes
   the lock of a new one.
4. A lock ends with its process, also when that is killed (flock).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic_trainer.config import ConfigError
from elastic_trainer.host import locks
from elastic_trainer.host.trust import is_of

TOLD_AFTER_S = 3.0
NAME = "elastic-trainer"


def private_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return a folder that only this user can enter; make it if there is none. Raises ConfigError.

    It is in XDG_RUNTIME_DIR, in the user's cache where that is not set, or in /tmp where there is
    no home. In /tmp its name can be foreseen, so the folder of another user there is an error.
    """
    given = os.environ if env is None else env
    places = [Path(given["XDG_RUNTIME_DIR"])] if given.get("XDG_RUNTIME_DIR") else []
    places += [Path(given.get("XDG_CACHE_HOME") or Path(given["HOME"], ".cache"))] if given.get(
        "XDG_CACHE_HOME") or given.get("HOME") else []
    for place in places:
        with suppress(OSError):  # there is no such place, or it may not be written
            (place / NAME).mkdir(mode=0o700, parents=True, exist_ok=True)
            # No other user can rename what is in them.
            if all(is_of(os.stat(folder), 0o022) for folder in (place, place / NAME)):
                folder = _required(place / NAME / "locks")
                _try_lock(folder)
                return folder
    return _required(Path("/tmp", f"{NAME}-locks-{os.getuid()}"))


def _required(folder: Path) -> Path:
    """Make a private folder. Raises ConfigError for one that is not private, OSError."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = os.lstat(folder)
    if not (stat.S_ISDIR(found.st_mode) and is_of(found, 0o077)):
        raise ConfigError(f"{folder} is not a folder of this user alone (owner {found.st_uid}, "
                          f"mode {stat.S_IMODE(found.st_mode):o}), so another user could lead this "
                          f"process elsewhere. Run: chmod 700 {folder}, remove it, or set "
                          f"XDG_RUNTIME_DIR to a folder of your own.")
    return folder


def _try_lock(folder: Path) -> None:
    """Raise OSError where the file system has no locks: some Lustre and NFS have none for a home.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def say(sentence: str) -> None:
    """Print a sentence for a person."""
    print(f"elastic-trainer: {sentence}", file=sys.stderr, flush=True)


@contextmanager
def alone_on_host(name: str, what: str, told: Callable[[str], None] = say) -> Iterator[None]:
    """Hold the lock of a name for the block. `what` its holder does, for those who wait."""
    path = private_folder() / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}.lock"
    descriptor = _taken(path, what, told)
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)  # it is ours: only the holder removes it
        os.close(descriptor)


def _taken(path: Path, what: str, told: Callable[[str], None]) -> int:
    """Wait for a lock; returns the descriptor that holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _wait(descriptor, path, what, told)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    with suppress(OSError):  # a full disk: those who wait do not see the number
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has removed it


def _wait(descriptor: int, path: Path, what: str, told: Callable[[str], None]) -> None:
    def tell() -> None:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "?"
        told(f"waiting for the process {holder} of this machine, which {what} ({path}). If it "
             f"hangs, end it.")

    locks.take_or_tell(descriptor, TOLD_AFTER_S, tell)
