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
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bounded import bounded

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import netlab  # noqa: E402
from netlab import COORDINATOR, Fleet, Lab  # noqa: E402
from stock_job import StockJob  # noqa: E402

FOUR = ["h1", "h2", "h3", "h4"]
LIMIT_S = 10.0
INTERFACE = "lab0"


def ours(folder: Path, cuts: int, chance: random.Random) -> tuple[list[float], int]:
    """Return the seconds from each cut to the next finished step, and how many others were lost."""
    seconds: list[float] = []
    struck = set[str]()
    job = [sys.executable, str(HERE / "jobs" / "mlp.py"), "--steps", "1000000"]
    (folder / "lab").mkdir()
    with Lab(folder / "lab", has_agents=False) as lab:
        lab.boot(COORDINATOR, *FOUR)
        with Fleet(lab, folder, FOUR, command=job, min_workers=1) as fleet:
            generation = 0
            for _ in range(cuts):
                generation = fleet.wait_for_world(4, after=generation)
                first = fleet.events("worker.step_committed")[-1:]
                fleet.wait_for_step((first[0]["step"] if first else 0) + 3)
                cut_at, victim = time.time(), chance.choice(FOUR)
                struck |= {name for name in fleet.events("driver.generation_formed")[-1]["workers"]
                           if name.startswith(f"{victim}/")}
                lab.unplug(victim)

                def after_the_cut(old: int = generation) -> list[dict[str, float]]:
                    return [e for e in fleet.events("worker.step_committed")
                            if e["generation"] > old and not e.get("repeated")]

                fleet.wait_for("a step after the cut", after_the_cut)
                seconds.append(after_the_cut()[0]["time"] - cut_at)
                print(f"ours: {victim} cut off, next step after {seconds[-1]:.3f} s", flush=True)
                generation += 1
                lab.plug_in(victim)
            lost = len([e for e in fleet.lost() if e["worker"] not in struck]) + len(
                fleet.events("worker.revives"))
    return seconds, lost


def peer(folder: Path, chance: random.Random, wait_s: float) -> float:
    """Run one stock job, cut one host off; return the seconds to the next finished step."""
    (folder / "lab").mkdir()
    with Lab(folder / "lab", interface=INTERFACE, has_agents=False) as lab:
        lab.boot(COORDINATOR, *FOUR)
        with StockJob(
                folder,
                FOUR,
                interface=INTERFACE,
                start=lambda *command, **popen: lab.start(COORDINATOR, *command, **popen)) as job:
            assert job.wait(lambda: any(line.step >= 5 for line in job.lines()), 120), job.output()
            cut_at = time.time()
            lab.unplug(chance.choice(FOUR))
            return job.next_step_after(cut_at, 4, wait_s)


def main() -> None:
    """Run both arms and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuts", type=int, default=5)
    parser.add_argument("--peer-cuts", type=int, default=1)
    parser.add_argument("--peer-wait", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    netlab.prepare()
    with tempfile.TemporaryDirectory() as folder:
        seconds, lost = ours(Path(folder), options.cuts, chance)
    theirs = []
    for number in range(options.peer_cuts):
        with tempfile.TemporaryDirectory() as folder:
            theirs.append(peer(Path(folder), chance, options.peer_wait))
            print(f"peer: cut {number + 1}, next step after {theirs[-1]:.3f} s", flush=True)
    at_least = [min(s, options.peer_wait) for s in theirs]
    print(
        json.dumps({
            "median_s": round(statistics.median(seconds), 3),
            "peer_median_s": round(statistics.median(at_least), 3) if theirs else None,
            "peer_is_at_least": any(s > options.peer_wait for s in theirs), "second_victims": lost,
            "seconds": [round(s, 3)
                        for s in seconds], "met": statistics.median(seconds) < LIMIT_S and not lost
        }))


if __name__ == "__main__":
    sys.exit(bounded(main))
