"""The job that hangs where a test tells it to (jobs/hangs.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster import TESTS

JOB = [sys.executable, str(TESTS / "jobs" / "hangs.py")]


def hang(folder: Path, word: str, host: str) -> None:
    """Let the worker of a host hang: loader, lock or gil."""
    (folder / "new").write_text(word)
    (folder / "new").rename(folder / f"do-{host}")
