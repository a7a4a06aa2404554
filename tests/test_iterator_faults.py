"""The user's loop on a real cluster: how it is left, how it ends, and what happens between two
phases. The laws are those of test_faults.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from cluster import JOB, Cluster
from faults import Plan
from test_faults import FEW, SLOW, host

from elastic_trainer.config import EXIT_INTERRUPTED, Limits
from elastic_trainer.events.log import read_events

Twin = Callable[..., str]
LOOP = (*FEW, "--iterator")
BREAK = ("--break-at", "12")
FOR_A_DEBUGGER = "silence_s=600,gloo_s=600,stuck_s=600"


def test_no_step_is_lost_when_the_loop_is_left_by_break(tmp_path: Path, twin_of: Twin) -> None:
    """One worker leaves it after step 12, as a condition on one host may have it: it stops the run
    on all, as a signal does. All leave it after step 24. Each time the run stops with a checkpoint
    of that step, and the same command has the twin's bits in the end."""
    job = (*LOOP, "--checkpoint-every", "100")
    only = ("--break-on", host(2))
    with Cluster(tmp_path, job=(*job, *BREAK, *only)) as cluster:
        straight = [part for part in cluster.command if part not in (*BREAK, *only)]
        assert cluster.finish() == EXIT_INTERRUPTED
        assert [e["step"] for e in cluster.events("worker.loop_left")] == [13]
        cluster.command = [*straight, "--break-at", "24"]
        cluster.start()
        assert cluster.wait() == EXIT_INTERRUPTED
        left = cluster.events("worker.loop_left")[1:]
        assert left and {(e["step"], e["newest_checkpoint"]) for e in left} == {(25, 25)}
        ended = [e["verdict"] for e in cluster.events("attempt.ended")]
        assert ended == ["interrupted"] * 2 and not cluster.lost(), cluster.story()
        shown = (tmp_path / "output.log").read_text()
        for step in (13, 25):
            assert (f"left by break or return after {step} of 40 steps, so the run is not finished"
                    in shown)
            assert f"The same command goes on from the checkpoint of step {step}." in shown
        cluster.command = straight
        cluster.start()
        assert cluster.wait() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        restored = [e["step"] for e in cluster.events("state.checkpoint_restored")]
    assert restored == [13, 25]
    assert (result["attempts"], result["steps_redone"]) == (3, 0)


def test_the_run_goes_on_when_a_host_leaves_the_list_and_another_joins(tmp_path: Path,
                                                                       twin_of: Twin) -> None:
    """The worker that is dismissed leaves by SystemExit, through the inner loop of the user's
    code. Nothing of it ends the run."""
    job = (*SLOW, "--iterator")
    with Cluster(tmp_path, start_with=4, hosts=5, job=job) as cluster:
        cluster.wait_for_step(5)
        cluster.set_hosts([one for one in cluster.all_hosts if one != host(1)])
        cluster.wait_for_world(4, after=2)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        for event in ("worker.loop_left", "worker.failed"):
            assert not cluster.events(event), cluster.story()
    assert result["steps_redone"] == 0 and result["attempts"] == 1


@pytest.mark.usefixtures("turn")
def test_an_exception_ends_all_workers_of_plain_horovodrun(tmp_path: Path) -> None:
    """Horovod's driver takes no reports, and would start a worker that has raised again. The vote
    informs the others: all raise in the same step, and no step is tried twice."""
    horovodrun = [str(Path(sys.executable).parent / "horovodrun"), "-np", "4", "--min-np", "4",
                  "--network-interfaces", "lo", "--host-discovery-script", "echo localhost:4"]
    run_dir = tmp_path / "run"
    env = os.environ | {"ELASTIC_TRAINER_RUN_DIR": str(run_dir)}
    done = subprocess.run([*horovodrun, *JOB, *LOOP, "--raise-at", "slot 2:12"], env=env,
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    events = list(read_events(run_dir))
    failed = [e["error"] for e in events if e["event"] == "worker.failed"]
    steps = [e["step"] for e in events if e["event"] == "worker.step_committed"]
    assert done.returncode, done.stdout + done.stderr
    assert len(failed) == 4 and all("in the loop, as planned" in error for error in failed), failed
    assert sum("PeerFailed" in error for error in failed) == 3
    assert sorted(set(steps)) == list(range(13))


def test_the_run_is_finished_when_the_worker_that_asked_for_it_dies(tmp_path: Path,
                                                                    twin_of: Twin) -> None:
    """step.stop() on one worker: the vote of that step has carried it to all."""
    plan = Plan().kill(host=host(2), at="step.applied", step=12)
    with Cluster(tmp_path, job=(*LOOP, "--stop-at", f"{host(2)}:12"), plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*LOOP, "--stop-at", "None:12"), victims=1)
        (early,) = cluster.events("run.finished_early")
        (ended,) = cluster.events("attempt.ended")
    assert (early["steps"], early["planned_steps"]) == (result["steps"], 40) == (13, 40)
    assert ended["verdict"] == "finished" and result["steps_redone"] == 0


def test_a_newcomer_joins_between_two_phases_when_a_worker_dies_there(tmp_path: Path,
                                                                      twin_of: Twin) -> None:
    """Its step has two optimizers, and the first one has moved. Three are too few, so they wait for
    a fourth worker: all go on with the second phase, and neither phase is done twice."""
    job = (*LOOP, "--phases")
    plan = Plan().kill(host=host(2), at="step.applied", step=12)
    with Cluster(tmp_path, job=job, min_workers=4, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=1)
        started = cluster.events("worker.generation_started")
        done = [e["step"] for e in cluster.events("worker.step_committed") if not e.get("repeated")]
    assert [(e["step"], e["size"]) for e in started] == [(0, 4), (12, 4)]
    assert done == list(range(40)) and result["attempts"] == 1


def test_a_worker_that_stands_in_a_debugger_stays(tmp_path: Path, twin_of: Twin) -> None:
    """It is silent for longer than a heartbeat and a collective may usually take. With these limits
    raised all workers wait for it."""
    job = (*SLOW, "--iterator")
    with Cluster(tmp_path, job=job, limits=FOR_A_DEBUGGER) as cluster:
        cluster.wait_for_step(7)
        pid = cluster.signal_worker(host(2), signal.SIGSTOP)
        until = time.monotonic() + max(Limits.silence_s, Limits.gloo_s) + 1.0
        cluster.wait_for("more than the usual limits", lambda: time.monotonic() > until)
        assert cluster.signal_worker(host(2), signal.SIGCONT) == pid
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        assert not cluster.events("driver.worker_evicted"), cluster.story()
        times = [e["time"] for e in cluster.events("worker.step_committed")]
    assert max(after - before for before, after in pairwise(times)) > Limits.gloo_s  # it was silent
    assert result["generations"] == result["attempts"] == 1 and result["steps_redone"] == 0
