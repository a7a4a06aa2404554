"""Slurm's tasks as hosts: answers that a real squeue of 22.05 gave, the same in the later forms,
and answers that are none."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.discovery import __main__ as script
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.place_protocol import Notice, PlaceUnavailable
from elastic_trainer.discovery.places.slurm import (
    Slurm,
    Task,
    gpus_in,
    how_many,
    instance_of,
    number,
    supply_of,
    tasks_in,
)
from elastic_trainer.discovery.poll import Poller

DATA = Path(__file__).resolve().parent / "data" / "slurm"
ROOT_USER = 0
"""The user of the recorded jobs."""
PREEMPTED_AT, ENDS_AT = 1795802116, 1795802136
Form = Callable[[dict[str, Any]], dict[str, Any]]


def recorded(name: str) -> dict[str, Any]:
    """Return an answer of squeue 22.05.8."""
    answer: dict[str, Any] = json.loads((DATA / f"22.05-{name}.json").read_text())
    return answer


def as_22_05(job: dict[str, Any]) -> dict[str, Any]:
    """22.05: plain numbers, null where none is set."""
    return job


def as_23_02(job: dict[str, Any]) -> dict[str, Any]:
    """23.02 (data_parser v0.0.39): counts with `set`, plain times, one state."""
    return job | {name: optional(job[name]) for name in ("array_job_id", "array_task_id")}


def as_23_11(job: dict[str, Any]) -> dict[str, Any]:
    """23.11 and later: times with `set`, too, and a list of states."""
    times = {name: optional(job[name]) for name in ("start_time", "end_time", "preempt_time")}
    return as_23_02(job) | times | {"job_state": [job["job_state"]]}


def optional(value: int | None) -> dict[str, Any]:
    return {"set": value is not None, "infinite": False, "number": value or 0}


FORMS = pytest.mark.parametrize("form", [as_22_05, as_23_02, as_23_11])


def tasks(recording: str, form: Form = as_22_05, **changes: Any) -> list[Task]:
    """Return the tasks of a recorded answer, in this form, with these fields of its first job."""
    answer = recorded(recording)
    answer["jobs"] = [form(job) for job in answer["jobs"]]
    answer["jobs"][0] |= changes
    return tasks_in(json.dumps(answer), "train", ROOT_USER)


@FORMS
def test_slurm_tasks_that_run_are_hosts_with_their_gpus(form: Form) -> None:
    """Those that wait are none. The name is the node's, the task's and the restart's."""
    found = tasks("gpus", form)
    assert [(it.job, it.state, it.count) for it in found] == [("1_0", "RUNNING", 1),
                                                              ("1_1", "PENDING", 1)]
    host = instance_of(found[0], "10.0.0.1", found[0].started)
    assert (host.id, host.name, host.address) == ("1_0.0", "n1-1_0-0", "10.0.0.1")
    assert (host.slots, host.gpus, host.type, host.state) == (2, 2, "spot", "running")
    assert host.notice is None and host.events == (("time limit", 3600.0),)


def test_slurm_gives_a_task_another_name_after_a_requeue() -> None:
    """It has the same number, and often the same node."""
    before, after = (tasks("gpus", restart_cnt=count)[0] for count in (0, 1))
    assert instance_of(before, "n1", 0.0).name != instance_of(after, "n1", 0.0).name


@FORMS
def test_slurm_preemption_is_a_notice_until_the_end_of_the_grace(form: Form) -> None:
    """It is for good; its deadline is the end that Slurm has set."""
    host = instance_of(tasks("preempted", form)[0], "n2", PREEMPTED_AT + 1)
    assert host.notice == Notice("preempted by another job", ENDS_AT)
    assert host.state == "running"


@FORMS
def test_slurm_time_limit_is_a_notice_when_it_is_near(form: Form) -> None:
    """Until then it is shown. It may be prolonged, so it is not for good. A job without a limit
    ends in a year, and a host without an end has no notice."""
    task = tasks("preempted", form, preempt_time=form({**recorded("preempted")["jobs"][0],
                                                       "preempt_time": 0})["preempt_time"])[0]
    far = instance_of(task, "n2", ENDS_AT - 91)
    near = instance_of(task, "n2", ENDS_AT - 90)
    assert far.notice is None and far.events == (("time limit", 91.0),)
    assert near.notice == Notice("its time limit is near", ENDS_AT, for_good=False)
    unlimited = instance_of(task, "n2", ENDS_AT - 365 * 86400.0)
    assert unlimited.notice is None and unlimited.events == ()


def test_slurm_answer_with_an_error_is_no_empty_list() -> None:
    """squeue 22.05 exits with 0 and lists no job while slurmctld is down."""
    with pytest.raises(PlaceUnavailable, match="Failed while looking for jobs"):
        tasks_in(json.dumps(recorded("down")), "train", ROOT_USER)


@pytest.mark.parametrize("answer", ["", "slurm_load_jobs error", "[]", "{}", '{"jobs": 7}',
                                    '{"jobs": [{"job_id": 1, "name": "train", "user_id": 0}]}'])
def test_slurm_answer_of_an_unknown_form_is_refused(answer: str) -> None:
    """Unknown is never empty."""
    with pytest.raises(PlaceUnavailable, match="form that is unknown"):
        tasks_in(answer, "train", ROOT_USER)


@pytest.mark.parametrize("changes", [
    {"name": "other"}, {"user_id": 1000}, {"job_state": "COMPLETING"}, {"job_state": "CANCELLED"},
    {"job_state": ["RUNNING", "COMPLETING"]}, {"job_state": "TIMEOUT"}])
def test_slurm_jobs_of_others_and_ended_ones_are_no_hosts(changes: dict[str, Any]) -> None:
    """Any user may give a job the run's name. A task that is being killed is no host any more, and
    has the number of its next start already."""
    assert [task.job for task in tasks("gpus", **changes)] == ["1_1"]


@pytest.mark.parametrize("state", ["SUSPENDED", "CONFIGURING", ["RUNNING", "SUSPENDED"]])
def test_slurm_task_that_does_not_run_is_out_with_its_state(state: Any) -> None:
    """A suspended one comes back under its name."""
    host = instance_of(tasks("gpus", job_state=state)[0], "n1", 0.0)
    word = state if isinstance(state, str) else state[-1]
    assert (host.state, host.says) == (word.lower(), f"Slurm reports {word}")


@pytest.mark.parametrize(("expression", "count"), [
    ("0-3", 4), ("7", 1), ("0-3,7,10-20:5", 8), ("0-9%2", 10), ("1,3,...", 2), ("", 1)])
def test_slurm_counts_the_tasks_of_an_expression(expression: str, count: int) -> None:
    """Tasks of an array that wait together are one line of squeue's."""
    assert how_many(expression) == count


@pytest.mark.parametrize(("job", "gpus"), [
    ({"gres_detail": ["gpu:4(IDX:0-3)"]}, 4), ({"gres_detail": ["gpu:a100:8(IDX:0-7)"]}, 8),
    ({"gres_detail": ["gpu:a:1(IDX:0),gpu:b:2(IDX:1-2)"]}, 3), ({"gres_detail": ["shard:2"]}, 0),
    ({"gres_detail": [], "tres_alloc_str": "cpu=8,node=1,gres/gpu=2,gres/gpu:a100=2"}, 2),
    ({"gres_detail": ["fpga:1"], "tres_alloc_str": "cpu=8"}, 0), ({}, 0)])
def test_slurm_gpus_of_a_task(job: dict[str, Any], gpus: int) -> None:
    """A task's own, not the node's."""
    assert gpus_in(job) == gpus


def test_slurm_numbers_in_each_form() -> None:
    """None, 0 and what is not set are 0, and so is infinity."""
    assert [number(it) for it in (7, None, 0, {"set": True, "infinite": False, "number": 7},
                                  {"set": False, "infinite": False, "number": 7},
                                  {"set": True, "infinite": True, "number": 7})] == [
        7, 0, 0, 7, 0, 0]


@pytest.mark.parametrize(("reason", "remedy"), [
    ("Resources", "None is needed"), ("PartitionTimeLimit", "--time"),
    ("PartitionConfig", "sinfo -o"), ("InvalidAccount", "sacctmgr"), ("AssocGrpGRES", "other jobs"),
    ("QOSMaxJobsPerUserLimit", "other jobs"), ("JobHeldUser", "scontrol release 5"),
    ("launch failed requeued held", "scontrol release 5"),
    ("ReqNodeNotAvail, UnavailableNodes:n2", "sinfo -R"), ("SomethingNew", "scontrol show job 5")])
def test_slurm_queue_that_does_not_start_has_its_reason_and_a_remedy(reason: str,
                                                                    remedy: str) -> None:
    """The event log and `elastic-trainer hosts` have them."""
    supply = supply_of(tasks("waiting", state_reason=reason), "train")
    assert (supply.there, supply.wanted) == (0, 4)
    assert supply.refusal
    assert supply.refusal.says == f"Slurm does not start 4 of 4 tasks of train: {reason}"
    assert remedy in supply.refusal.remedy
    assert " " not in supply.refusal.code


@pytest.mark.parametrize("reason", ["None", "BeginTime", "JobArrayTaskLimit"])
def test_slurm_tasks_that_start_by_themselves_are_no_refusal(reason: str) -> None:
    """As a requeued task waits until its credential has expired."""
    assert supply_of(tasks("waiting", state_reason=reason), "train").refusal is None


# --- with a program in squeue's place -------------------------------------------------------------

@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what lets the program squeue print a text; sinfo knows two nodes."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in (("squeue", f"cat {tmp_path}/answer"),
                       ("sinfo", "echo 'n1 10.0.0.1'; echo 'n2 10.0.0.2'")):
        (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")

    def answers(text: str) -> None:
        (tmp_path / "answer").write_text(text)

    return answers


def of_this_user(name: str) -> str:
    """Return a recorded answer as if this user had submitted its jobs, which end in an hour."""
    answer = recorded(name)
    own = {"user_id": os.getuid(), "end_time": int(time.time()) + 3600}
    answer["jobs"] = [job | own for job in answer["jobs"]]
    return json.dumps(answer)


def test_slurm_last_good_list_holds_while_slurmctld_is_down(
        squeue: Callable[[str], None], tmp_path: Path) -> None:
    """The failure is an event with Slurm's own words."""
    times = iter(range(0, 10**6, 100))
    poller = Poller(Slurm("train"), tmp_path / "hosts", Policy(settle_s=0), patience_s=30,
                    events_file=tmp_path / "events.jsonl", clock=lambda: next(times))
    with ThreadPoolExecutor(1) as pool:
        squeue(of_this_user("gpus"))
        poller.poll(pool)
        assert (tmp_path / "hosts").read_text() == "n1-1_0-0:2 10.0.0.1\n"
        squeue(json.dumps(recorded("down")))
        poller.poll(pool)
    assert (tmp_path / "hosts").read_text() == "n1-1_0-0:2 10.0.0.1\n"
    assert "Failed while looking for jobs" in (tmp_path / "events.jsonl").read_text()


def test_slurm_array_that_does_not_exist_is_an_error_at_start(
        squeue: Callable[[str], None], capfd: pytest.CaptureFixture[str]) -> None:
    """With the command that submits one."""
    squeue(of_this_user("gpus"))
    assert script.main(["slurm", "--once", "--name", "trian"]) == 1
    assert "no job of yours that waits or runs under the name trian. Submit one first: sbatch" in (
        capfd.readouterr().err)
    assert script.main(["slurm", "--once", "--name", "train", "--lifecycle", "any"]) == 0
    assert capfd.readouterr().out == "n1-1_0-0:2 10.0.0.1\n"


@pytest.mark.parametrize(("says", "is_refused"), [
    ("squeue: error: Munge encode failed: Failed to access \"/run/munge/munge.socket.2\": No such "
     "file or directory (Did you start munged?)", True),
    ("slurm_load_jobs error: Zero Bytes were transmitted or received", True),
    ("squeue: fatal: Unable to process configuration file", True),
    ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", False)])
def test_slurm_that_does_not_accept_this_process_is_an_error_at_start(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
        says: str, is_refused: bool) -> None:
    """With the words that squeue prints without --json (recorded with 22.05). A slurmctld that is
    away is no error: the poller asks again, and its event has the words."""
    (tmp_path / "down").write_text(json.dumps(recorded("down")))
    (tmp_path / "says").write_text(says)
    (tmp_path / "squeue").write_text(f'#!/bin/sh\n[ "$1" = --json ] && exec cat {tmp_path}/down\n'
                                     f"cat {tmp_path}/says >&2; exit 1\n")
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
