"""Modes of a run's files: readable by the user who writes them, and by a group of a shared folder.

store, event log, result, output → here → the file system

What always holds:
1. A file is made with mode 0600 and a folder with 0700, independent of the umask.
2. In a shared folder they are made with 0660 and 2770. A folder is shared if it is group-writable
   and has the setgid bit (chmod 2770), with which new files in it belong to its group (inode(7)).
   Folders in it are shared like it. All processes and hosts read this from the folder, so they need
   no option.
3. Existing files keep their modes. No file is made readable for users outside the group.

What it does not do: change S3, where bucket and key decide; or the files of the user's own code.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

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
