"""Debian's packages that a test needs, installed where apt-get can."""

import os
import subprocess


def install(*packages: str) -> None:
    """Install packages, and start none of their services. It may fail: look for the programs."""
    for command in ("update --quiet",
                    f"install --yes --quiet --no-install-recommends {' '.join(packages)}"):
        # Without /run/systemd the packages start no service, nor may they by policy-rc.d.
        hidden = ("[ -d /run/systemd ] && mount -t tmpfs tmpfs /run/systemd; "
                  f"exec nice apt-get -o DPkg::Lock::Timeout=120 {command}")
        subprocess.run(["unshare", "--mount", "sh", "-c", hidden], capture_output=True,
                       env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"})
