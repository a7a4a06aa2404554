"""The versions that a run is started with: run.started has them, and a report shows them."""

from __future__ import annotations

import importlib.metadata
import platform
from contextlib import suppress

PACKAGES = ("elastic-trainer", "torch", "horovod", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed. Nothing is imported."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
