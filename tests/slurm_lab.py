"""A real Slurm on the hosts of a lab: slurmctld on the coordinator (the login node), and slurmd and
munged on each node.

    with Slurm(lab, folder, {"spot": ["h1", "h2"], "cpu": ["h9"]}) as slurm:
        fleet = SlurmFleet(slurm, folder / "fleet", job=JOB, tasks="--array=0-1")

Partition prod has the nodes of spot and a higher priority: its jobs preempt those of spot, which
have `grace_s` to leave. No service of this machine is touched, and all of it ends with the lab.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import slurm_accounts
from netlab import COORDINATOR, Fleet, Lab
from packages import install
from s3_servers import Unavailable
from waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "squeue", "sbatch", "scontrol")
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
KILL_WAIT_S = 50
CONF = """ClusterName=lab
SlurmctldHost=coordinator({controller})
SlurmctldPort=17817
AuthType=auth/munge
# A requeued task starts again when its credential has expired: after 120 s by default.
AuthInfo=socket=/run/munge/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=12
KillWait={kill_wait_s}
InactiveLimit=0
MinJobAge=300
"""


def prepare() -> None:
    """Install Slurm where it is missing and apt-get can. Raises Unavailable."""
    if missing():
        install(*PACKAGES)
    if lacking := missing():
        raise Unavailable(f"the tests of Slurm need {', '.join(lacking)}, and they could not be "
                          f"installed: apt-get install {' '.join(PACKAGES)}")


def missing() -> list[str]:
    return [program for program in PROGRAMS if not shutil.which(program, path=SYSTEM_PATH)]


class Slurm:
    """One cluster; use as a context manager, with the lab's hosts booted by it."""

    def __init__(self, lab: Lab, folder: Path, partitions: Mapping[str, Sequence[str]], *,
                 grace_s: int = 30, sends_signal: bool = True,
                 accounts: Sequence[Sequence[str]] = ()):
        self.lab, self.folder, self.partitions = lab, folder, partitions
        self.grace_s = grace_s
        self.sends_signal = sends_signal
        """A preempted job gets the signal that it has asked for, and not SIGTERM."""
        self.accounts = accounts
        """Commands of sacctmgr. Without one there are no accounts."""
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SYSTEM_PATH}
        self.nodes = [node for nodes in partitions.values() for node in nodes]
        lab.has_agents = lab.has_sshd = False  # a task starts its own agent, which needs no ssh

    def __enter__(self) -> Slurm:
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(self._conf())
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.lab.boot(COORDINATOR, *self.nodes)
        self._start_munge(COORDINATOR)
        if self.accounts:
            slurm_accounts.start(self, self.accounts)
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_until_idle(*self.nodes)
        return self

    def __exit__(self, *_: object) -> None:
        """All of it ends with the lab."""

    def _conf(self) -> str:
        lab = self.lab
        lines = [f"NodeName={node} NodeAddr={lab.address(node)} Port=17000 CPUs=1 State=UNKNOWN"
                 for node in self.nodes]
        for name, nodes in self.partitions.items():
            grace = f" GraceTime={self.grace_s}" if name != "cpu" else ""
            lines.append(f"PartitionName={name} Nodes={','.join(nodes)} PriorityTier=1{grace}")
        spot = ",".join(self.partitions["spot"])
        lines.append(f"PartitionName=prod Nodes={spot} PriorityTier=10 PreemptMode=OFF")
        if self.sends_signal:
            lines.append("SlurmctldParameters=preempt_send_user_signal")
        conf = CONF.format(controller=lab.address(COORDINATOR), folder=self.folder,
                           kill_wait_s=KILL_WAIT_S)
        if self.accounts:
            conf = conf.replace("PreemptType=preempt/partition_prio\n",
                                slurm_accounts.conf_of(self))
        return conf + "".join(f"{line}\n" for line in lines)

    def start_node(self, node: str) -> None:
        """Start munged and slurmd on a host that has booted."""
        self._start_munge(node)
        self.lab.start(node, ["slurmd", "-D", "-f", self.env["SLURM_CONF"], "-N", node],
                       env=self.env)

    def start_controller(self) -> None:
        """Start slurmctld on the login node, with the state that an earlier one has left."""
        self.controller = self.lab.start(
            COORDINATOR, ["slurmctld", "-D", "-f", self.env["SLURM_CONF"]], env=self.env)

    def stop_controller(self) -> None:
        """End slurmctld, and wait until it has gone."""
        pid = self.lab.inside(COORDINATOR, "cat", "/run/slurmctld.pid").strip()
        self.lab.inside(COORDINATOR, "kill", pid)
        self.controller.wait()

    def _start_munge(self, host: str) -> None:
        """Start a munged of the host's own, with the cluster's key."""
        self.lab.inside(host, "mkdir", "-p", "-m", "755", "/run/munge", "/run/slurmd")
        self.lab.start(host, [
            "munged", "-F", "--force", "--socket=/run/munge/munge.sock", "--num-threads=1",
            f"--key-file={self.folder}/munge.key", "--log-file=/run/munge/munged.log",
            "--pid-file=/run/munge/munged.pid", "--seed-file=/run/munge/munged.seed"],
            env=self.env)
        self.wait_for_path(host, "munge/munge.sock")

    def wait_for_path(self, host: str, path: str) -> None:
        """Wait until a host has a file below /run."""
        run = Path(f"/proc/{self.lab.hosts[host].pid}/root/run")
        wait_for(f"{path} on {host}", (run / path).exists)

    def call(self, *command: str | Path, cwd: Path | None = None, check: bool = True,
             **variables: str) -> str:
        """Run a command on the login node; return what it printed."""
        done = subprocess.run([*self.lab.hosts[COORDINATOR].enter(), "env", f"--chdir={cwd or '/'}",
                               *map(str, command)], env=self.env | variables, capture_output=True,
                              text=True, timeout=120)
        said = done.stdout + done.stderr
        assert not check or done.returncode == 0, f"{command}: {said}"
        return said.strip()

    def wait_until_idle(self, *nodes: str) -> None:
        """Wait until nodes can take a job."""
        def are_idle() -> bool:
            said = self.call("sinfo", "-h", "-N", "-o", "%n %t", check=False).splitlines()
            return {f"{node} idle" for node in nodes} <= set(said)

        wait_for("idle nodes", are_idle, story=lambda: self.call("sinfo", "-N", check=False))

    def preempt(self, node: str, seconds: int = 5) -> str:
        """Submit a job of a higher priority that needs this node; returns its number."""
        return self.call("sbatch", "--parsable", "--partition=prod", f"--nodelist={node}",
                         "--exclusive", "--output=/dev/null", f"--wrap=sleep {seconds}")

    def state_of(self, job: str) -> str:
        """Return the state of a job or task, and its exit code."""
        shown = self._shown(job)
        return f"{shown.get('JobState', '')} {shown.get('ExitCode', '')}".strip()

    def node_of(self, job: str) -> str:
        """Return the node on which a job runs."""
        return self._shown(job)["NodeList"]

    def _shown(self, job: str) -> dict[str, str]:
        shown = self.call("scontrol", "--oneliner", "show", "job", job, check=False)
        return {name: value for name, _, value in (
            word.partition("=") for word in shown.split())}

    def task_on(self, node: str) -> str:
        """Return the task that runs on a node, as A_T."""
        return self.call("squeue", "-h", "--name=train", f"--nodelist={node}", "--format=%i")

    def options_of_agent(self, node: str) -> list[str]:
        """Return the command line of the agent on a node."""
        return self.lab.inside(node, "sh", "-c", "cat $(grep -lz -- '^--warned-grace$' "
                               "/proc/[0-9]*/cmdline 2>/dev/null)").split("\0")

    def wait_for_controller(self) -> None:
        """Wait until slurmctld answers."""
        wait_for("slurmctld", lambda: "UP" in self.call("scontrol", "ping", check=False))

    def memory_mib(self, node: str) -> float:
        """Return the memory of all processes of a node's jobs: the sum of their proportional sizes.
        """
        told = self.lab.inside(node, "sh", "-c", "cd /proc; for file in $(grep -lzE '^SLURM_JOB_ID="
                               "' [0-9]*/environ 2>/dev/null); do grep '^Pss:' "
                               "${file%/*}/smaps_rollup 2>/dev/null; done; true")
        return sum(int(line.split()[1]) for line in told.splitlines()) / 1024

    def terminate_all(self, node: str) -> int:
        """Send SIGTERM to the batch script of a task, to the agent, to workers and to all that they
        have started; return how many processes got it."""
        seen = self.lab.inside(node, "sh", "-c", "grep -lzE '^(SLURM_JOB_ID|ELASTIC_TRAINER_WORKER)"
                               "=' /proc/[0-9]*/environ 2>/dev/null; true").split()
        pids = [path.split("/")[2] for path in seen]
        self.lab.inside(node, "sh", "-c", f"kill -TERM {' '.join(pids)} 2>/dev/null; true")
        return len(pids)


class SlurmFleet(Fleet):
    """A run that deploy/slurm/submit.sh submits from the login node."""

    def __init__(self, slurm: Slurm, folder: Path, *, tasks: Sequence[str], job: Sequence[str],
                 launcher: Sequence[str] = (), **options: Any):
        super().__init__(slurm.lab, folder, names=["h1"], run="train", job=job, **options)
        self.slurm, self.tasks, self.launcher = slurm, tasks, launcher
        self.env = {name: value for name, value in self.env.items()
                    if name.startswith("ELASTIC_") or name in ("HOME", "PYTHONPATH")}
        self.env["ELASTIC_TRAINER_VENV"] = str(Path(sys.prefix))
        self.job_command = self.command[self.command.index("--") + 1:]
        self.coordinator = ""
        self.hosts_file = self.run_dir / "slurm" / "hosts"

    def wait_for_world(self, size: int, after: int = 0, deadline_s: float = 150.0) -> int:
        """Wait until a generation of this size has started after generation `after`; returns its
        number."""
        return int(self.wait_for(f"world of {size}", lambda: [
            e["generation"] for e in self.events("worker.generation_started")
            if e["size"] == size and e["generation"] > after], deadline_s)[-1])

    def start(self) -> None:
        """Submit the run, or resume it."""
        said = self.submit(*self.tasks, "--", *self.launcher, "--", *self.job_command)
        self.coordinator = said.partition("coordinator: job ")[2].partition(",")[0]

    def submit(self, *arguments: str, check: bool = True) -> str:
        """Call submit.sh on the login node; returns what it printed."""
        return self.slurm.call(ROOT / "deploy" / "slurm" / "submit.sh", "train", *arguments,
                               cwd=self.folder, check=check, COORDINATOR="--partition=cpu",
                               **self.env)

    def wait(self, deadline_s: float = 600.0) -> int:
        """Wait until the coordinator's job has ended; returns its exit code."""
        def ended() -> str:
            state = self.slurm.state_of(self.coordinator)
            return state if state.startswith(("COMPLETED", "FAILED", "CANCELLED")) else ""

        state = wait_for("end of the coordinator", ended, deadline_s, self.story)
        return int(state.split()[1].partition(":")[0])

    def end(self) -> None:
        """Cancel whatever of the run is still there."""
        self.slurm.call("scancel", "--name=train,train.coordinator", check=False)

    def signal_worker(self, host: str, number: int) -> int:
        """Send a signal to the worker on a host; returns its pid there."""
        pid = [e["pid"] for e in self.events("driver.worker_ready")
               if e["worker"].startswith(f"{host}/")][-1]
        self.lab.inside(host.partition("-")[0], "kill", f"-{number}", str(pid))
        return int(pid)

    def hosts(self) -> list[str]:
        """Return the names of the hosts that the poller lists now."""
        lines = self.hosts_file.read_text().splitlines() if self.hosts_file.exists() else []
        return [line.partition(":")[0] for line in lines]

    def story(self) -> str:
        """Return what a person needs to see when a test fails."""
        outputs = [f"{path.name}: {line}" for path in sorted((self.run_dir / "slurm").glob("*.out"))
                   for line in path.read_text(errors="replace").splitlines()[-25:]]
        return "\n".join([super().story(), *outputs, self.slurm.call("squeue", check=False)])
