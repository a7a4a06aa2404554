"""A real headless Chromium, of Debian's package, which is installed where apt-get can."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packages import install
from s3_servers import Unavailable

PROGRAM = "/usr/bin/chromium"
BLOCKED = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
"""Every name and address but this one cannot be reached, for the pages and for Chromium itself."""


def prepare() -> None:
    """Install Chromium if it is missing. Raises Unavailable."""
    why = "" if os.path.exists(PROGRAM) else install("chromium")
    if not os.path.exists(PROGRAM):
        raise Unavailable(f"Chromium could not be installed: apt-get install chromium ({why})")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright; its network is closed to all but 127.0.0.1."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=PROGRAM, args=["--no-sandbox", "--disable-dev-shm-usage", BLOCKED])
        yield browser
        browser.close()
