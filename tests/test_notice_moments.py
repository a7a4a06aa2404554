"""A notice at the worst moments: while a worker compiles, evaluates, saves, or boots.

Each notice comes in both forms. A host leaves the list, as by its poller. A worker gets SIGTERM, as
Slurm, a kubelet or an agent in a hurry send it, and so do the processes that it has started.
No step is lost or done again, and the bits are the twin's. The boot of a newcomer whose host leaves
the list is in tests/test_faults.py (hosts_join_flap_and_leave_the_list).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import s3_servers
from cluster import Cluster
from faults import RELEASED, Plan
from faulty_proxy import FaultyProxy, proxied

Twin = Callable[..., str]
JOB = ("--steps", "40", "--step-s", "0.02", "--checkpoint-every", "1000")
NO_STANDBY = ("--standby", "0")
"""A standby has compiled before it has a place."""


def host(rank: int) -> str:
    """The host that has this rank while all workers are present."""
    return f"127.0.0.{rank + 1}"


def terminate(cluster: Cluster, on: str) -> None:
    """Send SIGTERM to the worker on a host, and to all that it has started."""
    [pid] = [pid for name, pid in cluster.live_pids().items() if name.split("/")[0] == on]
    family = [pid]
    for one in family:
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                family += map(int, (task / "children").read_text().split())
    for one in family:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGTERM)


def gone(cluster: Cluster, on: str) -> list[str]:
    """Return how the workers on a host have ended."""
    return [e["reason"] for e in cluster.events("driver.worker_gone") if e["host"] == on]


def removed(cluster: Cluster, on: str) -> bool:
    """Return whether the driver has read that a host has left the list."""
    return any(e["host"] == on for e in cluster.events("driver.host_removed"))


def test_a_notice_in_an_evaluation_costs_no_step(tmp_path: Path, twin_of: Twin) -> None:
    """The weights depend on what the evaluation finds. Two loader processes of each worker get the
    signal, too, and do nothing with it."""
    job = (*JOB, "--iterator", "--evaluate", "--loader", "2")
    plan = Plan().add("hold", host=host(1), at="evaluate", step=9)
    with Cluster(tmp_path, hosts=4, job=job, plan=plan) as cluster:
        cluster.wait_until_fired()
        terminate(cluster, host(2))
        cluster.set_hosts([host(0), host(1)])
        cluster.wait_for("the notice", lambda: removed(cluster, host(3)))
        (tmp_path / RELEASED).touch()
        cluster.wait_for_world(2)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        assert [e["step"] for e in cluster.events("worker.evaluated")] == [9, 19, 29, 39]
        assert gone(cluster, host(2)) == gone(cluster, host(3)) == ["left"], cluster.story()
    assert (result["attempts"], result["steps_redone"]) == (1, 0)


def test_a_notice_while_workers_compile_costs_no_step(tmp_path: Path, twin_of: Twin) -> None:
    """The members compile in an evaluation when both notices come: they leave after the step. A
    newcomer compiles in its warm-up when its host leaves the list: the world does not notice."""
    job = (*JOB, "--iterator", "--evaluate", "--compile")
    plan = Plan().add("hold", host=host(1), at="compile", during="evaluation")
    plan.add("hold", host=host(4), at="compile", during="training")
    with Cluster(tmp_path, hosts=5, start_with=4, job=job, plan=plan,
                 options=NO_STANDBY) as cluster:
        cluster.wait_until_fired(1)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_fired(2)
        cluster.set_hosts(cluster.all_hosts[:4])
        cluster.wait_for("its end", lambda: gone(cluster, host(4)))
        terminate(cluster, host(2))
        cluster.set_hosts([host(0), host(1)])
        cluster.wait_for("the notice", lambda: removed(cluster, host(3)))
        assert len(cluster.events("driver.generation_formed")) == 1, cluster.story()
        assert not cluster.events("worker.evaluated"), cluster.story()
        (tmp_path / RELEASED).touch()
        cluster.wait_for_world(2)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        assert gone(cluster, host(2)) == gone(cluster, host(3)) == ["left"], cluster.story()
    assert (result["attempts"], result["steps_redone"]) == (1, 0)


def test_sigterm_in_a_boot_a_warm_up_or_on_the_way_in_costs_no_step(tmp_path: Path,
                                                                     twin_of: Twin) -> None:
    """At the start the others begin without that worker. Later the world goes on without a change.
    The host, which stays on the list, gets another worker, which joins."""
    job = ("--steps", "120", "--step-s", "0.1", *JOB[4:])
    plan = Plan().add("terminate", host=host(3), at="boot")
    plan.add("terminate", host=host(4), at="boot", after=1)
    plan.add("terminate", host=host(4), at="data", reads=2, after=2)
    plan.add("terminate", host=host(4), at="world.init_entered", after=3)
    with Cluster(tmp_path, hosts=5, start_with=4, job=job, plan=plan,
                 options=NO_STANDBY) as cluster:
        cluster.wait_for_world(4)
        first = len(cluster.events("driver.generation_formed"))
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_fired(3)
        cluster.wait_for("their ends", lambda: len(gone(cluster, host(4))) == 2)
        assert len(cluster.events("driver.generation_formed")) == first, cluster.story()
        cluster.wait_for("a third end", lambda: len(gone(cluster, host(4))) == 3)
        cluster.wait_for_world(5, cluster.events("driver.generation_formed")[-1]["generation"] - 1)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        assert gone(cluster, host(3))[0] == "left" and gone(cluster, host(4))[:3] == ["left"] * 3
    assert (result["attempts"], result["steps_redone"]) == (1, 0)


@pytest.fixture
def proxy(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
          ) -> Iterator[FaultyProxy]:
    """A proxy of a server, to which AWS's variables point."""
    with s3_servers.or_skip(), \
            s3_servers.ministack(tmp_path_factory.mktemp("s3")) as endpoint, \
            proxied(endpoint, monkeypatch) as proxy:
        yield proxy


def test_a_notice_in_the_middle_of_a_save_costs_no_step(proxy: FaultyProxy, tmp_path: Path,
                                                        twin_of: Twin) -> None:
    """The parts of a checkpoint wait at the store when both notices come. The leavers wait for it:
    the step at which they leave is in a checkpoint."""
    job = (*JOB[:-2], "--checkpoint-every", "5", "--part-bytes", "65536")
    is_saving, may_go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> str | None:
        if method == "PUT" and "/parts/" in path and not may_go_on.is_set():
            is_saving.set()
            may_go_on.wait(150)
        return None

    proxy.on_request = hold
    store = f"s3://{s3_servers.BUCKET}/{tmp_path.name}-{os.getpid()}"
    with Cluster(tmp_path, hosts=4, job=job, options=["--store", store]) as cluster:
        cluster.wait_for("a save", is_saving.is_set)
        terminate(cluster, host(2))
        cluster.set_hosts([host(0), host(1)])
        cluster.wait_for("the notice", lambda: removed(cluster, host(3)))
        assert not cluster.events("state.checkpoint_published"), cluster.story()
        may_go_on.set()
        cluster.wait_for_world(2)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        assert gone(cluster, host(2)) == gone(cluster, host(3)) == ["left"], cluster.story()
    assert (result["attempts"], result["steps_redone"]) == (1, 0)
