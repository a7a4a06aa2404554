"""What all tests share: the undisturbed twin, computed once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def twin_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return the weights' hash of the job done alone, undisturbed: one process, no Horovod."""
    from cluster import JOB

    @cache
    def twin(*job: str) -> str:
        if "--step-s" in job:  # the pace is no part of the arithmetic
            at = job.index("--step-s")
            return twin(*job[:at], *job[at + 2 :])
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "ELASTIC_"))}
        done = subprocess.run([*JOB, *job], env=env, capture_output=True, text=True, timeout=300, check=True,
                              cwd=tmp_path_factory.mktemp("twin"))
        return done.stdout.split("weights ")[1].strip()

    return twin
