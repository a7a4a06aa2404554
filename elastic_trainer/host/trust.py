"""Whether a file is of this user alone: what is installed from a cache runs as this user, and other
users must not enter the folders of locks and standbys.

a kept wheel, a folder → here → a sentence, or none

driver/standby_shim.py has its own test of a folder: it imports nothing of ours.

Source: as OpenSSH's StrictModes judges a user's files, sshd_config(5).
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def is_of(found: os.stat_result, others: int, user: int | None = None) -> bool:
    """True if a file is a user's, by default this process's, and others have none of these rights
    in it (0o022: to write in it, 0o077: any)."""
    return found.st_uid == (os.getuid() if user is None else user) and not found.st_mode & others


def why_not_trusted(path: Path) -> str:
    """Return who else could have written a file or a folder that exists; "" if nobody could.

    Its folders are looked at too, up to the root: who can rename one of them can replace the file.
    A link is looked at where it leads.
    """
    for at in (path.resolve(), *path.resolve().parents):
        found = at.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{at} belongs to another user ({_name_of(found.st_uid)})"
        is_sticky = at != path and found.st_mode & stat.S_ISVTX  # as /tmp: nobody renames others'
        others = found.st_mode & OTHERS
        if is_sticky or not others or others == stat.S_IWGRP and _is_own_group(found.st_gid):
            continue
        return f"{at} can be written by other users (its mode is {stat.S_IMODE(found.st_mode):o})"
    return ""


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that do not exist, for this user alone."""
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def _is_own_group(gid: int) -> bool:
    """True for a group of one: some systems give each user one, and a umask of 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (gid == user.pw_gid and group.gr_name == user.pw_name
            and not set(group.gr_mem) - {user.pw_name})


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
