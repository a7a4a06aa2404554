"""What a hostile client costs a running fleet: every open port, attacked from many addresses.

    .venv/bin/python tests/bench/strangers.py [--seconds 240] [--hosts 4]      (as root: netlab.py)

Hosts are namespaces with an sshd and an agent each. The coordinator runs the driver with its
rendezvous; a job trains on all hosts. One more host attacks (tests/hostile.py) with clients that
are idle, trickle, send too much, replay, mirror, forge, pickle, send random bytes, read nothing,
reset or shut half of the connection: each way in a turn of its own, then all together. Open ports
are found in /proc/net of every host; sshd's is left out. Honest questions are asked every 0.2 s.
With --joins 1 the attack goes on and one more host joins, while a client that knows each port as
soon as it is open connects to it first. --rate is in connections a second, --turn are the seconds
of each way, and --folder keeps the run.

- Growth is that of private memory, from before the attack to its peak. The rendezvous lives in the
  driver's process, so mb_rendezvous is the same figure as mb_driver.
- A step is disturbed when it is redone, when the world changes, or when it takes 1 s longer than
  the median step before the attack.
- Events are counted while the attack lasts. When a run ends, it logs once more what each address
  was refused since its last event.

Last line: one JSON object with mb_driver, mb_agent, mb_rendezvous, healthy_answers_p99_s,
steps_disturbed, met.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import bench
import netlab
from besieged import GROWTH_MIB, LATE_S, FirstComer, Siege, Tap
from cluster import JOB, weights_alone
from netlab import COORDINATOR, Fleet, Lab

STEP_S = 0.25
MICROBATCHES = 8
QUIET_S = 30.0
JOIN_S = 120.0
STRANGER = "h99"


def percentile(values: list[float], share: float) -> float:
    """Return the value below which that share of sorted values lies."""
    return values[min(len(values) - 1, int(len(values) * share))]


def join(lab: Lab, fleet: Fleet, names: list[str], newcomer: str) -> float:
    """Let one more host join; returns the seconds from its listing to its first generation."""
    before = fleet.events("driver.generation_formed")[-1]["generation"]
    lab.boot(newcomer)
    listed_at = time.time()
    fleet.set_hosts([*names, newcomer])
    generation = fleet.wait_for_world(len(names) + 1, after=before)
    return next(float(e["time"]) for e in fleet.events("worker.generation_started")
                if e["generation"] == generation) - listed_at


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Attack one run; return what was found."""
    netlab.prepare()
    folder = options.folder or folder
    names = [f"h{number + 1}" for number in range(options.hosts)]
    per_step_s = STEP_S * MICROBATCHES / options.hosts
    steps = int((options.seconds + QUIET_S + JOIN_S * options.joins) / per_step_s) + 60
    job = ["--steps", str(steps)]
    with Lab(folder / "lab") as lab:
        fleet = Fleet(lab, folder, names, job=[*job, "--step-s", str(STEP_S)], own_disks=True,
                      options=["--store", str(folder / "store")])
        lab.boot(COORDINATOR, STRANGER, *names)
        tap = Tap(lab, COORDINATOR)
        with fleet:
            fleet.wait_for_step(5)
            with Siege(lab, fleet, folder / "siege", stranger=STRANGER, addresses=options.addresses,
                       rate=options.rate, turn_s=options.turn) as siege:
                siege.last(QUIET_S)
                siege.begin(tap.heard())
                siege.last(options.seconds)
                found = findings(siege)
                print(json.dumps(found), flush=True)
                if options.joins:
                    newcomer = f"h{options.hosts + 1}"
                    with FirstComer(lab, STRANGER, [*names, newcomer]) as first:
                        found["join_s"] = round(join(lab, fleet, names, newcomer), 3)
                        found["ports_met_first"] = first.accepted()
                    found["worlds_broken"] = len(fleet.events("worker.generation_broken"))
                    found["met"] &= not found["worlds_broken"]
            found["workers_lost"] = len(fleet.lost())
            assert fleet.finish() == 0, fleet.story()
            fleet.assert_nothing_lost(weights_alone([*JOB, *job], folder, None),
                                      victims=found["workers_lost"])
            print(fleet.story())
    return found


def findings(siege: Siege) -> dict[str, Any]:
    """Return what the attack has cost."""
    print_found(siege)
    answers_s, steps_s, quiet_s = siege.answers_s(), siege.steps_s(), siege.steps_s(attacked=False)
    growth = {role: round(siege.growth_mib(role), 1) for role in siege.roles()}
    disturbed = siege.disturbances() + siege.slow_steps()
    too_many = siege.events_too_many()
    is_met = (max(growth.values()) < GROWTH_MIB and answers_s[-1] < LATE_S and not disturbed
              and not siege.unanswered() and not too_many and not siege.unattacked())
    return {
        "mb_driver": growth["driver"], "mb_agent": growth["agent"],
        "mb_rendezvous": growth["driver"], "mb_worker": growth["worker"],
        "healthy_answers_p99_s": round(percentile(answers_s, 0.99), 3),
        "healthy_answers_worst_s": round(answers_s[-1], 3), "healthy_answers": len(answers_s),
        "unanswered": len(siege.unanswered()),
        "steps": len(steps_s), "steps_disturbed": len(disturbed),
        "step_median_s": round(percentile(steps_s, 0.5), 3), "step_worst_s": round(steps_s[-1], 3),
        "step_median_before_s": round(percentile(quiet_s, 0.5), 3),
        "step_worst_before_s": round(quiet_s[-1], 3),
        "addresses_told_too_often": len(too_many), "not_attacked": siege.unattacked(),
        "consents": siege.consents(), "ports": len(siege.ports),
        "connections": sum(facts["connected"] for facts in siege.attacks().values()), "met": is_met}


def print_found(siege: Siege) -> None:
    """Print the facts of the figures."""
    for title, found in (("disturbed", siege.disturbances() + siege.slow_steps()),
                        ("unanswered", siege.unanswered()),
                        ("two events in a minute", siege.events_too_many())):
        for line in found[:20]:
            print(f"{title}: {line}")
    for name in ("agent", "driver", "rendezvous", "worker"):
        quiet, took_s = siege.answers_s(name, attacked=False), siege.answers_s(name)
        print(f"{name}: {len(took_s)} answers, p99 {percentile(took_s, 0.99):.3f} s, the slowest "
              f"{took_s[-1]:.3f} s; before the attack p99 {percentile(quiet, 0.99):.3f} s")
    for pid, memory in sorted(siege.memory.items()):
        kinds = [f"{kind} {before:.1f} → {memory.peak[kind]:.1f}"
                 for kind, before in memory.before.items()]
        print(f"{memory.role} {pid}: {', '.join(kinds)}")
    for name, facts in siege.attacks().items():
        print(f"{name}: {facts}")


if __name__ == "__main__":
    bench.run(measure, seconds=240.0, hosts=4, addresses=200, rate=300.0, turn=10.0, joins=0,
              folder=Path)
