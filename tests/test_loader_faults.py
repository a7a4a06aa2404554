"""Loader processes that read tar archives, in a real cluster: workers and loader processes die, a
worker joins, all die."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from cluster import DEADLINE_S, Cluster
from faults import Plan
from test_faults import host
from test_streams import npy, write_tar
from waiting import wait_for

from elastic_trainer.host.processes import environment_of

JOB = ("--steps", "60", "--iterator", "--evaluate", "--checkpoint-every", "5")


def processes_of(cluster: Cluster) -> list[int]:
    """Return the processes that have the run's folder in their environment."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and environment_of(int(name)).get(
                    "ELASTIC_TRAINER_RUN_DIR") == str(cluster.run_dir):
                found.append(int(name))
        except OSError:
            continue
    return found


def write_archives(folder: Path) -> Path:
    """Write the samples of the job as five tar archives."""
    points = torch.randn(1003, 20, generator=torch.Generator().manual_seed(0))
    folder.mkdir()
    for number, part in enumerate(numpy.array_split(numpy.arange(len(points)), 5)):
        write_tar(folder / f"{number}.tar", [
            (f"{sample:04d}.{field}", data) for sample in part for field, data in (
                ("npy", npy(points[sample])),
                ("cls", str(int(points[sample, :4].argmax())).encode()))])
    return folder


def test_no_bit_is_another_when_workers_and_loader_processes_die_and_a_worker_joins(
        tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """The twin has its samples in memory, and reads each by itself.

    A loader process dies on one host and hangs on another one, which costs no worker. Then all die,
    and no loader process outlives them.
    """
    plan = Plan().kill(host=host(2), at="step.prepared", step=12).kill(
        host=host(3), at="data", reads=60).freeze(host=host(1), at="data", reads=80)
    # Until the newcomer stands ready; and until all are killed.
    plan.add("hold", host=host(0), at="step.prepared", step=5)
    plan.add("hang", host=host(0), at="step.prepared", step=30)
    archives = write_archives(tmp_path / "archives")
    job = (*JOB, "--loader", "2", "--step-s", "0.005", "--archives", f"{archives}/*.tar")
    with Cluster(tmp_path, hosts=5, start_with=4, job=job, plan=plan) as cluster:
        cluster.wait_for_step(3)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_ready(host(4))
        cluster.release()
        cluster.wait_for_world(5)
        cluster.wait_until_fired()
        cluster.wait_for("replaced loader processes",
                         lambda: len(cluster.events("worker.loader_restarted")) >= 2)
        cluster.kill_everyone()
        wait_for("end of all", lambda: not processes_of(cluster), DEADLINE_S)
        cluster.start()
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*JOB, "--loader", "0"), victims=1)
        reasons = sorted(e["reason"] for e in cluster.events("worker.loader_restarted"))
        assert reasons == ["read one sample for longer than 5 s (timeout_s)",
                           "was killed by SIGKILL"], cluster.story()
        wait_for("end of all", lambda: not processes_of(cluster), DEADLINE_S)
    assert result["attempts"] == 2
