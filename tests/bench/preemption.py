"""Announced losses, in the shape of Ray Train's benchmark: 8 workers, 4 of them are taken one after
the other.

    .venv/bin/python tests/bench/preemption.py [--events 4]

Each event is a notice at a metadata service of the host's own (rank 0's host first); a real agent
hears it, the poller takes the host off the list, its worker leaves at a step's end. Theirs: 91
steps wasted and about 184 s down per event.

steps_wasted are those that were done again, whether one by one or from a checkpoint.

Last line: one JSON object with steps_wasted, pause_max_s, events, bits_equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bench
from cluster import JOB, Cluster, weights_alone
from metadata_server import MetadataServer
from ports import free_port
from s3_servers import process

from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.place_protocol import Instance
from elastic_trainer.discovery.poll import Poller
from elastic_trainer.views.verify import verify

ROOT = bench.HERE.parent.parent
WORKERS = 8
STEPS = 900
BETWEEN = 40


class Machines:
    """A cloud of this machine's loopback addresses, each with an agent and a metadata service of
    its own."""

    def __init__(self, names: Sequence[str], folder: Path, stack: ExitStack):
        self.names, self.gone, self.port = names, set[str](), free_port()
        self.services = {name: stack.enter_context(MetadataServer()) for name in names}
        key = folder / "key"
        key.write_text("0123456789abcdef" * 4)
        key.chmod(0o600)
        self.key = key.read_bytes()
        for name in names:
            stack.enter_context(process(
                [sys.executable, "-m", "elastic_trainer.discovery", "agent", "--bind", name,
                 "--port", str(self.port), "--key-file", str(key), "--metadata",
                 self.services[name].endpoint, "--folder", str(folder)],
                folder / f"agent-{name}.log", PYTHONPATH=str(ROOT)))

    def supply(self) -> None:
        """Return that it is unknown."""

    def instances(self) -> list[Instance]:
        """Return what a cloud would."""
        return [Instance(id=f"{name}@0", name=name) for name in self.names if name not in self.gone]

    @contextmanager
    def polled(self, hosts_file: Path) -> Iterator[None]:
        """Write the list of the hosts that may work once a second, for as long as the block."""
        poller = Poller(self, hosts_file, Policy(agents=True, settle_s=0.0), interval_s=1.0,
                        agent_port=self.port, key=self.key)
        stopping = threading.Event()

        def poll() -> None:
            with ThreadPoolExecutor(8) as pool:
                while not stopping.wait(1.0):
                    poller.poll(pool)

        threading.Thread(target=poll, daemon=True).start()
        try:
            yield
        finally:
            stopping.set()


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the job and its twin."""
    job = ["--steps", str(STEPS), "--checkpoint-every", "500"]
    with ExitStack() as stack:
        cluster = Cluster(folder, hosts=WORKERS, min_workers=2, job=job)
        machines = Machines(cluster.all_hosts, folder, stack)
        stack.enter_context(machines.polled(cluster.hosts_file))
        with cluster:
            result = preempted(cluster, machines, options.events)
            assert cluster.wait(900) == 0, cluster.story()
            proved = verify(cluster.run_dir).is_proved
            redone = len(cluster.events("worker.step_redone"))
            finished = json.loads((cluster.run_dir / "result.json").read_text())
    twin = weights_alone([*JOB, *job], folder, None)
    return {"steps_wasted": max(redone, finished["steps_redone"]),
            "pause_max_s": round(max(result["pauses"]), 3), "events": len(result["pauses"]),
            "bits_equal": finished["weights_sha256"] == twin, "verified": proved,
            "pauses_s": bench.rounded(result["pauses"]),
            "notice_to_left_s": bench.rounded(result["left"]),
            "ray_train": {"steps_wasted": 91, "down_s": 184}}


def preempted(cluster: Cluster, machines: Machines, events: int) -> dict[str, list[float]]:
    """Announce and take one host after the other; returns the survivors' pauses, and the time from
    notice to gone."""
    pauses, left = [], []
    for number in range(events):
        cluster.wait_for_world(WORKERS - number)
        cluster.wait_for_step(0)
        first = cluster.events("worker.step_committed")[-1]["step"]
        cluster.wait_for_step(first + BETWEEN)
        victim = cluster.all_hosts[number * 2]  # rank 0's host is the first
        announced_at = time.time()
        machines.services[victim].announce()
        gone = cluster.wait_for("the worker's end", lambda v=victim, t=announced_at: [
            e for e in cluster.events("driver.worker_gone") if e["host"] == v and e["time"] > t])
        machines.gone.add(victim)
        left.append(gone[0]["time"] - announced_at)
        until = time.time()
        cluster.wait_for_step(cluster.events("worker.step_committed")[-1]["step"] + 5)
        pauses.append(bench.longest_pause([e["time"] for e in cluster.committed()], announced_at,
                                          until))
        print(f"event {number + 1}: {victim} left {left[-1]:.2f} s after its notice, a pause of "
              f"{pauses[-1]:.3f} s", flush=True)
    return {"pauses": pauses, "left": left}


if __name__ == "__main__":
    bench.run(measure, events=4)
