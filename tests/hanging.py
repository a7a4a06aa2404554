"""The job that hangs where a test tells it to (jobs/hangs.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster import TESTS

JOB = [sys.executable, str(TESTS / "jobs" / "hangs.py")]


def hang(folder: Path, word: str, host: str) -> None:
    """Let the worker of a host hang: loader, lock or gil."""
    (folder / "new").write_text(word)
    (folder / "new").rename(folder / f"do-{host}")


def weights_alone(command: list[str], folder: Path) -> str:
    """Return the weights' hash of the job done alone, undisturbed."""
    (folder / "twin").mkdir()
    (folder / "twin" / "hurry").touch()
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("HOROVOD_", "ELASTIC_"))}
    done = subprocess.run(command, env=env, cwd=folder / "twin", check=True, capture_output=True,
                          text=True)
    return done.stdout.split("weights ")[1].strip()
