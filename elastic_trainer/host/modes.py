"""How files are written: with which modes, and whole.

store, event log, result, output → here → the file system

What always holds:
1. A file is made with mode 0600 and a folder with 0700, independent of the umask.
2. In a shared folder they are made with 0660 and 2770. A folder is shared if it is group-writable
   and has the setgid bit (chmod 2770), with which new files in it belong to its group (inode(7)).
   Folders in it are shared like it. All processes and hosts read this from the folder, so they need
   no option.
3. Existing files keep their modes. No file is made readable for users outside the group.
4. `replace_whole`: every reader sees the old content or the new one.

What it does not do: change S3, where bucket and key decide; or the files of the user's own code.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

Opener = Callable[[str, int], int]
SHARED = stat.S_ISGID | stat.S_IWGRP


def is_shared(folder: str | Path) -> bool:
    """True if a folder's files are its group's. Raises OSError."""
    return os.stat(folder).st_mode & SHARED == SHARED


def make_folder(path: Path) -> None:
    """Make a folder if it does not exist. Its parents get the umask's modes. Raises OSError."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError as error:
        if path.is_dir():  # another process has made it
            return
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error
    if is_shared(path.parent):
        path.chmod(0o2770)


def private(path: str, flags: int) -> int:
    """Open a file and return its descriptor, for open(…, opener=private). Raises OSError."""
    if not flags & os.O_CREAT or not is_shared(os.path.dirname(path) or "."):
        return os.open(path, flags, 0o600)
    try:
        descriptor = os.open(path, flags | os.O_EXCL, 0o660)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        return os.open(path, flags, 0o660)
    os.fchmod(descriptor, 0o660)  # the umask would keep the group from writing
    return descriptor


def write_text(path: Path, text: str) -> None:
    """Write a file. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text)


def replace_whole(path: Path, content: str | bytes, *, opener: Opener | None = private,
                  at: float | None = None) -> None:
    """Replace a file. Raises OSError; then the old one stays.

    `opener` None: the umask decides its mode. `at` is the file's time, by default now.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(new, "wb", opener=opener) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        if at is not None:
            os.utime(new, (at, at))
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
