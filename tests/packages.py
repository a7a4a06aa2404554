"""Debian's packages that a test needs, installed where apt-get can."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

LOCK_S = 900
"""apt-get waits for the lock of another one: Ceph's packages take minutes on a busy machine."""


def install(*packages: str) -> str:
    """Install packages, and start none of their services; return why apt-get could not, or "". Look
    for the programs afterwards.

    One process at a time: `update` fails where another one runs, whatever the timeout is, and
    without its lists a fresh machine finds no package.
    """
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "this user cannot install it"
    done = None
    with open(Path(tempfile.gettempdir()) / "elastic-trainer-packages.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in ("update --quiet",
                        f"install --yes --quiet --no-install-recommends {' '.join(packages)}"):
            # Without /run/systemd the packages start no service, nor may they by policy-rc.d.
            hidden = ("[ -d /run/systemd ] && mount -t tmpfs tmpfs /run/systemd; "
                      f"exec nice apt-get -o DPkg::Lock::Timeout={LOCK_S} {command}")
            done = subprocess.run(
                ["unshare", "--mount", "sh", "-c", hidden], capture_output=True, text=True,
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"})
    return done.stderr.strip()[-500:] if done and done.returncode else ""
