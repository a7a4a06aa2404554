"""The cost of a silent loss: a random host out of 4 is cut off without a notice, until the next
finished step.

    .venv/bin/python tests/bench/partition.py [--cuts 5] [--peer-cuts 1] [--peer-wait 120]
    (as root: tests/netlab.py)

Hosts are namespaces with an sshd each. Ours: one run; a host is unplugged (no RST, no FIN), the
world goes on with 3, it is plugged in again, and when 4 train the next one goes. The peer: stock
horovodrun over the same ssh, a fresh job for each cut; its driver waits for the dead host's ssh, so
it is given up after --peer-wait seconds ("at least").

Last line: one JSON object with median_s, peer_median_s, second_victims.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import bench
import netlab
from netlab import COORDINATOR, Fleet, Lab
from recovery import Losses, after_losses
from stock_job import StockJob

FOUR = ["h1", "h2", "h3", "h4"]
LIMIT_S = 10.0


def ours(folder: Path, cuts: int, chance: random.Random) -> Losses:
    """Return what the loss of a random host costs, without a RST or a FIN."""
    with Lab(folder / "lab", has_agents=False) as lab:
        lab.boot(COORDINATOR, *FOUR)

        def strike() -> str:
            lab.unplug(victim := chance.choice(FOUR))
            return victim

        with Fleet(lab, folder, FOUR, command=bench.ENDLESS, min_workers=1) as fleet:
            return after_losses(fleet, cuts, strike, lab.plug_in)


def peer(folder: Path, chance: random.Random, wait_s: float) -> float:
    """Run one stock job, cut one host off; return the seconds to the next finished step."""
    with StockJob.in_lab(folder, FOUR) as (lab, job):
        job.wait_for_step(5, 120)
        cut_at = time.time()
        lab.unplug(chance.choice(FOUR))
        return job.next_step_after(cut_at, 4, wait_s)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run both arms."""
    chance = random.Random(options.seed)
    netlab.prepare()
    mine = ours(folder / "ours", options.cuts, chance)
    theirs = []
    for number in range(options.peer_cuts):
        theirs.append(peer(folder / f"peer-{number}", chance, options.peer_wait))
        print(f"peer: cut {number + 1}, next step after {theirs[-1]:.3f} s", flush=True)
    at_least = [min(s, options.peer_wait) for s in theirs]
    median_s = statistics.median(mine.seconds)
    return {"median_s": round(median_s, 3),
            "peer_median_s": round(statistics.median(at_least), 3) if theirs else None,
            "peer_is_at_least": any(s > options.peer_wait for s in theirs),
            "second_victims": mine.second_victims, "seconds": bench.rounded(mine.seconds),
            "met": median_s < LIMIT_S and not mine.second_victims}


if __name__ == "__main__":
    bench.run(measure, cuts=5, peer_cuts=1, peer_wait=120.0, seed=0)
