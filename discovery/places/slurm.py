"""Slurm: the tasks of all job arrays that have one job name, one host a task.

squeue, scontrol (GPUs), sinfo (addresses) → here → poll

What always holds:
1. A command that fails, and a line in another form, are no answer.
2. A host's name has the node, the task and its number of restarts, so it is one incarnation's.
   Slurm starts a requeued task again under the same number, and often on the same node.
3. A task that is preempted, or whose time limit is near, is under notice. Its batch script gets a
   signal as well (deploy/slurm/train.sbatch); the earlier one counts.
4. Only jobs of this process's own user count: any user may give a job any name. Slurm is asked for
   no others: `squeue --json` of 22.05 lists all jobs, and 10,000 of them took 63 MiB here.
5. GPUs and addresses of a task are asked once.

Source: the manual of squeue. `--Format=FIELD:SUFFIX` prints a field of any length, and
SLURM_TIME_FORMAT=%s prints seconds since 1970. SQUEUE_* variables of the user would filter.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
STARTS_BY_ITSELF = ("", "None", "BeginTime", "Cleaning", "JobArrayTaskLimit")
"""Reasons that end without anybody: a requeued task waits two minutes (cred_expire), and
`--array=0-9%4` starts four at a time."""
GPUS = re.compile(r"\bgpu(?::[^:,(]+)?:([0-9]+)")
DETAIL = re.compile(r"\bGRES=(\S+)")
"""In `scontrol --details show job`: what a task has on each of its nodes, e.g. gpu:4(IDX:0-3)."""
FIELDS = ("ArrayJobID", "ArrayTaskID", "State", "RestartCnt", "NodeList", "Partition", "tres-alloc",
          "StartTime", "EndTime", "PreemptTime", "Reason")
BETWEEN = "|"
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
    (("Assoc",), "The limit of your --account is reached. Wait until its other jobs end, or ask "
                 "for less: sacctmgr show associations format=account,grptres,maxtres,maxjobs"),
    (("QOS", "MaxSubmit"), "The limit of your --qos is reached. Wait until its other jobs end, or "
                           "use another --qos: sacctmgr show qos format=name,grptres,maxtrespu,"
                           "maxjobspu"),
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
    """By its allocation, which has them only where the administrators count GPUs."""
    started: float
    ends: float
    preempted: bool
    reason: str


def tasks_in(answer: str) -> list[Task]:
    """Return the jobs in squeue's lines that have not ended. Raises PlaceUnavailable."""
    try:
        return [task for line in answer.splitlines() if (task := _task(line))]
    except ValueError as error:
        raise PlaceUnavailable(f"squeue answers in a form that is unknown: {error}. It begins: "
                               f"{answer[:200]!r}") from error


def _task(line: str) -> Task | None:
    """Read one job; None: it has ended, or its processes are being killed (COMPLETING). A requeued
    one has the number of its next start already then."""
    (array, task, state, restarts, node, partition, resources, started, ends, preempted,
     reason) = line.removesuffix(BETWEEN).split(BETWEEN, len(FIELDS) - 1)
    if state not in (*PAUSED, RUNNING, HELD):
        if not re.fullmatch("[A-Z_]+", state):
            raise ValueError(f"{state!r} is no state")
        return None
    counted = re.search(r"\bgres/gpu=([0-9]+)", resources)
    return Task(
        job=f"{array}_{task}" if task.isdecimal() else array, count=how_many(task), state=state,
        restarts=int(restarts), node=node, partition=partition,
        gpus=int(counted[1]) if counted else 0, started=seconds(started), ends=seconds(ends),
        preempted=seconds(preempted) > 0, reason=reason)


def seconds(text: str) -> float:
    """Return a time in seconds since 1970; 0: there is none ("N/A", "NONE")."""
    return 0.0 if text.upper() in ("N/A", "NONE", "") else float(text)


def how_many(tasks: str) -> int:
    """Return the number of tasks in an expression of Slurm's: "0-3,7,10-20:5%4" has 8."""
    count = 0
    for part in tasks.partition("%")[0].split(","):
        if found := re.fullmatch(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?", part.strip()):
            first, last = int(found[1]), int(found[2] or found[1])
            count += (last - first) // int(found[3] or 1) + 1
    return max(1, count)


def gpus_in(answer: str) -> dict[str, int]:
    """Return the GPUs of each task in the lines of `scontrol --oneliner --details show job`."""
    found = {}
    for line in answer.splitlines():
        said = dict(word.partition("=")[::2] for word in line.split())
        task = said.get("ArrayTaskId", "")
        job = said.get("ArrayJobId") or said.get("JobId", "")
        found[f"{job}_{task}" if task.isdecimal() else job] = sum(
            int(count) for detail in DETAIL.findall(line) for count in GPUS.findall(detail))
    return found


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
        self._known: dict[str, tuple[str, int]] = {}
        """Task and restart → the address of its node, and its GPUs."""

    def tasks(self) -> list[Task]:
        """Ask for the jobs that have not ended. Raises PlaceUnavailable."""
        return tasks_in(_run("squeue", "--noheader", "--all", f"--user={os.getuid()}",
                             f"--name={self.name}",
                             f"--Format={','.join(f'{field}:{BETWEEN}' for field in FIELDS)}"))

    def instances(self) -> list[Instance]:
        """Return the hosts of all tasks that have a node. Raises PlaceUnavailable."""
        self._tasks = self.tasks()
        placed = {f"{task.job}.{task.restarts}": task for task in self._tasks
                  if task.state != HELD and task.node}
        if new := {identity: task for identity, task in placed.items()
                   if identity not in self._known}:
            addresses = addresses_of({task.node for task in new.values()})
            gpus: dict[str, int] = {}
            for job in sorted({task.job.partition("_")[0] for task in new.values()}):
                gpus |= gpus_in(_run("scontrol", "--oneliner", "--details", "show", "job", job))
            self._known |= {identity: (addresses[task.node], gpus.get(task.job) or task.gpus)
                            for identity, task in new.items()}
        self._known = {identity: self._known[identity] for identity in placed}
        return [instance_of(replace(task, gpus=self._known[identity][1]), self._known[identity][0],
                            time.time(), cpu_slots=self.cpu_slots, leave_s=self.leave_s)
                for identity, task in placed.items()]

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


def _run(*command: str) -> str:
    """Return what a command of Slurm's printed. Raises PlaceUnavailable."""
    own = {name: value for name, value in os.environ.items()
           if not name.startswith(("SQUEUE_", "SINFO_"))}
    # The whole list of an array's tasks, which is else cut off after 64 characters.
    own |= {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "%s"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S,
                              errors="replace", env=own)
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
    if re.search(rf"[,{BETWEEN}]", options.name):
        raise ValueError(f"--name is {options.name!r}: squeue takes it for several names. Submit "
                         f"the array under a name without commas.")
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
