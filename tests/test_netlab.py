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
JOB = ("--steps", "300", "--step-s", "0.1")
"""A minute and more, if nobody says that the story is over (`Fleet.finish`)."""


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


def test_goes_on_when_a_host_is_cut_off_without_a_word(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """No RST, no FIN: the beats' silence ends it, be it a worker's host or rank 0's; when it is back it joins again."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(3)
        lab.unplug("h3")
        generation = fleet.wait_for_world(3)
        lab.plug_in("h3")
        generation = fleet.wait_for_world(4, after=generation)
        lab.unplug("h1")
        fleet.wait_for_world(3, after=generation)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=2)
        evicted = [(e["worker"].split("/")[0], e["reason"]) for e in fleet.events("driver.worker_evicted")]
        assert evicted == [("h3", "frozen"), ("h1", "frozen")]
        print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 2


def test_goes_on_when_two_hosts_are_taken_without_notice(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """Half of the fleet is gone between two instructions, rank 0's host with it; three new hosts join the other two."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(3)
        lab.power_cut("h1", "h3")
        generation = fleet.wait_for_world(2)
        lab.boot("h5", "h6", "h7")
        fleet.set_hosts(["h2", "h4", "h5", "h6", "h7"])
        fleet.wait_for_world(5, after=generation)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=2)
        print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 1


def test_resumes_without_a_human_when_all_hosts_are_gone(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """Capacity goes to zero at once, and comes back under other names: the next attempt goes on from the checkpoint."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(25)
        lab.power_cut(*FOUR)
        fleet.set_hosts([])
        fleet.wait_for("end", lambda: fleet.events("attempt.ended"))
        lab.boot("h5", "h6", "h7", "h8")
        fleet.set_hosts(["h5", "h6", "h7", "h8"])
        fleet.wait_for("restart", lambda: fleet.events("state.checkpoint_restored"))
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=4)
        print(fleet.story())
    assert result["attempts"] == 2


def test_resumes_when_the_coordinator_is_taken(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """Workers notice, leave with a checkpoint, and none of them is left when the next coordinator calls the same run."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(25)
        lab.power_cut(COORDINATOR)
        lab.boot(COORDINATOR)
        fleet.start()
        fleet.wait_for("restart", lambda: fleet.events("state.checkpoint_restored"))
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
        print(fleet.story())
    assert result["attempts"] == 2


def test_one_of_two_goes_when_they_do_not_hear_each_other(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """Both still reach the driver; the younger one goes, and comes back when the line is mended."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(3)
        lab.cut("h2", "h4")
        generation = fleet.wait_for_world(3)
        fleet.wait_for("new worker", lambda: [e for e in fleet.events("driver.worker_ready")
                                              if e["worker"].startswith("h4")][1:])
        lab.mend("h2", "h4")
        fleet.wait_for_world(4, after=generation)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=1)
        evicted = [(e["worker"].split("/")[0], e["reason"]) for e in fleet.events("driver.worker_evicted")]
        assert evicted == [("h4", "cut_off")]
        print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 1
