"""Every kind of death, for real: real horovodrun, real processes, at least four ranks.

Each test asserts the same laws (`Cluster.assert_nothing_lost`): the fault fired, no healthy worker
died, every sample counted exactly once, steps never went back, one lineage, and the weights equal
the undisturbed twin's bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import PATIENT, Cluster, is_running
from faults import RELEASED, Plan

from elastic_trainer.config import EXIT_USER_ERROR
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.world.session import init_can_fail

Twin = Callable[..., str]
FEW = ("--steps", "40")
SLOW = ("--steps", "80", "--step-s", "0.2")
"""Slow enough that hosts can come and go while it runs."""
LONG = ("--steps", "90", "--step-s", "0.35")
IN_INIT = f"{PATIENT},gloo_s=10"
"""Who is in `hvd.init()` waits that long for a dead peer: a little longer than a healthy worker may
be silent."""


def host(rank: int) -> str:
    """The host that has this rank while all workers are present."""
    return f"127.0.0.{rank + 1}"


def shown(pid: int) -> str:
    """The process title of a worker, without the number of steps."""
    return Path(f"/proc/{pid}/comm").read_text().split()[0]


def stopped(events: list[dict[str, Any]]) -> list[str]:
    """The hosts of those workers that stopped by themselves, because their attempt was over."""
    return [e["worker"].split("/")[0] for e in events if e["event"] == "worker.stopped"]


def index_of(story: list[str], event: str, count: int) -> int:
    """Where in the story an event is for the second (third, …) time."""
    return [at for at, logged in enumerate(story) if logged == event][count - 1]


@pytest.mark.parametrize(("loop", "deaths"), [
    ((), {0: ("step.prepared", 10), 1: ("step.voted", 20), 2: ("step.applied", 30)}),
    (("--iterator",), {5: ("data", 20), 4: ("step.prepared", 20), 3: ("step.voted", 30)})],
    ids=("first", "last"))
def test_loses_nothing_when_a_worker_is_killed(tmp_path: Path, twin_of: Twin,
                                               loop: tuple[str, ...],
                                               deaths: dict[int, tuple[str, int]]) -> None:
    """SIGKILL in the backward pass, before the vote, between vote and apply, or after apply costs
    one step at most: of rank 0 in worlds of 6, 5 and 4, and of the last rank. `for step in trainer`
    has the bits of train()."""
    plan = Plan()
    for rank, (point, number) in deaths.items():
        plan.kill(host=host(rank), at=point, **{"reads" if point == "data" else "step": number})
    with Cluster(tmp_path, hosts=6, job=(*FEW, *loop), plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=3)
    assert result["steps_redone"] <= 3
    assert result["attempts"] == 1


def test_loses_nothing_when_workers_die_while_buckets_are_on_their_way(
        tmp_path: Path, twin_of: Twin) -> None:
    """SIGKILL in a backward pass, when others hold a part of the victim's gradient. In one of two
    passes in a row its gradient leaves."""
    job = (*FEW, "--bucket-bytes", "16384")
    plan = Plan()
    for rank, passes in {1: 20, 2: 31, 3: 42}.items():
        plan.kill(host=host(rank), at="gradient", passes=passes)
    with Cluster(tmp_path, hosts=6, job=job, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=3)
    assert result["steps_redone"] <= 3
    assert result["attempts"] == 1


def test_rolls_forward_when_only_the_others_saw_the_vote_pass_and_leaves_when_terminated(
        tmp_path: Path, twin_of: Twin) -> None:
    """A worker whose vote broke off, while others have applied the step, applies the gradient in
    its own hands. SIGTERM is a request to leave at a step boundary, with the exit code 75, and no
    step is done again for it. Of rank 0 and of another."""
    plan = Plan().add("lose_vote", host=host(0), at="step.voted", step=8)
    plan.add("lose_vote", host=host(2), at="step.voted", step=16)
    plan.add("terminate", host=host(0), at="step.prepared", step=24)
    plan.add("terminate", host=host(2), at="step.prepared", step=32)
    with Cluster(tmp_path, job=FEW, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=0)
        rolled = [(e["worker"].split("/")[0], e["step"])
                  for e in cluster.events("worker.rolled_forward")]
        left = [(e["host"], e["exit_code"]) for e in cluster.events("driver.worker_gone")
                if e["reason"] == "left"]
        redone = [e["step"] for e in cluster.events("worker.step_redone")]
        story = [e["event"] for e in cluster.events()]
    assert rolled == [(host(0), 8), (host(2), 16)]
    before_it_left = story[:story.index("driver.worker_gone")]
    assert before_it_left.count("worker.rolled_forward") == 2
    assert left == [(host(0), 75), (host(2), 75)]
    # The others were in the next step when a vote was lost.
    assert len(redone) == result["steps_redone"] <= 2 and all(step < 24 for step in redone)


def test_a_death_counts_at_once_when_the_machine_fails_or_a_child_holds_the_output(
        tmp_path: Path, twin_of: Twin) -> None:
    """A disk's error while a sample is read costs its worker alone: the others do the step again,
    the host gets a new worker after a while. Horovod waits for the end of a dead worker's output
    (safe_shell_exec.py:267); here the exit is what counts, of rank 0 and of another."""
    plan = Plan().add("io_error", host=host(2), at="data", reads=20)
    plan.add("child_holds_stdout", host=host(0), at="step.prepared", step=20, after=1)
    plan.add("child_holds_stdout", host=host(3), at="step.prepared", step=30, after=2)
    with Cluster(tmp_path, hosts=6, job=FEW, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=3)
        [logged] = cluster.events("worker.machine_failed")
        gone = [(e["host"], e["reason"]) for e in cluster.lost()]
        # Their silence would have ended them, later.
        evicted = [e["reason"] for e in cluster.events("driver.worker_evicted")]
    assert evicted == ["machine_failed"]
    assert (logged["host"], logged["error"]) == (host(2), "EIO")
    assert logged["microbatch"] >= 0
    assert "Input/output error, as planned" in logged["text"]
    # Reads count from a worker's boot, which may be late: the order is not the steps'.
    assert sorted(gone) == [
        (host(0), "crashed"), (host(2), "machine_failed"), (host(3), "crashed")]
    assert result["steps_redone"] <= 3
    assert result["attempts"] == 1


def test_the_same_error_on_a_second_host_is_the_users(tmp_path: Path) -> None:
    """A sample that cannot be read anywhere ends the run: two hosts, both tracebacks, no third
    try."""
    schedule = Schedule(dataset_size=1003,
                        global_batch=64,
                        microbatches=8,
                        epochs=1000,
                        seed=3,
                        max_steps=40)
    first = int(schedule.microbatch_samples(12, 5)[0])
    plan = Plan().add("io_error", at="data", first=first).add("io_error", at="data", first=first)
    plan.add("io_error", at="data", first=first)
    with Cluster(tmp_path, job=FEW, plan=plan) as cluster:
        assert cluster.finish() == EXIT_USER_ERROR
        logged = cluster.events("worker.machine_failed")
        [ended] = cluster.events("attempt.ended")
        output = (tmp_path / "output.log").read_text()
    assert [(event["step"], event["microbatch"]) for event in logged] == [(12, 5), (12, 5)]
    assert len({event["host"] for event in logged}) == 2
    assert ended["verdict"] == "user_error" and len(cluster.fired()) == 2
    verdict = output[output.index("attempt user_error"):]
    assert "Micro-batch 5 of step 12 fails with EIO on" in verdict and verdict.count(
        "Input/output error, as planned") >= 2


def test_all_agree_and_nothing_is_lost_when_the_reducer_is_ring(tmp_path: Path) -> None:
    """Without the bits, all other laws hold: each sample once, no victim, the same weights on all
    ranks."""
    plan = Plan().kill(host=host(1), at="step.prepared", step=12)
    with Cluster(tmp_path, job=FEW, plan=plan, options=["--reduce", "ring"]) as cluster:
        assert cluster.finish() == 0
        weights = json.loads((cluster.run_dir / "result.json").read_text())["weights_sha256"]
        result = cluster.assert_nothing_lost(weights, victims=1)
        output = (tmp_path / "output.log").read_text()
    assert output.count(f"weights {weights}") >= 3
    assert 0.5 < result["loss"] < 1.1  # the exact run has 0.81


def test_loses_nothing_when_two_workers_are_killed_at_once_or_one_during_recovery(
        tmp_path: Path, twin_of: Twin) -> None:
    """A third of the world dies in the same step, rank 0 among it. Later a second death follows
    after the place in the new generation was taken: admission or init absorbs it."""
    plan = Plan()
    for rank in (0, 3):
        plan.add("kill_together", host=host(rank), at="step.voted", step=12)
    plan.kill(host=host(1), at="step.prepared", step=24, after=2)
    plan.kill(host=host(2), at="world.init_left", after=3)
    with Cluster(tmp_path, hosts=6, job=FEW, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=4, revived=True)
        redone = [e["step"] for e in cluster.events("worker.step_redone")]
    assert redone.count(12) <= 1 and result["steps_redone"] <= 3


def test_evicts_the_worker_when_it_freezes(tmp_path: Path, twin_of: Twin) -> None:
    """SIGSTOP: the sockets stay open without traffic. The missing heartbeats end that worker alone
    (F3): rank 0, then another."""
    plan = Plan().freeze(host=host(0), at="step.prepared", step=12)
    plan.freeze(host=host(2), at="step.prepared", step=24)
    with Cluster(tmp_path, hosts=5, job=FEW, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=2)
        assert [e["reason"] for e in cluster.events("driver.worker_evicted")] == ["frozen"] * 2
        pauses = cluster.events("worker.pause_ended")
    # All waited for each, for 8 s (PATIENT), and none of it is training. Nobody waits for the new
    # workers that join.
    noticed = [paused["noticing_s"] for paused in pauses if paused["noticing_s"]]
    assert len(noticed) == 2 and min(noticed) > 5.0, pauses
    assert result["steps_redone"] <= 2
    assert result["pauses"] == [round(paused["duration_s"], 3) for paused in pauses]


def test_no_worker_notices_when_a_newcomer_crashes_hangs_or_cannot_read_its_data(
        tmp_path: Path, twin_of: Twin) -> None:
    """A newcomer that dies before it stands ready costs no generation; its host gets another
    chance. What the user's code raises before a worker stands ready may be its host's fault: it
    takes nobody with it. One that never stands ready is never in any generation, and is stopped
    when the run is over."""
    plan = Plan().add("crash", host=host(4), at="boot").add("hang", host=host(5), at="boot")
    plan.add("raise", host=host(6), at="data", reads=1)
    with Cluster(tmp_path, hosts=7, start_with=4, job=SLOW, plan=plan) as cluster:
        cluster.wait_for_step(3)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_fired()
        generation = cluster.wait_for_world(6)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*SLOW), victims=2)
    assert generation <= 3  # the two that get another chance
    assert result["steps_redone"] == 0


@pytest.mark.parametrize(("generation", "point"), [(1, ""), (2, "step.voted"),
                                                   (2, "step.prepared")])
def test_survivors_meet_again_when_one_dies_inside_init(tmp_path: Path, twin_of: Twin,
                                                        generation: int, point: str) -> None:
    """`hvd.init()` fails, and they ask for the next place. An unmended Horovod aborts all who are
    in there (F1): then they start anew in place, with the same pid and their live state."""
    rank_0 = host(1)  # of the second generation
    plan = Plan().add("kill_in_init",
                      host=host(2) if generation == 1 else rank_0,
                      at="world.init_entered",
                      generation=generation)
    # Else init may be faster.
    plan.add("wait_for_death", host=host(3), at="world.init_entered", generation=generation)
    if generation == 2:
        plan.kill(host=host(0), at=point, step=12)
    with Cluster(tmp_path, job=FEW, plan=plan, limits=IN_INIT) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW),
                                             victims=generation,
                                             revived=not init_can_fail())
        assert bool(cluster.events("worker.revives")) is not init_can_fail(), cluster.story()
        if generation == 2:
            broken = cluster.events("worker.generation_broken")[0]["time"]
            [started,
             *_] = [e for e in cluster.events("worker.generation_started") if e["time"] > broken]
            # The pause began when the generation broke, not when the new process did.
            assert started["time"] - started["pause_s"] < (broken +
                                                           started["time"]) / 2, cluster.story()
    assert result["attempts"] == 1
    # Who saw the vote pass goes on.
    least, most = {"": (0, 0), "step.voted": (0, 1), "step.prepared": (1, 1)}[point]
    assert least <= result["steps_redone"] <= most


def let_newcomers_in(cluster: Cluster, victims: list[str]) -> None:
    """Let a newcomer in for each victim, which dies meanwhile: a newcomer itself, or a worker of
    the world of four. Its host then leaves the list."""
    listed = cluster.all_hosts[:4]
    cluster.wait_for_step(3)
    for number, victim in enumerate(victims):
        known = len(cluster.events("driver.generation_formed"))
        listed.append(host(4 + number))
        cluster.set_hosts(listed)
        cluster.wait_until_fired(number + 1)
        listed.remove(victim)
        cluster.set_hosts(listed)
        cluster.wait_for("world of those who live", lambda: any(
            sorted(e["hosts"]) == sorted(listed)  # noqa: B023 (called at once)
            for e in cluster.events("driver.generation_formed")[known:]))  # noqa: B023


def test_loses_nothing_when_one_dies_during_the_transfer(tmp_path: Path, twin_of: Twin) -> None:
    """Survivors' state is never written by a transfer, and a newcomer takes all of it or nothing:
    two newcomers die, then a rank 0, another giver, and a rank 0 behind it."""
    started, ended = "world.transfer_started", "world.transfer_ended"
    victims = [(4, started), (5, ended), (0, started), (2, started), (1, ended)]
    plan = Plan()
    for number, (victim, point) in enumerate(victims):
        plan.kill(host=host(victim), at=point, size=5, is_giver=victim < 4, after=number)
    with Cluster(tmp_path, hosts=9, start_with=4, job=LONG, plan=plan) as cluster:
        let_newcomers_in(cluster, [host(victim) for victim, _ in victims])
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*LONG), victims=5)


def test_loses_nothing_when_one_dies_at_its_admission(tmp_path: Path, twin_of: Twin) -> None:
    """It has taken its place and never enters `hvd.init()`: the others, who are in there, wait for
    it in vain (F1). A newcomer, a rank 0, and another."""
    victims, plan = [4, 0, 2], Plan()
    for number, victim in enumerate(victims):
        plan.kill(host=host(victim), at="world.place_taken", size=5, after=number)
    with Cluster(tmp_path, hosts=7, start_with=4, job=LONG, plan=plan, limits=IN_INIT) as cluster:
        let_newcomers_in(cluster, [host(victim) for victim in victims])
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*LONG), victims=3, revived=not init_can_fail())
    assert result["attempts"] == 1
    assert result["steps_redone"] == 0


def test_waits_with_its_state_when_below_min_workers_and_another_dies(tmp_path: Path,
                                                                      twin_of: Twin) -> None:
    """Two of four die, the rest wait for a third; one of them dies while it waits; the last one
    still holds the state."""
    plan = Plan()
    for rank in (0, 1):
        plan.add("kill_together", host=host(rank), at="step.voted", step=12)
        # Their successors: no survivor holds the state.
        plan.add("hold", host=host(rank), at="boot", generation=1)
    with Cluster(tmp_path, job=SLOW, min_workers=3, plan=plan) as cluster:
        cluster.wait_for_step(3)
        (tmp_path / "joined").touch()  # who boots from now on is of "generation" 1
        cluster.wait_until_fired()
        cluster.wait_for(
            "two who wait", lambda: [
                shown(pid) for name, pid in cluster.live_pids().items()
                if name.split("/")[0] in (host(2), host(3))
            ] == ["waiting", "waiting"])
        cluster.signal_worker(host(2), signal.SIGKILL)
        cluster.wait_for("the third death", lambda: len(cluster.lost()) == 3)
        cluster.release()
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*SLOW), victims=3)
        formed, broken = cluster.events("driver.generation_formed"), cluster.events(
            "worker.generation_broken")
        story = [e["event"] for e in cluster.events()]
        waited = story[index_of(story, "driver.worker_gone", 2
                                ):index_of(story, "driver.generation_formed", 2)]
    assert {host(2), host(3)} <= {e["worker"].split("/")[0] for e in broken}
    assert min(e["size"] for e in formed) >= 3
    assert waited.count("driver.worker_gone") == 2 and "worker.step_committed" not in waited
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 1


def test_no_step_is_done_again_when_hosts_join_flap_and_leave_the_list(tmp_path: Path,
                                                                       twin_of: Twin) -> None:
    """A host's newcomer is stopped as it stands ready, or as it boots, and is never in the world.
    It leaves the list while the others wait for it in `hvd.init()`: it comes in, and goes at a
    boundary. It joins for good. Rank 0's host leaves the list: it goes at a boundary, behind a
    checkpoint that all have made, because losses come in groups; another one follows."""
    job = (*LONG, "--checkpoint-every", "1000")
    # No worker gets to a boundary; then none leaves `hvd.init()`.
    plan = Plan().add("hold", host=host(1), at="step.prepared", step=4)
    plan.add("hold", host=host(4), at="world.place_taken", after=1)
    with Cluster(tmp_path, hosts=5, start_with=4, job=job, plan=plan,
                 limits=f"{PATIENT},gloo_s=60") as cluster:

        def newcomers(event: str) -> list[dict[str, Any]]:
            return [e for e in cluster.events(event) if e["worker"].startswith(f"{host(4)}/")]

        cluster.wait_until_fired(1)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_for("newcomer", lambda: newcomers("driver.worker_ready"))
        cluster.set_hosts(cluster.all_hosts[:4])
        cluster.wait_for("its end", lambda: newcomers("driver.worker_gone"))
        cluster.release()
        cluster.wait_for_step(4)
        (tmp_path / RELEASED).unlink()
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_for("newcomer", lambda: newcomers("driver.worker_started")[1:])
        cluster.set_hosts(cluster.all_hosts[:4])
        cluster.wait_for("its end", lambda: newcomers("driver.worker_gone")[1:])
        assert len(cluster.events("driver.generation_formed")) == 1, cluster.story()
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_fired(2)
        removed = len(cluster.events("driver.host_removed"))
        cluster.set_hosts(cluster.all_hosts[:4])
        cluster.wait_for("its host's leave",
                         lambda: cluster.events("driver.host_removed")[removed:])
        cluster.release()
        generation = cluster.wait_for_world(4, after=1)
        gone = [e["reason"] for e in cluster.wait_for(
            "its end", lambda: newcomers("driver.worker_gone")[2:] and
            newcomers("driver.worker_gone"))]
        cluster.set_hosts(cluster.all_hosts)
        generation = cluster.wait_for_world(5, after=generation)
        step = cluster.events("worker.step_committed")[-1]["step"]
        cluster.set_hosts(cluster.all_hosts[1:])
        left = generation = cluster.wait_for_world(4, after=generation)
        cluster.set_hosts(cluster.all_hosts[1:4])
        cluster.wait_for_world(3, after=generation)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        formed = {e["generation"]: e for e in cluster.events("driver.generation_formed")}
        [removed_s] = [e["time"] for e in cluster.events("driver.host_removed")
                       if e["host"] == host(0)]
        published = [e for e in cluster.events("state.checkpoint_published")
                     if removed_s < e["time"] < formed[left]["time"]]
    assert gone[0] == gone[2] == "left"
    assert [e["size"] for e in formed.values()] == [4, 5, 4, 5, 4, 3]
    assert published and published[0]["step"] > step
    assert result["steps_redone"] == 0


def test_goes_on_with_the_same_workers_when_the_list_empties_and_hands_over_when_it_is_swapped(
        tmp_path: Path, twin_of: Twin) -> None:
    """Nobody may work, so all wait, alive, with their state; then they go on as if nothing had
    been. Then not one host of the old list is in the new one (Horovod: "No hosts from previous set
    remaining"): the state is handed over."""
    with Cluster(tmp_path, hosts=8, start_with=4, job=SLOW) as cluster:
        cluster.wait_for_step(3)
        workers = cluster.live_pids()
        cluster.set_hosts([])
        cluster.wait_for("the pause", lambda: {*map(shown, workers.values())} == {"waiting"})
        # What is in memory alone may be taken with the hosts.
        cluster.wait_for("a checkpoint of the last step", lambda: {
            e["step"] for e in cluster.events("state.checkpoint_published")} & {
            e["step"] + 1 for e in cluster.events("worker.step_committed")[-1:]})
        cluster.set_hosts(cluster.all_hosts[:4])
        cluster.wait_for_world(4, after=1)
        assert cluster.live_pids() == workers
        cluster.set_hosts(cluster.all_hosts[4:])
        cluster.wait_for(
            "the new ones alone", lambda: any(
                set(e["hosts"]) == set(cluster.all_hosts[4:])
                for e in cluster.events("driver.generation_formed")))
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*SLOW), victims=0)
    assert result["attempts"] == 1
    assert result["steps_redone"] == 0


def test_keeps_the_last_list_when_the_discovery_fails_or_hangs(tmp_path: Path,
                                                               twin_of: Twin) -> None:
    """Unknown is never empty, and no answer is no empty answer: the failure is logged, a death is
    recovered from meanwhile, and the next answer counts."""
    broken, hangs, script = (tmp_path / name for name in ("broken", "hangs", "discovery.sh"))
    script.write_text(f'if [ -e {hangs} ]; then sleep 120 & echo $! >> {hangs}.pids; wait; fi\n'
                      f'if [ -e {broken} ]; then exit 1; fi\ncat "$1"\n')
    discovery = f"sh {script} {tmp_path / 'hosts'}"
    with Cluster(tmp_path, hosts=5, start_with=4, job=SLOW, discovery=discovery) as cluster:

        def failed(text: str) -> Any:
            return cluster.wait_for("failed discovery", lambda: [
                e for e in cluster.events("driver.discovery_failed") if text in e["error"]])

        cluster.wait_for_step(3)
        broken.touch()
        failed("")
        cluster.signal_worker(host(1), signal.SIGKILL)
        cluster.wait_for_world(3)
        broken.unlink()
        generation = cluster.wait_for_world(4, after=1)
        hangs.touch()
        failed("timed out")
        started = int(Path(f"{hangs}.pids").read_text().split()[0])
        cluster.wait_for("the end of what the script has started", lambda: not is_running(started))
        cluster.signal_worker(host(2), signal.SIGKILL)
        cluster.wait_for_world(3, after=generation)
        cluster.set_hosts(cluster.all_hosts)
        hangs.unlink()
        cluster.wait_for_world(5)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*SLOW), victims=2)
    assert result["attempts"] == 1


def test_resumes_without_losing_a_step_when_the_driver_is_killed_or_all_have_to_leave(
        tmp_path: Path, twin_of: Twin) -> None:
    """Workers notice that their driver is gone, finish their step, write it down and stop; the next
    attempt goes on from there. Then SIGTERM comes to all workers: no worker may keep the state, so
    it is written to the store, and no step is done again."""
    with Cluster(tmp_path, job=SLOW) as cluster:
        cluster.wait_for_step(7)
        os.kill(cluster.driver_pid(), signal.SIGKILL)
        [restored, *_] = cluster.wait_for("restore",
                                          lambda: cluster.events("state.checkpoint_restored"))
        cluster.wait_for_step(restored["step"] + 3)
        cluster.signal_workers(cluster.all_hosts, signal.SIGTERM)
        [_, again, *_] = cluster.wait_for(
            "restore", lambda: cluster.events("state.checkpoint_restored")[1:] and
            cluster.events("state.checkpoint_restored"))
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*SLOW), victims=0)
        first = [e for e in cluster.events() if e["attempt"] == 1]
    # Nobody is left who could say how they ended.
    assert sorted(stopped(first)) == cluster.all_hosts
    assert restored["step"] == [e["step"]
                                for e in first if e["event"] == "worker.step_committed"][-1] + 1
    assert 7 < restored["step"] < again["step"] < result["steps"]
    assert result["attempts"] == 3
    assert result["steps_redone"] == 0


def test_resumes_to_the_same_bits_when_all_workers_or_everyone_is_killed(tmp_path: Path,
                                                                         twin_of: Twin) -> None:
    """All workers die, and nobody holds the state any more: the attempt ends, and the next one
    restores the checkpoint, unattended. Then the driver and the supervisor die with them; the same
    command goes on from the checkpoint."""
    with Cluster(tmp_path, job=SLOW) as cluster:
        cluster.wait_for("checkpoint", lambda: cluster.events("state.checkpoint_published"))
        cluster.signal_workers(cluster.all_hosts, signal.SIGKILL)
        cluster.wait_for("restore", lambda: cluster.events("state.checkpoint_restored"))
        cluster.kill_everyone()
        cluster.start()
        cluster.wait_for("restore", lambda: cluster.events("state.checkpoint_restored")[1:])
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*SLOW), victims=4)
    assert result["attempts"] == 3


def test_the_last_step_is_written_down_when_those_who_wait_for_more_may_go(
        tmp_path: Path, twin_of: Twin) -> None:
    """Two of four die and three are needed; then the hosts of the two that wait are under notice,
    and vanish."""
    job = (*SLOW, "--checkpoint-every", "1000")
    with Cluster(tmp_path, job=job, min_workers=3) as cluster:
        cluster.wait_for_step(7)
        cluster.signal_workers([host(1), host(2)], signal.SIGKILL)
        cluster.set_hosts([host(0), host(3)])
        cluster.wait_for("two deaths", lambda: len(cluster.lost()) == 2)
        cluster.set_hosts([])
        [published] = cluster.wait_for("checkpoint",
                                       lambda: cluster.events("state.checkpoint_published"))
        assert published["step"] == cluster.events("worker.step_committed")[-1]["step"] + 1
        cluster.kill_everyone()
        attempts = len(cluster.events("attempt.started"))  # another one may wait for hosts already
        cluster.set_hosts(cluster.all_hosts)
        cluster.start()
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=2)
    assert result["attempts"] == attempts + 1
    assert result["steps_redone"] <= 1


def test_ends_at_once_with_the_traceback_when_the_user_code_raises(tmp_path: Path) -> None:
    """A user's own exception is never retried and reaches every rank; a dead host always is."""
    with Cluster(tmp_path, job=SLOW, plan=Plan().add("raise", host=host(2), at="data",
                                                     reads=20)) as cluster:
        assert cluster.wait() == 70
        attempts, failed = cluster.events("attempt.ended"), cluster.events("worker.failed")
        assert [e["verdict"] for e in attempts] == ["user_error"], cluster.story()
        assert len(failed) == 4, cluster.story()
        assert all("a bad sample, as planned" in e["error"] for e in failed)
        assert "a bad sample, as planned" in (tmp_path / "output.log").read_text()


def test_the_driver_takes_no_worker_for_dead_when_it_thaws(tmp_path: Path, twin_of: Twin) -> None:
    """It got no heartbeat for longer than a worker may be silent: the driver itself stood still.
    All train on."""
    with Cluster(tmp_path, job=SLOW, limits="silence_s=8,gloo_s=16,driver_lost_s=60") as cluster:
        cluster.wait_for_step(7)
        driver = cluster.driver_pid()
        os.kill(driver, signal.SIGSTOP)
        last = cluster.events("worker.step_committed")[-1]
        cluster.wait_for("more than a worker's silence", lambda: (
            cluster.events("worker.step_committed")[-1]["time"] > last["time"] + 9))
        os.kill(driver, signal.SIGCONT)
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*SLOW), victims=0)
    assert result["generations"] == result["attempts"] == 1
    assert result["steps_redone"] == 0


def test_the_next_attempt_goes_on_when_the_driver_thaws_too_late(tmp_path: Path,
                                                                 twin_of: Twin) -> None:
    """Its workers have given it up, written their last step and ended: it finds no worker, and no
    victim either."""
    with Cluster(tmp_path, job=SLOW) as cluster:
        cluster.wait_for_step(7)
        driver = cluster.driver_pid()
        os.kill(driver, signal.SIGSTOP)
        cluster.wait_for("the workers' stop", lambda: len(stopped(cluster.events())) == 4)
        os.kill(driver, signal.SIGCONT)
        [restored, *_] = cluster.wait_for("restore",
                                          lambda: cluster.events("state.checkpoint_restored"))
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*SLOW), victims=0)
    assert 7 < restored["step"] < result["steps"]
    assert result["attempts"] == 2
    assert result["steps_redone"] == 0


def test_an_exception_in_a_loop_of_the_users_ends_the_run_everywhere(tmp_path: Path) -> None:
    """With its traceback, without a retry, and without `with`."""
    with Cluster(tmp_path, job=(*FEW, "--iterator", "--raise-at", f"{host(2)}:12")) as cluster:
        assert cluster.finish() == EXIT_USER_ERROR
        (failed,) = cluster.events("worker.failed")
        (stopped,) = cluster.events("driver.stopped")
    assert "ValueError: in the loop, as planned" in failed["error"] and failed["worker"].startswith(
        host(2))
    assert stopped["verdict"] == "user_error" and "in the loop, as planned" in stopped["detail"]
