"""Is each hang named rightly, and soon? Is a run without hangs left in peace?

    .venv/bin/python tests/bench/hang.py [--quiet-min 3]        (as root: tests/netlab.py)

Six hangs, one after the other, in a run on 4 hosts (namespaces with an sshd and an agent each; the
first worker of h2 was a standby): SIGSTOP, a regular expression that holds the GIL, a loader that
sleeps, a lock that is never released, a slow line (1.5 Mbit/s), and a slow host (a CPU quota of 10
% of a core; it is named as a straggler). A verdict is right if it names the rank, the host and the
phase, and has the stack of a worker that hangs in its own code. verdict_s is the longest time from
a hang's begin to its verdict, beyond the limit in the event (a straggler's is straggler_s).

Then --quiet-min minutes without a hang: the first step of each worker takes 20 s, the code after
every 500th step takes 20 s on one host, and each checkpoint takes about 10 s to reach the store
over a slow line. `false` counts the verdicts in that time.

Last line: one JSON object with named, verdict_s, false.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import bench
import netlab
import s3_servers
from hanging import JOB, hang
from netlab import COORDINATOR, Fleet, Lab

FOUR = ["h1", "h2", "h3", "h4"]
STRAGGLER_S, BEYOND_S = 12.0, 5.0
CGROUPS = Path("/sys/fs/cgroup/cpu")
SLOW_KBIT, STORE_KBIT = 1500, 8000
QUOTA, PERIOD_US = 0.1, 100_000
STEPPING = ("load", "forward", "backward", "reduce", "vote", "apply", "after", "upload")
FUNCTIONS = {"load": "in __getitem__", "forward": "in loss"}
"""Where a worker hangs, by phase."""
VERDICTS = ("driver.step_stalled", "driver.straggler_found")


@contextmanager
def quota_group(lab: Lab, name: str) -> Iterator[Path]:
    """Put all processes of a host of the lab, and all that start later, into a control group."""
    group = CGROUPS / f"elastic-trainer-bench-{lab.hosts[name].pid}"
    group.mkdir()
    try:
        mine = Path(f"/proc/{lab.hosts[name].pid}/ns/net").readlink()
        for namespace in Path("/proc").glob("[0-9]*/ns/net"):
            with suppress(OSError):  # it has just ended
                if namespace.readlink() == mine:
                    (group / "cgroup.procs").write_text(namespace.parts[2])
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has just ended
                (CGROUPS / "cgroup.procs").write_text(pid)
        group.rmdir()


class Case:
    """One hang: what makes it, what ends it, and what its verdict must be."""

    def __init__(self, name: str, host: str, phases: tuple[str, ...], begin: Callable[[], Any],
                 end: Callable[[], Any], *, state: str = ""):
        self.name, self.host, self.phases, self.state = name, host, phases, state
        self.begin, self.end = begin, end

    def judge(self, fleet: Fleet, folder: Path) -> dict[str, Any]:
        """Let it happen; return what the driver made of it."""
        kind = VERDICTS[self.name == "slow host"]
        was, begun = len(fleet.events(kind)), time.time()
        self.begin()
        verdict = fleet.wait_for(f"verdict on {self.name}", lambda: fleet.events(kind)[was:])[0]
        for file in folder.glob("did-*"):  # since when the worker hangs
            begun = file.stat().st_ctime
            file.unlink()
        seat = fleet.events("driver.generation_formed")[-1]["hosts"].index(self.host)
        is_named = (verdict["host"], verdict["rank"]) == (self.host, seat) and (
            not self.phases or verdict["phase"] in self.phases) and (
            not self.state or verdict["state"] == self.state)
        if is_named and self.phases in (("load",), ("forward",)):
            is_named = FUNCTIONS[verdict["phase"]] in verdict["stacks"].get(verdict["worker"], "")
        limit_s = verdict.get("limit_s", STRAGGLER_S)
        self.end()
        found = {"hang": self.name, "named": bool(is_named),
                 "beyond_s": round(verdict["time"] - begun - limit_s, 2), "limit_s": limit_s}
        print(json.dumps(found | {name: verdict.get(name) for name in (
            "host", "rank", "phase", "what", "since_s", "state", "links")}), flush=True)
        return found


def hangs(folder: Path) -> list[dict[str, Any]]:
    """Return what the driver makes of each of the six."""
    command = [*JOB, "--steps", "100000", "--width", "20000", "--work", "20"]
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(folder / "lab"))
        lab.boot(COORDINATOR, *FOUR)
        group = stack.enter_context(quota_group(lab, "h4"))
        fleet = Fleet(lab, folder, FOUR, command=command, min_workers=1)
        fleet.prepare_standbys()
        fleet.env["ELASTIC_TRAINER_LIMITS"] = f"straggler_s={STRAGGLER_S:g}"
        service = fleet.stand_by("h2")
        netlab.wait_for("a standby", lambda: fleet.standbys("h2"), 60.0)
        stack.enter_context(fleet)
        settle(fleet)
        assert [e["worker"].split("/")[0] for e in fleet.events("worker.stood_by")] == ["h2"]
        os.killpg(service.pid, signal.SIGTERM)  # the next standby would boot

        def resumed() -> None:
            was = len(fleet.events("driver.step_resumed"))
            fleet.wait_for("a next step", lambda: fleet.events("driver.step_resumed")[was:])

        def release() -> None:
            (folder / "released").touch()
            resumed()
            (folder / "released").unlink()

        def healed() -> None:
            """Wait until the worker is replaced."""
            was = fleet.events("driver.generation_formed")[-1]["generation"]
            fleet.wait_for_world(4, after=was)

        def throttle(share: float) -> None:
            (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US) if share else -1))

        cases = [
            Case("loader", "h3", ("load",), lambda: hang(folder, "loader", "h3"), release),
            Case("lock", "h2", ("forward",), lambda: hang(folder, "lock", "h2"), release),
            Case("slow line", "h3", ("reduce",), lambda: lab.slow("h3", SLOW_KBIT),
                 lambda: (lab.slow("h3", 0), resumed())),
            Case("GIL", "h2", ("forward",), lambda: hang(folder, "gil", "h2"), healed,
                 state="silent"),
            Case("SIGSTOP", "h3", STEPPING, lambda: fleet.signal_worker("h3", signal.SIGSTOP),
                 healed, state="stopped"),
            Case("slow host", "h4", (), lambda: throttle(QUOTA), lambda: throttle(0)),
        ]
        found = []
        for case in cases:
            settle(fleet)
            found.append(case.judge(fleet, folder))
    return found


def settle(fleet: Fleet, steps: int = 20) -> None:
    """Wait until the newest world has done some steps."""
    newest = fleet.events("driver.generation_formed")[-1:] or fleet.wait_for(
        "a world", lambda: fleet.events("driver.generation_formed"))[-1:]
    generation = newest[0]["generation"]
    fleet.wait_for("steps", lambda: [e for e in fleet.events("worker.step_committed")
                                     if e["generation"] == generation][steps:])


def quiet(folder: Path, minutes: float) -> dict[str, Any]:
    """Train undisturbed; return the number of verdicts, and of steps."""
    command = [*JOB, "--steps", "10000000", "--width", "60000", "--microbatch-s", "0.05",
               "--first-s", "20", "--after-s", "20", "--checkpoint-every", "200"]
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(folder / "lab", has_agents=False))
        lab.boot(COORDINATOR, "h9", *FOUR)
        variables = stack.enter_context(netlab.store_on(lab, "h9", folder / "s3"))
        fleet = Fleet(lab, folder, FOUR, command=command, min_workers=1,
                      options=["--store", f"s3://{s3_servers.BUCKET}/hang"])
        fleet.env |= variables
        stack.enter_context(fleet)
        lab.slow("h9", STORE_KBIT)
        assert fleet.process
        with suppress(subprocess.TimeoutExpired):
            fleet.process.wait(60 * minutes)
            raise AssertionError(fleet.story())
        found = [event for kind in VERDICTS for event in fleet.events(kind)]
        for event in found:
            print("false verdict:", json.dumps(event)[:600], flush=True)
        saved = [e["duration_s"] for e in fleet.events("state.checkpoint_published")]
        return {"false": len(found), "lost": len(fleet.lost()), "steps": fleet.newest_step(),
                "generations": len(fleet.events("driver.generation_formed")),
                "checkpoints": len(saved), "longest_checkpoint_s": max(saved, default=None)}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run both parts."""
    netlab.prepare()
    found = hangs(folder / "hangs") if options.hangs == "yes" else []
    undisturbed: dict[str, Any] = {"false": None}
    if options.quiet_min:
        undisturbed = quiet(folder / "quiet", options.quiet_min)
    named = sum(one["named"] for one in found)
    verdict_s = max((one["beyond_s"] for one in found), default=None)
    return {"named": named, "of": len(found), "verdict_s": verdict_s, **undisturbed,
            "quiet_min": options.quiet_min, "met": named == len(found)
            and (verdict_s or 0.0) <= BEYOND_S and not undisturbed["false"]}


if __name__ == "__main__":
    bench.run(measure, quiet_min=3.0, hangs=("yes", "no"))
