"""The user's loop on a real cluster: how it is left, how it ends, and what happens between two
phases. The laws are those of test_faults.py."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from cluster import Cluster
from faults import Plan
from test_faults import FEW, SLOW, host

from elastic_trainer.config import EXIT_USER_ERROR, Limits

Twin = Callable[..., str]
LOOP = (*FEW, "--iterator")
BREAK = ("--break-at", "12")
FOR_A_DEBUGGER = "silence_s=600,gloo_s=600,stuck_s=600"


def test_the_run_goes_on_when_the_loop_was_left_by_break(tmp_path: Path, twin_of: Twin) -> None:
    """All workers leave it behind step 12. The run ends, names the checkpoint from which the same
    command goes on, and has the twin's bits in the end."""
    job = (*LOOP, "--checkpoint-every", "5")
    with Cluster(tmp_path, job=(*job, *BREAK)) as cluster:
        assert cluster.finish() == EXIT_USER_ERROR
        left = cluster.events("worker.loop_left")
        (ended,) = cluster.events("attempt.ended")
        assert left and {(e["step"], e["newest_checkpoint"]) for e in left} <= {(13, 5), (13, 10)}
        assert ended["verdict"] == "user_error" and not cluster.lost(), cluster.story()
        shown = (tmp_path / "output.log").read_text()
        assert "left by break or return after 13 of 40 steps, so the run is not finished" in shown
        assert "The same command goes on from the checkpoint of step" in shown
        cluster.command = [part for part in cluster.command if part not in BREAK]
        cluster.start()
        assert cluster.wait() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        (restored,) = cluster.events("state.checkpoint_restored")
    assert result["attempts"] == 2
    assert restored["step"] in (5, 10) and result["steps_redone"] == 13 - restored["step"]


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
