"""A flipped bit in one worker's memory, for real: found, named, and gone before it is in a step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from faults import Plan

from elastic_trainer.views.verify import verify

Twin = Callable[..., str]
SLOW = ("--steps", "80", "--step-s", "0.2", "--checkpoint-every", "10")


def host(rank: int) -> str:
    """The host that has this rank while all workers are present."""
    return f"127.0.0.{rank + 1}"


@pytest.mark.parametrize(
    ("do", "rank", "tensor", "point", "found", "style"),
    [
        # Nobody waits for the end of its interpreter.
        ("flip_weight", 2, "0.weight", "step.computed", 12, ("--ends-slowly",)),
        ("flip_moment", 0, "0.weight/exp_avg", "step.prepared",
         13, ("--iterator",)),  # the checksums of step 12 are taken already
    ])
def test_the_worker_that_differs_leaves_and_comes_back_when_one_bit_is_flipped(
        tmp_path: Path, twin_of: Twin, do: str, rank: int, tensor: str, point: str, found: int,
        style: tuple[str, ...]) -> None:
    """Of a weight, or of the optimizer's state: it is in no other worker's step, the host is named,
    nothing is lost."""
    plan = Plan().add(do, host=host(rank), at=point, step=12)
    with Cluster(tmp_path, job=(*SLOW, *style), plan=plan) as cluster:
        cluster.wait_for_world(3)
        cluster.wait_for_world(4, after=2)
        assert cluster.finish() == 0
        style = () if style == ("--ends-slowly",) else style  # no part of the arithmetic
        cluster.assert_nothing_lost(twin_of(*SLOW, *style), victims=1)
        [differs] = cluster.events("worker.replica_differs")
        [out] = cluster.events("driver.host_kept_out")
        [gone] = cluster.lost()
        [evicted] = cluster.events("driver.worker_evicted")
    assert (differs["host"], differs["outlier_rank"], differs["step"]) == (host(rank), rank, found)
    assert differs["tensors"] == [
        tensor
    ] and differs["since_step"] == found - 1 and differs["majority"] == 3
    assert (evicted["worker"], evicted["reason"]) == (differs["outlier"], "differed")
    assert gone["reason"] == "differed" and gone["worker"] == differs["outlier"]
    assert (out["host"], out["differences"]) == (host(rank), 1)


def test_the_run_goes_back_to_a_checkpoint_when_no_majority_holds_the_same(
        tmp_path: Path, twin_of: Twin) -> None:
    """Two workers have no majority: both drop the state, and no checkpoint since the flip
    is restored. Here the loop is the user's own."""
    job = (*SLOW, "--iterator")
    plan = Plan().add("flip_weight", host=host(1), at="step.prepared", step=25)
    with Cluster(tmp_path, hosts=2, job=job, plan=plan) as cluster:
        cluster.wait_until_fired()
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        assert {e["host"] for e in cluster.events("worker.replica_differs")} == {host(0), host(1)}
        [restored] = cluster.events("state.checkpoint_restored")
    assert result["attempts"] == 2
    assert restored["step"] == 20


def test_the_result_is_the_majoritys_when_a_bit_is_flipped_after_the_last_vote(
        tmp_path: Path, twin_of: Twin) -> None:
    """The whole state is compared once more before the run finishes."""
    plan = Plan().add("flip_weight", host=host(0), at="step.applied", step=39)
    with Cluster(tmp_path, job=("--steps", "40"), plan=plan) as cluster:
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of("--steps", "40"), victims=1)
        [differs] = cluster.events("worker.replica_differs")
    assert (differs["host"], differs["step"]) == (host(0), 40)


def test_a_newcomer_receives_nothing_that_the_givers_do_not_agree_on(tmp_path: Path,
                                                                     twin_of: Twin) -> None:
    """Each gives a share of the bytes, so a wrong one would be two workers' at once, and soon the
    majority's."""
    plan = Plan().add("flip_weight", host=host(1), at="world.init_left", generation=2)
    with Cluster(tmp_path, start_with=3, job=SLOW, plan=plan) as cluster:
        cluster.wait_for_step(3)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_fired()
        cluster.wait_for_world(4, after=2)
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*SLOW), victims=1)
        [differs] = cluster.events("worker.replica_differs")
    assert (differs["host"], differs["majority"]) == (host(1), 2)


@pytest.mark.parametrize("optimizer", ["LookaheadOfLists"])
def test_the_only_worker_with_the_right_state_is_believed_when_all_others_are_killed(
        tmp_path: Path, twin_of: Twin, optimizer: str) -> None:
    """The newcomers receive all that the optimizer keeps, so no bit is another."""
    job = (*SLOW, "--optimizer", optimizer)
    with Cluster(tmp_path, job=job, min_workers=1) as cluster:
        cluster.wait_for_step(11)
        cluster.signal_workers(cluster.all_hosts[1:], signal.SIGKILL)
        cluster.wait_for_world(4, after=1)
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=3)
        assert not cluster.events("worker.replica_differs")


def test_the_run_ends_with_an_error_when_newcomers_lack_a_value_that_no_state_has(
        tmp_path: Path) -> None:
    """They agree with each other and are more than half, but they are no witnesses against the
    worker that has not received its state. Its state is the newest checkpoint, and nothing is
    proved."""
    with Cluster(tmp_path, job=(*SLOW, "--optimizer", "Hidden"), min_workers=1) as cluster:
        cluster.wait_for_step(11)
        cluster.signal_workers(cluster.all_hosts[1:], signal.SIGKILL)
        assert cluster.wait() not in (0, None)
        [lost] = cluster.events("worker.state_lost")
        assert not cluster.events("worker.replica_differs")
        assert not cluster.events("run.finished")
        assert len(lost["holders"]) == 1 and lost["checkpoint_step"] == lost["step"]
        newest = cluster.events("state.checkpoint_published")[-1]
        assert newest["step"] == lost["step"] > lost["received_step"] >= 11
        output = (tmp_path / "output.log").read_text()
        assert "a value that is not in the state" in output
        assert any("lacks a part of the training" in one
                   for one in verify(cluster.run_dir).violations)
