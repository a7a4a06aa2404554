"""A run whose open ports are all attacked at once; tests/bench/strangers.py does the same for
longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from besieged import GROWTH_MIB, Siege, Tap
from netlab import COORDINATOR, Fleet, Lab

TWO = ["h1", "h2"]
STRANGER = "h9"
JOB = ("--steps", "150", "--step-s", "0.1")


def test_clients_at_every_port_disturb_no_worker(lab: Lab, tmp_path: Path,
                                                twin_of: Callable[..., str]) -> None:
    """Whatever they say or leave out: nobody grows, honest questions are answered, the world and
    its steps stay as they are, and each address has one event a minute at most.
    """
    fleet = Fleet(lab, tmp_path, TWO, job=JOB, own_disks=True,
                  options=["--store", str(tmp_path / "store")])
    lab.boot(COORDINATOR, STRANGER, *TWO)
    tap = Tap(lab, COORDINATOR)
    with fleet:
        fleet.wait_for_step(3)
        with Siege(lab, fleet, tmp_path / "siege", stranger=STRANGER, addresses=20, rate=100.0,
                   turn_s=0.5) as siege:
            siege.last_until("answers", lambda: all(asker.took_s for asker in siege.askers))
            siege.begin(tap.heard())
            siege.last_until("attacks", lambda: siege.attacks() and not siege.unattacked())
            fleet.wait_for_step(fleet.newest_step() + 2)
            assert siege.roles() == ["agent", "driver", "worker"]
            assert siege.unanswered() == []
            assert siege.disturbances() == []
            assert siege.events_too_many() == []
            assert max(map(siege.growth_mib, siege.roles())) < GROWTH_MIB, siege.memory
            assert siege.consents() == {}
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
        assert fleet.events("driver.stranger_refused")
    assert result["generations"] == 1
