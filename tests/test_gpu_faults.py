"""Faults of GPUs, in real processes without one: the errors are those that torch raises.

Each test asserts the laws of every fault (`Cluster.assert_nothing_lost`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster import Cluster
from faults import Plan
from test_faults import FEW, host

from elastic_trainer.wire.heartbeat import GPU_LOST

Twin = Callable[..., str]


def test_a_lost_gpu_costs_its_worker_alone(tmp_path: Path, twin_of: Twin) -> None:
    """The others do the step again, and the host gets a new worker."""
    plan = Plan().add("gpu_lost", host=host(2), at="data", reads=20)
    with Cluster(tmp_path, job=FEW, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=1)
        [logged] = cluster.events("worker.machine_failed")
        [gone] = cluster.lost()
    assert (logged["host"], logged["error"]) == (host(2), GPU_LOST)
    assert (gone["host"], gone["reason"]) == (host(2), "machine_failed")
    assert result["attempts"] == 1 and result["steps_redone"] <= 1


def test_the_run_waits_for_a_worker_when_the_others_have_no_memory_for_the_part_of_a_lost_one(
        tmp_path: Path, twin_of: Twin) -> None:
    """Each of them restarts with its state, which frees its memory, and tries once."""
    plan = Plan().kill(host=host(3), at="step.prepared", step=10)
    job = (*FEW, "--iterator", "--fits", "2")
    with Cluster(tmp_path, job=job, plan=plan) as cluster:
        cluster.wait_until_fired()
        cluster.set_hosts(cluster.all_hosts[:3])
        cluster.wait_for("a worker that needs a larger world", lambda: any(
            event["needs"] for event in cluster.events("worker.out_of_memory")))
        cluster.set_hosts(cluster.all_hosts)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=1, revived=True)
        lacks = cluster.events("worker.out_of_memory")
        formed = [len(event["hosts"]) for event in cluster.events("driver.generation_formed")]
    assert {(event["size"], event["microbatches"], event["fitted"]) for event in lacks} == {
        (3, 3, 2)}
    for worker in {event["worker"] for event in lacks}:
        needs = [event["needs"] for event in lacks if event["worker"] == worker]
        assert needs in ([0], [0, 4])
    waits = next(event for event in lacks if event["needs"])
    assert "waits for workers until it has 4" in waits["meaning"]
    assert "as planned" in waits["error"]
    assert formed[0] == formed[-1] == 4 and set(formed) == {3, 4}
    assert result["attempts"] == 1
