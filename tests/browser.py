"""A real headless Chromium, of Debian's package, which is installed where apt-get can."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from s3_servers import Unavailable

PROGRAM = "/usr/bin/chromium"
BLOCKED = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
"""Every name and address but this one cannot be reached, for the pages and for Chromium itself."""


def prepare() -> None:
    """Install Chromium if it is missing. Raises Unavailable."""
    if os.path.exists(PROGRAM):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Unavailable("Chromium is not here, and this user cannot install it: apt-get install "
                          "chromium")
    for command in ("update --quiet", "install --yes --quiet --no-install-recommends chromium"):
        done = subprocess.run(["apt-get", "-o", "DPkg::Lock::Timeout=120", *command.split()],
                              env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                              capture_output=True, text=True)
    if not os.path.exists(PROGRAM):
        raise Unavailable(f"Chromium could not be installed: {done.stderr[-500:]}")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright; its network is closed to all but 127.0.0.1."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=PROGRAM, args=["--no-sandbox", "--disable-dev-shm-usage", BLOCKED])
        yield browser
        browser.close()
