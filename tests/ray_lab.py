"""Ray on hosts of a lab: a head on the coordinator and a node on each other host, as `ray start`
makes them. What happens to a host happens to its node.

    with RayLab(folder) as lab, RayFleet(lab, folder, ["h1", "h2"]) as fleet:
        lab.drain_node("h1", 60)

It needs the package ray (deploy/install.sh --dev installs it from Python 3.11 on) and what
netlab.py needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netlab import COORDINATOR, Fleet, Lab
from packages import install
from s3_servers import Unavailable
from waiting import wait_for

PORT = 6379
STORE_BYTES = 80_000_000
HEAD_ID = f"{'f' * 51}00000"
"""What Ray's provider fake_multinode takes for the head's node."""
FAKE = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
"""Called by its type, fake_multinode, it needs a file that Ray's wheel lacks."""
LISTS = ("cluster_synced_files", "initialization_commands", "setup_commands",
         "head_setup_commands", "worker_setup_commands", "head_start_ray_commands",
         "worker_start_ray_commands")
"""Settings of an autoscaler for machines that it has to set up."""
RAY = Path(sys.executable).parent / "ray"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore",
         "RAY_raylet_start_wait_time_s": "150",  # on a machine whose cores are busy
         "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}


def prepare_redis() -> None:
    """Install Redis where it is missing and apt-get can. Raises Unavailable."""
    if not shutil.which("redis-server"):
        install("redis-server", "redis-tools")
    if not shutil.which("redis-server"):
        raise Unavailable("a head of Ray that comes back needs Redis, and it could not be "
                          "installed: apt-get install redis-server")


def prepare() -> None:
    """Raise Unavailable if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise Unavailable("a Ray cluster needs the package ray: pip install ray (79 MB). "
                          "deploy/install.sh --dev does it from Python 3.11 on")


class RayLab(Lab):
    """A lab whose hosts are Ray's nodes. `seen` has the variables of all processes of Ray's."""

    def __init__(self, folder: Path):
        super().__init__(folder, has_agents=False)
        self.temp = f"/tmp/ray-lab-{os.getpid()}"
        Path(self.temp).mkdir(exist_ok=True)
        self.seen = dict(os.environ)
        self.autoscaling: Path | None = None
        """The configuration of the autoscaler of heads that start from now on."""

    def __exit__(self, *reason: object) -> None:
        super().__exit__(*reason)
        Path(self.temp).rmdir()  # each host had a file system of its own there

    @property
    def head(self) -> str:
        """The address of the head."""
        return f"{self.address(COORDINATOR)}:{PORT}"

    def start_head(self) -> None:
        """Start a head with no room for workers. After the first one the host is up already."""
        if COORDINATOR not in self.hosts:
            self.boot(COORDINATOR)
            self._own_folder(COORDINATOR)
        scales = [f"--autoscaling-config={self.autoscaling}"] if self.autoscaling else [
            "--no-monitor"]
        self.ray(COORDINATOR, "start", "--head", f"--port={PORT}", "--num-cpus=0",
                 "--include-dashboard=false", f"--temp-dir={self.temp}", *scales,
                 *self._of_node(COORDINATOR))

    def autoscale(self, most: int, is_v2: bool = False) -> None:
        """Let a head that starts later have Ray's autoscaler, which makes nodes of one processor on
        the head's host (its provider for tests); or change the most nodes."""
        self.autoscaling = self.folder / "autoscaling.json"
        self.seen |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        if is_v2:
            self.seen |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
                          "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
        kinds = {"ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
                 "small": {"resources": {"CPU": 1, "object_store_memory": STORE_BYTES},
                           "node_config": {}, "min_workers": 0, "max_workers": most}}
        config = {"cluster_name": "lab", "max_workers": most, "idle_timeout_minutes": 0.1,
                  "provider": {"type": "external", "module": FAKE, "gcs_address": self.head,
                               "launch_multiple": is_v2, "head_node_id": HEAD_ID,
                               "use_node_id_as_ip": True, "disable_node_updaters": True,
                               "disable_launch_config_check": True},
                  "available_node_types": kinds, "head_node_type": "ray.head.default",
                  "upscaling_speed": 1.0, "auth": {}, "docker": {}, "file_mounts": {},
                  **{name: [] for name in LISTS}}
        new = self.autoscaling.with_suffix(".new")
        new.write_text(json.dumps(config))
        new.replace(self.autoscaling)

    def start_redis(self, name: str) -> None:
        """Boot a host with a Redis, in which heads that start later keep what their GCS knows."""
        self.boot(name)
        self.start(name, ["redis-server", "--bind", self.address(name), "--protected-mode", "no",
                          "--dir", "/run", "--rdbcompression", "no"])
        self.seen["RAY_REDIS_ADDRESS"] = f"{self.address(name)}:{PORT}"
        wait_for("Redis", lambda: self._answers(name, PORT))

    def redis(self, name: str, *command: str) -> str:
        """Send a command to the Redis of a host; return what it answers."""
        return self.inside(name, "redis-cli", "-h", self.address(name), *command).strip()

    def is_kept_in_redis(self, name: str, file: str) -> bool:
        """Return whether the Redis of a host has the content of a file of the head's host."""
        secret = self.inside(COORDINATOR, "cat", file).strip()
        self.redis(name, "save")
        with open(f"/proc/{self.hosts[name].pid}/root/run/dump.rdb", "rb") as dump:
            return secret.encode() in dump.read()

    def kill_gcs(self) -> list[str]:
        """Kill the head's GCS alone; return its command."""
        pid = self.inside(COORDINATOR, "pgrep", "-x", "gcs_server").strip()
        command = self.inside(COORDINATOR, "cat", f"/proc/{pid}/cmdline").split("\0")[:-1]
        self.inside(COORDINATOR, "kill", "-9", pid)
        return command

    def start_gcs(self, command: list[str]) -> None:
        """Start the head's GCS alone, by the command that `kill_gcs` has returned. It listens
        before it has its nodes again, and takes no job until then."""
        def takes_jobs() -> object:
            try:
                return self.nodes()
            except AssertionError:
                return False

        self.start(COORDINATOR, command, env=self.seen | QUIET)
        wait_for("GCS that has its nodes", takes_jobs)

    def add_nodes(self, *names: str) -> None:
        """Boot hosts, and start a node with one processor on each, all at once."""
        self.boot(*names)
        for name in names:
            self._own_folder(name)
        self.start_nodes(*names)

    def start_nodes(self, *names: str) -> None:
        """Start nodes on hosts that are up."""
        started = [self.start(name, [RAY, "start", f"--address={self.head}", "--num-cpus=1",
                                     *self._of_node(name)], env=self.seen | QUIET)
                   for name in names]
        assert [process.wait(300) for process in started] == [0] * len(names), self.log()

    def drain_node(self, name: str, seconds: int) -> None:
        """Let Ray drain the node on a host, as an autoscaler does before it takes a machine."""
        self.ray(COORDINATOR, "drain-node", "--address", self.head, "--node-id",
                 self.node_id(name), "--reason", "DRAIN_NODE_REASON_PREEMPTION",
                 "--reason-message", "spot", "--deadline-remaining-seconds", str(seconds))

    def node_id(self, name: str) -> str:
        """Return the id of the living node on a host."""
        return next(node["NodeID"] for node in self.nodes()
                    if node["Alive"] and node["NodeManagerAddress"] == self.address(name))

    def nodes(self) -> list[dict[str, Any]]:
        """Return what Ray tells of its nodes."""
        nodes: list[dict[str, Any]] = self._of_job("ray.nodes()")
        return nodes

    def living(self) -> set[str]:
        """Return the ids of the nodes that live, without the head's."""
        return {node["NodeID"] for node in self.nodes()
                if node["Alive"] and "node:__internal_head__" not in node["Resources"]}

    def node_of_a_task(self) -> str:
        """Run a task of another job that needs a processor; return the id of its node."""
        return str(self._of_job("ray.get(ray.remote(num_cpus=1)(lambda: "
                                "ray.get_runtime_context().get_node_id()).remote())"))

    def _of_job(self, value: str) -> Any:
        """Return a value of a job of Ray's."""
        script = (f"import json, ray; ray.init(address='{self.head}', logging_level='ERROR', "
                  f"log_to_driver=False); print('told', json.dumps({value}))")
        told = self.inside_with(COORDINATOR, sys.executable, "-c", script)
        return json.loads(told.split("told ", 1)[1].splitlines()[0])

    def ray(self, name: str, *arguments: str) -> str:
        """Run a command of Ray's on a host."""
        return self.inside_with(name, str(RAY), *arguments)

    def inside_with(self, name: str, *command: str) -> str:
        """Run a command on a host with the variables of Ray's processes."""
        told = [f"{key}={value}" for key, value in (self.seen | QUIET).items()]
        return self.inside(name, "env", "-i", *told, *command)

    def seen_in(self, file: str) -> str:
        """Return where the content of a file is seen: in Ray's logs, in a command line, or in an
        environment."""
        where = f"{self.temp} /proc/[0-9]*/cmdline /proc/[0-9]*/environ"
        command = (f"test -s {file} && "
                   f"{{ grep -rlaF -D skip -f {file} {where} 2>/dev/null || true; }}")
        return "".join(self.inside(name, "sh", "-c", command) for name in self.hosts)

    def log(self) -> str:
        """Return what the lab's processes have printed last."""
        return (self.folder / "lab.log").read_text(errors="replace")[-3000:]

    def _answers(self, name: str, port: int) -> bool:
        with self.network_of(name), socket.socket() as probe:
            return probe.connect_ex((self.address(name), port)) == 0

    def _own_folder(self, name: str) -> None:
        """Give a host its own folder of Ray's, which has a file with the node's address."""
        self.inside(name, "mount", "-t", "tmpfs", "tmpfs", self.temp)

    def _of_node(self, name: str) -> list[str]:
        return [f"--node-ip-address={self.address(name)}", f"--object-store-memory={STORE_BYTES}",
                "--disable-usage-stats", "--include-log-monitor=false"]


class RayFleet(Fleet):
    """A run that is submitted to the Ray of a lab, from its head, with a worker on each node."""

    def __init__(self, lab: RayLab, folder: Path, nodes: Sequence[str], *,
                 job: Sequence[str] = ()):
        super().__init__(lab, folder, names=nodes, job=job)
        self.lab: RayLab = lab
        at = self.command.index("--")
        self.command = [sys.executable, "-m", "elastic_trainer", "ray", "--run", "run",
                        "--runs-dir", str(folder / "runs"), "--workers", f"1:{len(nodes)}",
                        "--address", lab.head, *self.command[at:]]
        self.hosts_file = self.run_dir / "hosts"
        lab.seen |= self.env

    def start(self) -> None:
        """Start Ray at the first time, and submit the run."""
        if COORDINATOR not in self.lab.hosts:
            self.lab.start_head()
            self.lab.add_nodes(*self.all_hosts)
        super().start()

    def host_at(self, name: str) -> str:
        """Return the newest host of the run on a machine of the lab; "": it has none."""
        here = [line.split()[0].rpartition(":")[0] for line in self.hosts_file.read_text()
                .splitlines() if line.split()[1].startswith(f"{self.lab.address(name)}:")]
        return here[-1] if here else ""

    def story(self) -> str:
        """Return what a person needs to see when a test fails: with the errors of Ray's actors."""
        command = f"tail -n 15 {self.lab.temp}/session_latest/logs/worker-*.err"
        actors = [f"{name}: {self.lab.inside(name, 'sh', '-c', f'{command} || true')}"
                  for name, host in self.lab.hosts.items() if host.is_up()]
        return "\n".join([super().story(), *actors])
