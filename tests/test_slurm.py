"""Slurm's tasks as hosts: answers that a real squeue of 22.05 gave, and answers that are none."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_trainer.discovery import __main__ as script
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.place_protocol import Notice, PlaceUnavailable
from elastic_trainer.discovery.places.slurm import (
    BETWEEN,
    FIELDS,
    Slurm,
    Task,
    gpus_in,
    how_many,
    instance_of,
    supply_of,
    tasks_in,
)
from elastic_trainer.discovery.poll import Poller

DATA = Path(__file__).resolve().parent / "data" / "slurm" / "stored"
PREEMPTED_AT, ENDS_AT = 1795817004, 1795817024


def recorded(name: str) -> str:
    """Return what commands of Slurm 22.05.8 have printed."""
    return (DATA / f"22.05-{name}.txt").read_text()


def tasks(recording: str, **changes: object) -> list[Task]:
    """Return the tasks of a recorded answer, with these fields in its first line."""
    first, *others = recorded(recording).splitlines()
    words = dict(zip(FIELDS, first.split(BETWEEN), strict=False)) | {
        name.replace("_", "-"): str(value) for name, value in changes.items()}
    return tasks_in("\n".join([BETWEEN.join(words.values()) + BETWEEN, *others]))


def test_slurm_tasks_that_run_are_hosts_with_their_gpus() -> None:
    """Those that wait are none. The name is the node's, the task's and the restart's."""
    found = {it.job: it for it in tasks("gpus")}
    assert {job: (it.state, it.count) for job, it in found.items()} == {
        "1_0": ("RUNNING", 1), "1_1": ("PENDING", 1)}
    task = replace(found["1_0"], gpus=gpus_in(recorded("details"))["1_0"])
    host = instance_of(task, "10.0.0.1", task.started)
    assert (host.id, host.name, host.address) == ("1_0.0", "h1-1_0-0", "10.0.0.1")
    assert (host.slots, host.gpus, host.type, host.state) == (2, 2, "spot", "running")
    assert host.notice is None and host.events == (("time limit", 3600.0),)


def test_slurm_gives_a_task_another_name_after_a_requeue() -> None:
    """It has the same number, and often the same node."""
    before, after = (tasks("preempted", RestartCnt=count)[0] for count in (0, 1))
    assert instance_of(before, "n1", 0.0).name != instance_of(after, "n1", 0.0).name


def test_slurm_preemption_is_a_notice_until_the_end_of_the_grace() -> None:
    """It is for good; its deadline is the end that Slurm has set."""
    (task,) = (it for it in tasks("preempted") if it.preempted)
    host = instance_of(task, "n2", PREEMPTED_AT + 1)
    assert host.notice == Notice("preempted by another job", ENDS_AT)
    assert host.state == "running"


def test_slurm_time_limit_is_a_notice_when_it_is_near() -> None:
    """Until then it is shown. It may be prolonged, so it is not for good. A job without a limit
    ends in a year, and a host without an end has no notice."""
    task = replace(tasks("preempted")[0], preempted=False, ends=ENDS_AT)
    far = instance_of(task, "n2", ENDS_AT - 91)
    near = instance_of(task, "n2", ENDS_AT - 90)
    assert far.notice is None and far.events == (("time limit", 91.0),)
    assert near.notice == Notice("its time limit is near", ENDS_AT, for_good=False)
    unlimited = instance_of(task, "n2", ENDS_AT - 365 * 86400.0)
    assert unlimited.notice is None and unlimited.events == ()


@pytest.mark.parametrize("answer", [
    "slurm_load_jobs error: Unable to contact slurm controller", "1|0|RUNNING",
    "1|0|RUNNING|x|h1|spot||N/A|N/A|N/A|None|", "1|0|is odd|0|h1|spot||N/A|N/A|N/A|None|",
    "1|0|RUNNING|0|h1|spot||2026-11-27T10:00:00|N/A|N/A|None|"])
def test_slurm_answer_of_an_unknown_form_is_refused(answer: str) -> None:
    """Unknown is never empty."""
    with pytest.raises(PlaceUnavailable, match="form that is unknown"):
        tasks_in(answer)


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"])
def test_slurm_jobs_that_have_ended_are_no_hosts(state: str) -> None:
    """A task that is being killed is no host any more, and has the number of its next start
    already."""
    assert len(tasks("gpus", State=state)) == len(tasks("gpus")) - 1


@pytest.mark.parametrize("state", ["SUSPENDED", "CONFIGURING", "STOPPED"])
def test_slurm_task_that_does_not_run_is_out_with_its_state(state: str) -> None:
    """A suspended one comes back under its name."""
    host = instance_of(tasks("preempted", State=state)[0], "n1", 0.0)
    assert (host.state, host.says) == (state.lower(), f"Slurm reports {state}")


@pytest.mark.parametrize(("expression", "count"), [
    ("0-3", 4), ("7", 1), ("0-3,7,10-20:5", 8), ("0-9%2", 10), ("1,3,...", 2), ("", 1)])
def test_slurm_counts_the_tasks_of_an_expression(expression: str, count: int) -> None:
    """Tasks of an array that wait together are one line of squeue's."""
    assert how_many(expression) == count


@pytest.mark.parametrize(("detail", "gpus"), [
    ("GRES=gpu:4(IDX:0-3)", 4), ("GRES=gpu:a100:8(IDX:0-7)", 8), ("GRES=shard:2", 0), ("GRES=", 0),
    ("GRES=gpu:a:1(IDX:0),gpu:b:2(IDX:1-2)", 3), ("TresPerNode=gres:gpu:4 JOB_GRES=gpu:4", 0)])
def test_slurm_gpus_of_a_task(detail: str, gpus: int) -> None:
    """A task's own, not what it has asked for."""
    line = f"JobId=8 ArrayJobId=1 ArrayTaskId=1 NodeList=n2 Nodes=n2 CPU_IDs=0 Mem=0 {detail} X=y"
    assert gpus_in(line) == {"1_1": gpus}
    assert gpus_in(line.replace("ArrayJobId=1 ArrayTaskId=1 ", "")) == {"8": gpus}
    assert tasks("preempted", tres_alloc="cpu=8,gres/gpu=2,gres/gpu:a100=2")[0].gpus == 2


@pytest.mark.parametrize(("reason", "remedy"), [
    ("Resources", "None is needed"), ("PartitionTimeLimit", "--time"),
    ("PartitionConfig", "sinfo -o"), ("InvalidAccount", "sacctmgr"),
    ("AssocGrpCpuLimit", "limit of your --account"), ("AssocGrpGRES", "show associations"),
    ("QOSMaxJobsPerUserLimit", "another --qos"), ("JobHeldUser", "scontrol release 8"),
    ("launch failed requeued held", "scontrol release 8"),
    ("ReqNodeNotAvail, UnavailableNodes:n2", "sinfo -R"), ("SomethingNew", "scontrol show job 8")])
def test_slurm_queue_that_does_not_start_has_its_reason_and_a_remedy(reason: str,
                                                                    remedy: str) -> None:
    """The event log and `elastic-trainer hosts` have them."""
    supply = supply_of(tasks("waiting", Reason=reason), "train")
    assert (supply.there, supply.wanted) == (0, 4)
    assert supply.refusal
    assert supply.refusal.says == f"Slurm does not start 4 of 4 tasks of train: {reason}"
    assert remedy in supply.refusal.remedy
    assert " " not in supply.refusal.code


@pytest.mark.parametrize("reason", ["None", "BeginTime", "JobArrayTaskLimit"])
def test_slurm_tasks_that_start_by_themselves_are_no_refusal(reason: str) -> None:
    """As a requeued task waits until its credential has expired."""
    assert supply_of(tasks("waiting", Reason=reason), "train").refusal is None


# --- with a program in squeue's place -------------------------------------------------------------

@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what lets the program squeue print a text; sinfo knows two nodes."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in (
            ("squeue", f'echo "$@" > {tmp_path}/asked; env > {tmp_path}/env; . {tmp_path}/answer'),
            ("sinfo", "echo 'h1 10.0.0.1'; echo 'h2 10.0.0.2'"),
            ("scontrol", f"cat {DATA}/22.05-details.txt")):
        (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")

    def answers(script: str) -> None:
        (tmp_path / "answer").write_text(script)

    return answers


def now(name: str) -> str:
    """Return a script that prints a recorded answer, with the ends of its jobs in an hour."""
    lines = [line.split(BETWEEN) for line in recorded(name).splitlines()]
    for words in lines:
        words[FIELDS.index("EndTime")] = str(int(time.time()) + 3600)
    return "\n".join(f"echo '{BETWEEN.join(words)}'" for words in lines)


DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


def test_slurm_last_good_list_holds_while_slurmctld_is_down(
        squeue: Callable[[str], None], tmp_path: Path) -> None:
    """The failure is an event with Slurm's own words."""
    times = iter(range(0, 10**6, 100))
    poller = Poller(Slurm("train"), tmp_path / "hosts", Policy(settle_s=0), patience_s=30,
                    events_file=tmp_path / "events.jsonl", clock=lambda: next(times))
    with ThreadPoolExecutor(1) as pool:
        squeue(now("gpus"))
        poller.poll(pool)
        assert (tmp_path / "hosts").read_text() == "h1-1_0-0:2 10.0.0.1\n"
        squeue(DOWN)
        poller.poll(pool)
    assert (tmp_path / "hosts").read_text() == "h1-1_0-0:2 10.0.0.1\n"
    assert "Unable to contact slurm controller" in (tmp_path / "events.jsonl").read_text()


def test_slurm_array_that_does_not_exist_is_an_error_at_start(
        squeue: Callable[[str], None], capfd: pytest.CaptureFixture[str]) -> None:
    """With the command that submits one."""
    squeue("")
    assert script.main(["slurm", "--once", "--name", "trian"]) == 1
    assert "no job of yours that waits or runs under the name trian. Submit one first: sbatch" in (
        capfd.readouterr().err)
    assert script.main(["slurm", "--once", "--name", "a,b"]) == 1
    assert "squeue takes it for several names" in capfd.readouterr().err
    squeue(now("gpus"))
    assert script.main(["slurm", "--once", "--name", "train", "--lifecycle", "any"]) == 0
    assert capfd.readouterr().out == "h1-1_0-0:2 10.0.0.1\n"


def test_slurm_is_asked_for_this_users_jobs_of_the_name_only(
        squeue: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other people's jobs cost no memory, and any user may give a job the run's name. What the user
    has set for squeue filters nothing away."""
    for name, value in (("SQUEUE_STATES", "PENDING"), ("SQUEUE_PARTITION", "other")):
        monkeypatch.setenv(name, value)
    squeue(now("gpus"))
    assert len(Slurm("train").instances()) == 1
    asked = (tmp_path / "asked").read_text().split()
    assert {f"--user={os.getuid()}", "--name=train", "--all", "--noheader"} < set(asked)
    assert not any("json" in word for word in asked)
    assert "SQUEUE_" not in (tmp_path / "env").read_text()


@pytest.mark.parametrize(("says", "is_refused"), [
    ("squeue: error: Munge encode failed: Failed to access \"/run/munge/munge.socket.2\": No such "
     "file or directory (Did you start munged?)", True),
    ("slurm_load_jobs error: Zero Bytes were transmitted or received", True),
    ("squeue: fatal: Unable to process configuration file", True),
    ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", False)])
def test_slurm_that_does_not_accept_this_process_is_an_error_at_start(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
        says: str, is_refused: bool) -> None:
    """With the words that squeue prints (recorded with 22.05). A slurmctld that is away is none:
    the poller asks again, and its event has the words."""
    (tmp_path / "says").write_text(says)
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ncat {tmp_path}/says >&2; exit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(PlaceUnavailable) as raised:
        Slurm("train").instances()
    assert says in str(raised.value)
    assert script.main(["slurm", "--once", "--name", "train"]) == 1
    assert ("munged needs the cluster's key there" in capfd.readouterr().err) == is_refused


def test_slurm_needs_squeue(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
                            ) -> None:
    """One sentence with the remedy."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert script.main(["slurm", "--once", "--name", "train"]) == 1
    assert "This machine has no squeue. Run this command where" in capfd.readouterr().err
