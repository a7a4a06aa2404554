"""Slurm: the tasks of all job arrays that have one job name, one host a task.

squeue, sinfo → here → poll

What always holds:
1. An answer with errors is no answer. While slurmctld does not answer, `squeue --json` of 22.05
   exits with 0, lists no job, and has an error (recorded: tests/data/slurm).
2. A host's name has the node, the task and its number of restarts, so it is one incarnation's.
   Slurm starts a requeued task again under the same number, and often on the same node.
3. A task that is preempted, or whose time limit is near, is under notice. Its batch script gets a
   signal as well (deploy/slurm/train.sbatch); the earlier one counts.
4. Only jobs of this process's own user count: any user may give a job any name.

Source: Slurm 22.05 writes a number as 7 and a state as "RUNNING"; 23.02 and later may write
{"set": true, "infinite": false, "number": 7} and ["RUNNING", "COMPLETING"].
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.discovery.place_protocol import (
    Instance,
    Notice,
    PlaceUnavailable,
    Refusal,
    Supply,
)

ANSWER_S = 30.0
"""The limit of one command. Slurm's own, MessageTimeout, is 10 s, and it tries more than once."""
LEAVE_S = 90.0
"""How long before its time limit a task leaves: the time of `--signal` in train.sbatch."""
UNLIMITED_S = 300 * 86400.0
"""The end of a job without a time limit is a year away."""
HELD, RUNNING = "PENDING", "RUNNING"
PAUSED = ("CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING")
"""The states of a task that has a node and does not run."""
ENDING = "COMPLETING"
"""Its processes are being killed. A requeued one has the number of its next start already."""
STARTS_BY_ITSELF = ("", "None", "BeginTime", "Cleaning", "JobArrayTaskLimit")
"""Reasons that end without anybody: a requeued task waits two minutes (cred_expire), and
`--array=0-9%4` starts four at a time."""
GPUS = re.compile(r"\bgpu(?::[^:,(]+)?:([0-9]+)")
REMEDIES = (
    (("Resources", "Priority"), "None is needed: they start when nodes are free. `squeue --start "
                                "--name {name}` prints when."),
    (("PartitionTimeLimit",), "Submit with a --time within the partition's: sinfo -o '%P %l'"),
    (("PartitionNodeLimit", "PartitionConfig", "BadConstraints"),
     "Ask for what the partition has (sinfo -o '%P %D %c %m %G'), or for another --partition."),
    (("PartitionDown", "PartitionInactive"), "Submit to a partition that is up: sinfo -s"),
    (("ReqNodeNotAvail", "NodeDown", "NodesDown"),
     "`sinfo -R` prints why nodes are down. Submit without --nodelist, or ask the administrators."),
    (("JobHeldUser", "JobHoldUser"), "Release them: scontrol release {job}"),
    (("JobHeldAdmin", "launch", "JobLaunchFailure"),
     "Read the tasks' output, and `scontrol release {job}`; only administrators end their hold."),
    (("InvalidAccount", "InvalidQOS"), "Submit with an --account and a --qos of yours: sacctmgr "
                                       "show associations user=$USER format=account,partition,qos"),
    (("Assoc", "QOS", "MaxSubmit"),
     "Wait until your other jobs end, or ask for less: sacctmgr show qos"),
    (("Dependency",), "Submit without --dependency: scontrol show job {job}"),
    (("Reservation",), "Submit without --reservation, or within it: scontrol show reservation"),
    (("Licenses",), "Submit without --licenses, or wait: scontrol show licenses"),
)
"""The beginning of a reason → what to do."""
NOT_ACCEPTED = re.compile(r"authentication|credential|munge|Zero Bytes|permission denied|"
                          r"configuration file", re.I)
"""What squeue prints where Slurm does not accept this process. "Zero Bytes were transmitted or
received" is the answer to a credential that slurmctld cannot read (22.05)."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One job as squeue lists it: a task of an array, or the tasks of one that wait together."""

    job: str
    """A_T, or the array's number where its tasks wait together."""
    count: int
    state: str
    restarts: int
    node: str
    partition: str
    gpus: int
    started: float
    ends: float
    preempted: bool
    reason: str
    explained: str
    """What Slurm adds to the reason; "" if nothing."""


def number(value: Any) -> float:
    """Return a number of either form; 0 where none is set."""
    if isinstance(value, dict):
        value = value["number"] if value.get("set") and not value.get("infinite") else 0
    return float(value or 0)


def tasks_in(answer: str, name: str, user: int) -> list[Task]:
    """Return the jobs of this name and user that have not ended. Raises PlaceUnavailable."""
    def of_interest(found: dict[str, Any]) -> dict[str, Any] | None:
        # 22.05 lists the whole cluster's, in 5 KB a job; the others are dropped while it is parsed.
        is_other = "job_id" in found and (found.get("name"), number(found.get("user_id"))) != (
            name, user)
        return None if is_other else found

    try:
        parsed = json.loads(answer, object_hook=of_interest)
        if errors := parsed.get("errors"):
            raise PlaceUnavailable(f"squeue reports an error: {_said(errors[0])}")
        return [task for job in parsed["jobs"] if job and (task := _task(job))]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PlaceUnavailable(f"squeue --json answers in a form that is unknown: {error!r}. It "
                               f"begins: {answer[:200]!r}") from error


def _said(error: Any) -> str:
    texts = (error.get("description"), error.get("error")) if isinstance(error, dict) else (error,)
    return ": ".join(str(text) for text in texts if text)


def _task(job: dict[str, Any]) -> Task | None:
    """Read one job; None: it has ended."""
    states = job["job_state"] if isinstance(job["job_state"], list) else [job["job_state"]]
    known = [state for state in (*PAUSED, RUNNING, HELD) if state in states]
    if ENDING in states or not known:
        return None
    array, waiting = int(number(job["array_job_id"])), str(job.get("array_task_string") or "")
    task = job["array_task_id"]
    has_number = task.get("set") if isinstance(task, dict) else task is not None
    job_id = str(int(number(job["job_id"])))
    return Task(
        job=f"{array}_{number(task):.0f}" if array and has_number else job_id,
        count=how_many(waiting) if waiting else 1, state=known[0],
        restarts=int(number(job["restart_cnt"])), node=str(job["nodes"] or ""),
        partition=str(job["partition"]), gpus=gpus_in(job), started=number(job["start_time"]),
        ends=number(job["end_time"]), preempted=number(job["preempt_time"]) > 0,
        reason=str(job["state_reason"]), explained=str(job.get("state_description") or ""))


def how_many(tasks: str) -> int:
    """Return the number of tasks in an expression of Slurm's: "0-3,7,10-20:5%4" has 8."""
    count = 0
    for part in tasks.partition("%")[0].split(","):
        if found := re.fullmatch(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?", part.strip()):
            first, last = int(found[1]), int(found[2] or found[1])
            count += (last - first) // int(found[3] or 1) + 1
    return max(1, count)


def gpus_in(job: dict[str, Any]) -> int:
    """Return the GPUs of a job that runs: gres_detail has an entry a node, "gpu:a100:4(IDX:0-3)".
    """
    detail = job.get("gres_detail") or []
    found = sum(int(count) for node in detail for count in GPUS.findall(str(node)))
    allocated = re.search(r"\bgres/gpu=([0-9]+)", str(job.get("tres_alloc_str") or ""))
    return found or (int(allocated[1]) if allocated else 0)


def instance_of(task: Task, address: str, now: float, *, cpu_slots: int = 1,
                leave_s: float = LEAVE_S) -> Instance:
    """Return the host of a task that has a node. `now` is in seconds since 1970."""
    left_s = task.ends - now
    is_limited, notice = 0 < task.ends and left_s < UNLIMITED_S, None
    if task.preempted:
        notice = Notice("preempted by another job", task.ends or None)
    elif is_limited and left_s <= leave_s:
        notice = Notice("its time limit is near", task.ends, for_good=False)
    is_up = task.state == RUNNING
    return Instance(
        id=f"{task.job}.{task.restarts}", name=f"{task.node}-{task.job}-{task.restarts}",
        type=task.partition, launched=task.started, state="running" if is_up else
        task.state.lower(), says="" if is_up else f"Slurm reports {task.state}", notice=notice,
        events=(("time limit", left_s),) if is_limited else (), address=address,
        slots=task.gpus or cpu_slots, gpus=task.gpus)


def supply_of(tasks: Sequence[Task], name: str) -> Supply:
    """Return how many tasks have a node, of those that have not ended, and why the others wait."""
    waiting = [task for task in tasks if task.state == HELD]
    there = sum(task.count for task in tasks if task.state != HELD)
    wanted = there + sum(task.count for task in waiting)
    held = [task for task in waiting if task.reason not in STARTS_BY_ITSELF]
    if not held:
        return Supply(there=there, wanted=wanted)
    counts = Counter[str]()
    for task in held:
        counts[task.reason] += task.count
    reason = max(sorted(counts), key=lambda known: counts[known])
    first = next(task for task in held if task.reason == reason)
    says = f"Slurm does not start {counts[reason]} of {wanted} tasks of {name}: {reason}"
    if first.explained and first.explained != reason:
        says += f" ({first.explained})"
    remedies = [remedy for beginnings, remedy in REMEDIES if reason.startswith(beginnings)]
    remedy = (remedies or ["`scontrol show job {job}` prints what it asks for."])[0]
    return Supply(there=there, wanted=wanted, refusal=Refusal(
        code=reason.partition(" ")[0].rstrip(","), says=says,
        remedy=remedy.format(name=name, job=first.job.partition("_")[0])))


class Slurm:
    """The tasks that one user has submitted under one job name."""

    def __init__(self, name: str, *, cpu_slots: int = 1, leave_s: float = LEAVE_S):
        self.name, self.cpu_slots, self.leave_s = name, cpu_slots, leave_s
        self._tasks: list[Task] = []
        self._addresses: dict[str, str] = {}
        """Task and restart → the address of its node."""

    def instances(self) -> list[Instance]:
        """Return the hosts of all tasks that have a node. Raises PlaceUnavailable."""
        self._tasks = self.tasks()
        placed = {f"{task.job}.{task.restarts}": task for task in self._tasks
                  if task.state != HELD and task.node}
        new = {identity: task.node for identity, task in placed.items()
               if identity not in self._addresses}
        if new:
            addresses = addresses_of(set(new.values()))
            self._addresses |= {identity: addresses[node] for identity, node in new.items()}
        self._addresses = {identity: self._addresses[identity] for identity in placed}
        return [instance_of(task, self._addresses[identity], time.time(), cpu_slots=self.cpu_slots,
                            leave_s=self.leave_s) for identity, task in placed.items()]

    def tasks(self) -> list[Task]:
        """Return the tasks that have not ended. Raises PlaceUnavailable."""
        # The whole list of an array's tasks, which is else cut off after 64 characters.
        answer = _run("squeue", "--json", SLURM_BITSTR_LEN="0")
        try:
            return tasks_in(answer, self.name, os.getuid())
        except PlaceUnavailable:
            # With --json squeue 22.05 reports an "Unspecified error"; without it squeue ends with 1
            # and prints the cause.
            _run("squeue", "--noheader", f"--name={self.name}")
            raise

    def supply(self) -> Supply | None:
        """Return the supply as of the last answer."""
        return supply_of(self._tasks, self.name)


def addresses_of(nodes: set[str]) -> dict[str, str]:
    """Return the nodes' addresses (NodeAddr). Raises PlaceUnavailable."""
    lines = _run("sinfo", "--noheader", "--Node", f"--nodes={','.join(sorted(nodes))}",
                 "--Format=NodeList:250,NodeAddr:250").splitlines()
    found = {words[0]: words[1] for line in lines if len(words := line.split()) == 2}
    if missing := nodes - found.keys():
        raise PlaceUnavailable(f"sinfo has no address of the nodes {', '.join(sorted(missing))}.")
    return found


def _run(*command: str, **variables: str) -> str:
    """Return what a command of Slurm's printed. Raises PlaceUnavailable."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S,
                              errors="replace", env=os.environ | variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlaceUnavailable(f"{command[0]} gives no answer: {error}") from error
    if done.returncode:
        raise PlaceUnavailable(f"{command[0]} ended with exit code {done.returncode}: "
                               f"{' '.join(done.stderr.split())[-300:]}")
    return done.stdout


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose the tasks."""
    add = parser.add_argument
    add("--name", required=True, help="the job name of the arrays (sbatch --job-name)")
    add("--cpu-slots", type=int, default=1, help="slots of a task without GPUs (%(default)s)")
    add("--leave-before", type=float, default=LEAVE_S, metavar="SECONDS",
        help="leave this long before the time limit of a task (%(default)s)")


def place_of(options: argparse.Namespace) -> Slurm:
    """Return the place that these options choose.

    Raises ValueError where there is no Slurm, or it does not accept this process, or it has no job
    of this name.
    """
    if not shutil.which("squeue"):
        raise ValueError("This machine has no squeue. Run this command where Slurm's commands are: "
                         "on a login node, or in a job.")
    place = Slurm(options.name, cpu_slots=options.cpu_slots, leave_s=options.leave_before)
    try:
        if not place.tasks():
            raise ValueError(f"Slurm has no job of yours that waits or runs under the name "
                             f"{options.name}. Submit one first: sbatch --job-name={options.name} "
                             f"--array=0-3 deploy/slurm/train.sbatch")
    except PlaceUnavailable as error:
        if NOT_ACCEPTED.search(str(error)):
            raise ValueError(
                f"{str(error).rstrip('.')}. Run this command where `squeue` works: munged needs "
                f"the cluster's key there (munge -n | unmunge), SLURM_CONF its slurm.conf, and "
                f"SLURM_JWT, if it is set, a token that has not expired.") from error
        # The poller asks again.
    return place
