"""Whether only this user can have written a file: what is installed from a cache runs as this user.

a kept wheel, its folders → here → a sentence, or none

Source: as OpenSSH's StrictModes judges a user's files, sshd_config(5).
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
