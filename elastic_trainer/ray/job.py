"""A run as it is submitted to Ray: its numbers, its resources, and the command of its supervisor.

submit, command line → here → coordinator
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.host import own

NAMESPACE = "elastic-trainer"
"""Ray's namespace of our actors."""
CONNECTED = "connected"
"""What the process that follows a run tells when it has found the run's coordinator."""
PACKAGE_FOLDER = "/runtime_resources/working_dir_files/"
"""Where Ray unpacks a job's working_dir. Ray deletes that folder after the job."""
WEEK_S = 604800
"""How long an attempt waits for a host: a week without capacity is no failure."""
WAITS_S = 60.0
"""How often the user reads that a run waits for nodes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on Ray. All of it goes to Ray's GCS, so it has no secret."""

    name: str
    command: tuple[str, ...]
    folder: str
    """The folder in which the command runs, on each node."""
    least: int = 1
    most: int
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """What Ray reserves for a worker."""
    workers_per_agent: int = 1
    runs_dir: str
    options: tuple[str, ...] = ()
    """More options of `elastic-trainer run`."""
    notices: str = ""
    """The cloud whose metadata service each agent asks for notices; "": none."""

    @property
    def agents(self) -> int:
        """The most agents: actors that Ray places, or that wait for a node."""
        return math.ceil(self.most / self.workers_per_agent)

    @property
    def gpus_per_agent(self) -> int:
        """The GPUs that Ray reserves for an agent."""
        return int(self.resources.get("GPU", 0) * self.workers_per_agent)

    def of_agent(self) -> dict[str, float]:
        """Return what Ray reserves for an agent."""
        return {name: amount * self.workers_per_agent for name, amount in self.resources.items()}

    def run_options(self) -> list[str]:
        """Return the options of `elastic-trainer run` that name the run and its numbers."""
        return ["--run", self.name, "--runs-dir", self.runs_dir, "-np", str(self.least),
                "--min-np", str(self.least), "--max-np", str(self.most),
                "--elastic-timeout", str(WEEK_S), *self.options]

    def supervisor(self, hosts_file: str, key_file: str, interface: str) -> list[str]:
        """Return the command of the run's supervisor, whose hosts are listed in a file.

        `interface` leads to the nodes: the first host may be on the coordinator's own node, from
        whose address nothing follows.
        """
        via = ["--network-interfaces", interface] if interface else []
        return own.command("elastic_trainer", "run", *self.run_options(),
                           "--reach", "agent", "--agent-key-file", key_file, *via,
                           "--host-discovery-script", f"{own.listing(hosts_file)} 120", "--",
                           *self.command)

    def script(self) -> str:
        """Return the path of the Python file that the command runs; "": it names none."""
        program, *words = self.command
        if not re.fullmatch("python[0-9.]*", os.path.basename(program)):
            return ""
        first = next((word for word in words if word in "-m-c" or word[:1] != "-"), "-c")
        return "" if first[:1] == "-" else os.path.join(self.folder, first)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Job:
        """Read what `to_json` has returned."""
        return cls(**{**told, "command": tuple(told["command"]),
                      "options": tuple(told["options"])})


def job_of(command: Sequence[str], *, workers: tuple[int, int],
           resources_per_worker: Mapping[str, float], workers_per_agent: int, run: str,
           runs_dir: str, store: str, options: Sequence[str], notices: str) -> Job:
    """Check a job before anything is started. Raises ConfigError."""
    try:
        least, most = (int(number) for number in workers)
    except (TypeError, ValueError):
        raise ConfigError(f"workers is {workers!r}. Give the fewest and the most, e.g. "
                          f"workers=(1, 8) or --workers 1:8.") from None
    if not 1 <= least <= most:
        raise ConfigError(f"workers is ({least}, {most}). Give the fewest, 1 or more, and then the "
                          f"most, e.g. workers=(1, 8) or --workers 1:8.")
    if workers_per_agent < 1 or most % workers_per_agent:
        raise ConfigError(f"workers_per_agent is {workers_per_agent}, and the most workers are "
                          f"{most}. Use a number that divides {most}, e.g. 1.")
    for name, amount in resources_per_worker.items():
        if not 0 < float(amount) < math.inf:
            raise ConfigError(f"resources_per_worker has {name!r}: {amount!r}. Give a number above "
                              f"0, e.g. {{\"GPU\": 1}}.")
    if not resources_per_worker:
        raise ConfigError("resources_per_worker is empty, so Ray would put all workers on one "
                          "node. Give what a worker needs, e.g. {\"GPU\": 1} or {\"CPU\": 1}.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run):
        raise ConfigError(f"run is {run!r}, which cannot name a folder and a place in the store. "
                          f"Use letters, digits, '.', '_' and '-', with a letter or digit first. "
                          f"The same name again resumes the run.")
    folder, runs = os.getcwd(), os.path.abspath(os.path.expanduser(runs_dir))
    if PACKAGE_FOLDER in f"{runs}/":
        raise ConfigError(f"The run's folder would be {runs}, in Ray's copy of the job's "
                          f"working_dir, which Ray deletes after the job. Give a folder that "
                          f"stays, e.g. --runs-dir ~/runs or one that all nodes share.")
    stored = ("--store", store) if store else ()
    return Job(name=run, command=tuple(command), folder=folder, least=least, most=most,
               resources={name: float(amount) for name, amount in resources_per_worker.items()},
               workers_per_agent=workers_per_agent, runs_dir=runs, options=(*stored, *options),
               notices=notices)


def require_room(job: Job, nodes: Sequence[tuple[str, Mapping[str, float]]],
                 ever: Mapping[str, float] | None, waits: bool) -> None:
    """Raise ConfigError if the fewest workers can never run.

    `nodes` are the addresses of the nodes with all their resources, and `ever` is what an
    autoscaler may reach, if it says so. `waits`: the user expects other nodes.
    """
    needed, agents = job.of_agent(), math.ceil(job.least / job.workers_per_agent)
    rooms = {f"{address}#{number}": room_for(needed, has)
             for number, (address, has) in enumerate(nodes)}
    later = 0 if ever is None else room_for(needed, ever)
    if waits or max(sum(rooms.values()), later) >= agents:
        return
    listed = ", ".join(f"{name.partition('#')[0]}: {room}" for name, room in rooms.items())
    has = {name: amount for _, node in nodes for name, amount in node.items()}
    lacks = [name for name in needed if name not in has]
    why = (f"no node has the resource {lacks[0]!r}" if lacks
           else f"the cluster has room for {sum(rooms.values()) * job.workers_per_agent} "
                f"({listed or 'it has no nodes'})")
    raise ConfigError(f"The fewest workers are {job.least}, each with {dict(job.resources)}, but "
                      f"{why}. Ask for less, start more nodes (`ray status` shows them), or say "
                      f"that nodes will come: --wait-for-nodes, wait_for_nodes=True.")


def room_for(needed: Mapping[str, float], has: Mapping[str, float]) -> int:
    """Return how often a node's resources contain what an agent needs."""
    return int(min(has.get(name, 0.0) // amount for name, amount in needed.items()))


def refusal_of(where: str, says: str, version: str) -> str:
    """Return the sentence for a cluster that takes no connection. `version` is that of Ray here."""
    if "ersion mismatch" in says:
        what = says.partition("ersion mismatch: ")[2].partition(". This")[0] or says
        here = f"Ray {version}, Python {platform.python_version()}"
        return (f"The cluster at {where} has other versions than this process ({here}): {what}. "
                f"Submit from one of its nodes, e.g. with ray job submit, or install the "
                f"cluster's versions here.")
    return (f"No Ray cluster answers at {where} ({says[:200]}). Give its head's address, e.g. "
            f"--address 10.0.0.1:6379, or start one: ray start --head.")


def require_same(job: Job, state: Mapping[str, Any] | None) -> None:
    """Raise ConfigError if another job has this run's name."""
    there = Job.from_json(state["job"]) if state else job
    differs = [name for name in ("command", "folder", "least", "most", "resources", "runs_dir",
                                 "options") if getattr(there, name) != getattr(job, name)]
    if differs:
        raise ConfigError(f"Ray runs {job.name} already, with another {differs[0]}: "
                          f"{getattr(there, differs[0])!r}. Use another name (--run), or stop that "
                          f"run first with Ctrl-C where it was submitted.")


def remark_on(state: Mapping[str, Any], job: Job, told: str, told_s: float) -> str:
    """Return the sentence that is due on how a run stands; "": none.

    `state` is the coordinator's answer, `told` the last sentence, and `told_s` its age.
    """
    if state["faults"]:
        sentence = f"Ray cannot run an agent: {state['faults'][0][:600]}"
        return sentence if sentence != told else ""
    room = state["agents"] * job.workers_per_agent
    if room >= job.least or told_s <= WAITS_S:
        return ""
    found = (f"The nodes have room for {room} of the fewest {job.least} workers" if room
             else "No node has room for a worker")
    return (f"{found} (an agent needs {job.of_agent()}). The run waits, and Ray's autoscaler knows "
            f"it; `ray status` shows what it does.")
