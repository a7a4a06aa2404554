"""The job with all that users write into their loops (jobs/features.py), for real: worlds of
processes, deaths, a join.

What each of its features must do is in test_gradients.py, test_supported.py, test_rates.py,
test_extra_state.py, test_losses.py and test_batches.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cluster import TESTS, Cluster, run_alone
from faults import Plan

JOB = [sys.executable, str(TESTS / "jobs" / "features.py"), "--steps", "60"]
SLOW = [*JOB, "--step-s", "0.1"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Return the last output of the job done alone, by name."""
    @cache
    def run(*arguments: str) -> dict[str, str]:
        printed = run_alone([*JOB, *arguments], tmp_path_factory.mktemp("alone"))
        return {
            name: value
            for name, _, value in (line.partition(" ") for line in printed.splitlines())
        }

    return run


def test_the_bits_are_plain_pytorchs_when_one_worker_does_each_batch_as_one_microbatch(
        alone: Callable[..., dict[str, str]]) -> None:
    """No engine of ours is in the plain loop."""
    assert alone("--microbatches", "1")["parameters"] == alone("--microbatches", "1",
                                                               "--plain")["parameters"]


def test_no_bit_is_another_in_a_world_of_another_size(tmp_path: Path,
                                                      alone: Callable[..., dict[str, str]]) -> None:
    """Nothing happens but the job's own oddities: a loss that is no number, and a listener that
    raises. Worlds of 3 to 5 are in the test after this one."""
    with Cluster(tmp_path, hosts=2, command=JOB) as cluster:
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(alone()["weights"], victims=0)
        # Once an epoch.
        assert {e["step"] // 16 for e in cluster.events("worker.loss_not_finite")} == {0, 1, 2, 3}
        assert cluster.events("worker.listener_failed")


def test_no_bit_is_another_when_workers_die_as_layers_thaw_and_another_joins(
        tmp_path: Path, alone: Callable[..., dict[str, str]]) -> None:
    """One dies before the vote on the first step of a thawed layer, one after that of a frozen one;
    then the run goes on in a world of another size.
    """
    plan = Plan().kill(host="127.0.0.2", at="step.prepared", step=20).kill(host="127.0.0.3",
                                                                           at="step.voted",
                                                                           step=40)
    with Cluster(tmp_path, hosts=5, start_with=4, command=SLOW, plan=plan) as cluster:
        cluster.wait_for_step(5)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_for_world(5)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(alone()["weights"], victims=2)
    assert result["steps_redone"] <= 2
    assert result["attempts"] == 1


def test_no_bit_is_another_when_everyone_dies_between_two_thaws(
        tmp_path: Path, alone: Callable[..., dict[str, str]]) -> None:
    """The next attempt goes on from the checkpoint of step 20 or a later one, with the layers that
    are trained there."""
    with Cluster(tmp_path, command=SLOW) as cluster:
        cluster.wait_for("checkpoint", lambda: cluster.events("state.checkpoint_published"))
        cluster.kill_everyone()
        cluster.start()
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(alone()["weights"], victims=0)
        assert cluster.events("state.checkpoint_restored"), cluster.story()
    assert result["attempts"] == 2
