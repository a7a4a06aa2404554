"""Real hosts, as far as one machine can have them: every worker is reached by ssh, and hosts end as clouds end them.

Each test is a real run that ends proved, with the undisturbed twin's bits and no victim but the planned ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import netlab
import pytest
from netlab import COORDINATOR, Fleet, Lab

Twin = Callable[..., str]
FOUR = ["h1", "h2", "h3", "h4"]
JOB = ("--steps", "120", "--step-s", "0.05")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab with a coordinator and nobody else."""
    try:
        netlab.prepare()
    except netlab.Unavailable as error:
        pytest.skip(str(error))
    folder = tmp_path / "lab"
    folder.mkdir()
    with Lab(folder) as lab:
        lab.boot(COORDINATOR)
        yield lab


def test_trains_over_ssh(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        assert fleet.wait() == 0
        fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
        print(fleet.story())
