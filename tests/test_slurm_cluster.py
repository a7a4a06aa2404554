"""A real Slurm in namespaces: deploy/slurm submits a run, and Slurm preempts, ends, loses and
requeues its tasks. Each run ends proved, with the bits of its undisturbed twin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm_accounts
import slurm_lab
from faults import RELEASED, Plan
from netlab import Lab
from s3_servers import Unavailable
from slurm_lab import ROOT, Slurm, SlurmFleet
from waiting import wait_for

Twin = Callable[..., str]
JOB = ("--steps", "140", "--step-s", "0.5", "--checkpoint-every", "5")
MEDIUM = ("--steps", "600", "--step-s", "0.35", "--checkpoint-every", "5")
LONG = ("--steps", "2000", "--step-s", "0.35", "--checkpoint-every", "5")
THREE = ["h1", "h2", "h3"]
ACCOUNTS = (
    ("add", "qos", "low", "set", "GraceTime=30", "PreemptMode=requeue"),
    ("add", "qos", "high", "set", "Preempt=low", "Priority=1000"),
    ("add", "qos", "none", "set", "GrpJobs=0"),
    ("add", "account", "research"), ("add", "account", "small", "set", "GrpTRES=cpu=1"),
    ("add", "user", "root", "account=research", "qos=normal,low,high,none"),
    ("add", "user", "root", "account=small"))
"""What sacctmgr is told. Account small has one processor, QOS none no job."""


@pytest.fixture(autouse=True)
def installed() -> None:
    """Slurm of the distribution."""
    try:
        slurm_lab.prepare()
    except Unavailable as error:
        pytest.skip(str(error))


def whys(fleet: SlurmFleet, node: str) -> list[str]:
    """Return why hosts on a node have left the list."""
    return [e["why"] for e in fleet.events("discovery.host_out") if e["host"].startswith(node)]


def nothing_lost(fleet: SlurmFleet) -> bool:
    """True while no worker was lost and no step was done again."""
    return not fleet.lost() and not fleet.events("worker.step_redone")


def test_slurm_preempts_requeues_and_loses_a_node(lab: Lab, tmp_path: Path,
                                                  twin_of: Twin) -> None:
    """A preempted task leaves in its grace with nothing lost, is requeued, and joins again under
    another name. Its agent promises the KillWait of the cluster after SIGTERM. A node without power
    costs the step in flight. The coordinator is a job, and its
    end ends the tasks. A partition that is not there is one sentence, and so are tasks of several
    nodes: nothing is submitted. A poller that Slurm does not accept, because there is no munged,
    ends with one, too."""
    cluster = {"spot": THREE, "cpu": ["h9"]}
    with Slurm(lab, tmp_path / "slurm", cluster) as slurm:
        fleet = SlurmFleet(slurm, tmp_path / "fleet", tasks=["--array=0-2", "--partition=spot"],
                           job=JOB)
        refused = fleet.submit("--array=0-2", "--partition=sopt", "--", "true", check=False)
        assert refused == ("submit: Slurm refuses it: Invalid partition name specified. "
                           "List the partitions: sinfo -s")
        refused = fleet.submit("-N2", "--array=0-2", "--partition=spot", "--", "true", check=False)
        assert refused.startswith("submit: --nodes is 2, but each task of the array is one node")
        assert not slurm.call("squeue", "-h")
        elsewhere = tmp_path / "without-munged.conf"
        elsewhere.write_text(Path(slurm.env["SLURM_CONF"]).read_text().replace("munge.sock", "no"))
        assert "munged needs the cluster's key there (munge -n | unmunge)" in slurm.call(
            sys.executable, "-m", "elastic_trainer.discovery", "slurm", "--once", "--name", "train",
            check=False, cwd=ROOT, SLURM_CONF=str(elsewhere))
        with fleet:
            generation = fleet.wait_for_world(3)
            first = fleet.hosts()
            agent = slurm.options_of_agent("h1")
            assert agent[agent.index("--grace") + 1] == str(slurm_lab.KILL_WAIT_S)
            fleet.wait_for_step(3)
            taken = slurm.preempt("h1")
            generation = fleet.wait_for_world(2, after=generation)
            generation = fleet.wait_for_world(3, after=generation)
            assert slurm.state_of(taken) == "COMPLETED 0:0"
            assert len(set(fleet.hosts()) - set(first)) == 1, fleet.hosts()
            assert nothing_lost(fleet), fleet.story()
            fleet.wait_for_step(fleet.newest_step() + 2)
            lab.power_cut("h3")
            fleet.wait_for_world(2, after=generation)
            assert fleet.finish() == 0
            result = fleet.assert_nothing_lost(twin_of(*JOB), victims=1)
            wait_for("end of all tasks", lambda: not slurm.call("squeue", "-h", "-n", "train"))
            print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 1


@pytest.mark.long
def test_slurm_ends_tasks_at_their_time_limit_and_slurmctld_is_away(
        lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """A second array joins a run. Its task leaves before its time limit, is requeued and comes
    back; so does a task that a user requeues by hand. Nothing happens while slurmctld is down for
    a minute. No step is lost."""
    cluster = {"spot": ["h1", "h2"], "short": ["h3"], "cpu": ["h9"]}
    with Slurm(lab, tmp_path / "slurm", cluster) as slurm, SlurmFleet(
            slurm, tmp_path / "fleet", tasks=["--array=0-1", "--partition=spot"],
            job=LONG) as fleet:
        generation = fleet.wait_for_world(2)
        fleet.submit("--array=0", "--partition=short", "--time=3")
        generation = fleet.wait_for_world(3, after=generation)
        generation = fleet.wait_for_world(2, after=generation, deadline_s=300)
        assert whys(fleet, "h3")[0].startswith(("notice: its time limit is near, taken at",
                                                "Slurm ends its task")), fleet.story()
        generation = fleet.wait_for_world(3, after=generation)
        slurm.stop_controller()
        fleet.wait_for("failures", lambda: [
            e for e in fleet.events("discovery.cloud_unavailable") if e["failures"] == 4],
            deadline_s=300)
        fleet.wait_for_step(fleet.newest_step() + 2)
        assert len(fleet.hosts()) == 3 and len(fleet.events("worker.generation_started")) == (
            generation), fleet.story()
        slurm.start_controller()
        slurm.wait_for_controller()
        slurm.call("scontrol", "requeue", slurm.task_on("h2"))
        generation = fleet.wait_for_world(2, after=generation, deadline_s=300)
        fleet.wait_for_world(3, after=generation, deadline_s=300)
        assert nothing_lost(fleet), fleet.story()
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*LONG), victims=0)
        print(fleet.story())
    assert (result["attempts"], result["steps_redone"]) == (1, 0)


@pytest.mark.long
def test_all_tasks_reach_their_time_limit_at_once(lab: Lab, tmp_path: Path,
                                                  twin_of: Twin) -> None:
    """Slurm starts a task again when it has ended, so no worker waits for others until the limit.
    All leave with a checkpoint, and the next attempt begins there."""
    cluster = {"spot": THREE, "cpu": ["h9"]}
    with Slurm(lab, tmp_path / "slurm", cluster) as slurm, SlurmFleet(
            slurm, tmp_path / "fleet", tasks=["--array=0-2", "--partition=spot", "--time=3"],
            job=MEDIUM) as fleet:
        fleet.wait_for_world(3)
        fleet.wait_for("second attempt", lambda: [
            e for e in fleet.events("worker.generation_started") if e["attempt"] == 2],
            deadline_s=300)
        assert nothing_lost(fleet), fleet.story()
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*MEDIUM), victims=0)
        print(fleet.story())
    assert (result["attempts"] > 1, result["steps_redone"]) == (True, 0)


@pytest.mark.long
def test_slurm_restarts_the_coordinator_when_its_node_is_lost(lab: Lab, tmp_path: Path,
                                                              twin_of: Twin) -> None:
    """Slurm requeues the coordinator's job on another node, and the next attempt resumes. A
    preemption of which Slurm tells the job nothing is seen in squeue, and is a notice, too."""
    cluster = {"spot": THREE, "cpu": ["h8", "h9"]}
    with Slurm(lab, tmp_path / "slurm", cluster, sends_signal=False) as slurm, SlurmFleet(
            slurm, tmp_path / "fleet", tasks=["--array=0-2", "--partition=spot"],
            job=LONG) as fleet:
        generation = fleet.wait_for_world(3)
        fleet.wait_for_step(6)
        slurm.preempt("h1")
        generation = fleet.wait_for_world(2, after=generation)
        assert whys(fleet, "h1")[0].startswith("notice: preempted by another job, taken at")
        fleet.wait_for_world(3, after=generation)
        assert nothing_lost(fleet), fleet.story()
        lab.power_cut(slurm.node_of(fleet.coordinator))
        fleet.wait_for("second attempt", lambda: [
            e for e in fleet.events("state.checkpoint_restored") if e["attempt"] == 2],
            deadline_s=300)
        fleet.wait_for_step(fleet.newest_step() + 2)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*LONG), victims=0)
        print(fleet.story())
    assert (result["attempts"], result["steps_redone"]) == (2, 0)


@pytest.mark.long
def test_slurm_sigterm_alone_is_a_notice_at_any_moment(lab: Lab, tmp_path: Path,
                                                       twin_of: Twin) -> None:
    """All processes of a task get it, as Slurm sends it where it tracks them by cgroups: the batch
    script, the agent, the worker and its loader processes. In an evaluation the worker leaves after
    the step, in its warm-up it ends and nobody misses it. The task is not requeued by us."""
    job = ("--steps", "400", "--step-s", "0.05", "--checkpoint-every", "5", "--iterator",
           "--evaluate", "--loader", "2")
    plan = Plan().add("hold", at="evaluate", step=9).add("hang", at="boot", after=1)
    cluster = {"spot": THREE, "cpu": ["h9"]}
    with Slurm(lab, tmp_path / "slurm", cluster) as slurm, SlurmFleet(
            slurm, tmp_path / "fleet", tasks=["--array=0-2", "--partition=spot"], job=job,
            plan=plan) as fleet:
        generation = fleet.wait_for_world(3)
        fleet.wait_until_fired(1)
        node = fleet.fired()[0]["host"].partition("-")[0]
        task = slurm.task_on(node)
        assert slurm.terminate_all(node) >= 5, fleet.story()
        (fleet.folder / RELEASED).touch()
        generation = fleet.wait_for_world(2, after=generation)
        wait_for("end of the task", lambda: slurm.state_of(task).startswith("COMPLETED"))
        fleet.submit("--array=0", "--partition=spot")
        fleet.wait_until_fired(2)
        host = fleet.fired()[1]["host"]
        booting = host.partition("-")[0]
        slurm.terminate_all(booting)
        ends = fleet.wait_for("its end", lambda: [e["reason"] for e in fleet.events(
            "driver.worker_gone") if e["host"] == host])
        assert ends == ["left"], fleet.story()
        assert len(fleet.events("worker.generation_started")) == generation, fleet.story()
        slurm.wait_until_idle(booting)
        fleet.submit("--array=0", "--partition=spot")
        fleet.wait_for_world(3, after=generation)
        assert nothing_lost(fleet), fleet.story()
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*job), victims=0)
        print(fleet.story())
    assert (result["attempts"], result["steps_redone"]) == (1, 0)


@pytest.mark.long
def test_slurm_preempts_by_qos_and_names_the_limit_of_an_account(lab: Lab, tmp_path: Path,
                                                                twin_of: Twin) -> None:
    """Accounts in a real database. A job of another QOS preempts a task of the run: it leaves with
    nothing lost, is requeued, and joins again. Tasks beyond a limit wait: the event has the limit
    and the command that shows it, and the run trains with the others."""
    try:
        slurm_accounts.prepare(slurm_lab.SYSTEM_PATH)
    except Unavailable as error:
        pytest.skip(str(error))
    cluster = {"spot": THREE, "cpu": ["h9"]}
    with Slurm(lab, tmp_path / "slurm", cluster, accounts=ACCOUNTS) as slurm, SlurmFleet(
            slurm, tmp_path / "fleet", job=MEDIUM, tasks=[
                "--array=0-1", "--partition=spot", "--account=research", "--qos=low"]) as fleet:
        refused = fleet.submit("--array=0", "--partition=spot", "--account=none", check=False)
        assert "Invalid account or account/partition combination" in refused
        generation = fleet.wait_for_world(2)
        fleet.wait_for_step(3)
        node = fleet.hosts()[0].partition("-")[0]
        slurm.call("sbatch", "--partition=spot", "--account=research", "--qos=high", "--exclusive",
                   f"--nodelist={node}", "--output=/dev/null", "--wrap=sleep 5")
        generation = fleet.wait_for_world(1, after=generation)
        assert whys(fleet, node)[0].startswith(("notice: preempted by another job, taken at",
                                                "Slurm ends its task")), fleet.story()
        generation = fleet.wait_for_world(2, after=generation)
        fleet.submit("--array=0-1", "--partition=spot", "--account=small")
        fleet.wait_for_world(3, after=generation)
        says, remedy = refusal(fleet, "AssocGrpCpuLimit")
        assert says == "Slurm does not start 1 of 4 tasks of train: AssocGrpCpuLimit"
        assert "limit of your --account is reached" in remedy and "show associations" in remedy
        fleet.submit("--array=0-1", "--partition=spot", "--account=research", "--qos=none")
        says, remedy = refusal(fleet, "QOSGrpJobsLimit")
        assert "limit of your --qos is reached" in remedy and "sacctmgr show qos" in remedy
        assert nothing_lost(fleet), fleet.story()
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*MEDIUM), victims=0)
        print(fleet.story())
    assert (result["attempts"], result["steps_redone"]) == (1, 0)


def refusal(fleet: SlurmFleet, code: str) -> tuple[str, str]:
    """Wait for the event that tasks do not start for this reason; return its sentence and remedy.
    """
    event = fleet.wait_for(code, lambda: [
        e for e in fleet.events("discovery.launch_refused") if e["code"] == code])[0]
    return event["says"], event["remedy"]
