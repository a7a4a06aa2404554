"""The actor that runs the coordinator of a run: its agents, its poller and its supervisor.

submit → here → agents' actors (fleet.py); poller → hosts file → `elastic-trainer run`

What always holds:
1. Ray restarts this actor, and a new life of it goes on with the run: it takes over the agents'
   actors by their names, and starts the supervisor when the one before has ended.
2. The supervisor is a process apart (keeper.py). When this actor ends, it stops the run as SIGTERM
   does: the workers write a last checkpoint.
3. The end of the run gives all actors back. This one stays until its exit code has been read, or
   for LINGER_S.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import state as ray_state
from ray.exceptions import RayError

from elastic_trainer.config import EXIT_INTERRUPTED
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.place_protocol import PlaceUnavailable
from elastic_trainer.discovery.places.ray import Nodes, Ray
from elastic_trainer.discovery.poll import Poller
from elastic_trainer.driver.supervisor import LOCK_FILE
from elastic_trainer.events.segments import EVENTS_FILE
from elastic_trainer.host import locks
from elastic_trainer.host.modes import make_folder, private
from elastic_trainer.ray.fleet import Fleet
from elastic_trainer.ray.job import Job
from elastic_trainer.ray.kept import Kept
from elastic_trainer.wire.plain import plain_text

TURN_S = 1.0
AT_ONCE = 64
"""The agents that are asked at a time."""
LINGER_S = 600.0
EXIT_BAD_JOB = 2
TAKEN_S = 0.05
"""How long a turn waits for the run's lock, which an earlier supervisor may still hold."""


def nodes_now() -> Nodes:
    """Ask Ray's GCS for the nodes and for those that it drains. Raises PlaceUnavailable."""
    try:
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()
                 if node["Alive"]}
        # Ray has no public question for drains that works without its dashboard.
        drains = ray_state.state.get_draining_nodes()
    except (RayError, ConnectionError, RuntimeError, AttributeError, LookupError) as error:
        raise PlaceUnavailable(f"Ray's GCS did not answer: {error!r}") from error
    return Nodes(alive=alive, drains={node: at / 1000 for node, at in drains.items()})


def interface_of(address: str) -> str:
    """Return the network interface of this machine that has an address; "": none has."""
    return next((name for name, has in psutil.net_if_addrs().items()
                 if address in [one.address for one in has]), "")


class Coordinator:
    """The actor. `state` and `stop` are the calls of whoever has submitted the run."""

    def __init__(self, job: Mapping[str, Any]):
        self.job = Job.from_json(job)
        self.run_dir = Path(self.job.runs_dir, self.job.name)
        self.key = secrets.token_hex(32)
        self.fleet = Fleet(self.job, self.key, key_id=secrets.token_hex(8))
        self.folder = tempfile.TemporaryDirectory(prefix="elastic-trainer-")
        """Of the key's file, which the driver reads."""
        self.supervisor: Kept | None = None
        self.exit_code: int | None = None
        self.says = ""
        """The sentence of an end that is the user's to mend."""
        self._is_stopped = threading.Event()
        self._me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._live, name="run", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """Return how the run stands."""
        agents = self.fleet.lives()
        return {"job": self.job.to_json(), "exit_code": self.exit_code, "says": self.says,
                "agents": len(agents), "faults": [one.fault for one in self.fleet.members
                                                  if one.fault][:1]}

    def stop(self) -> None:
        """Stop the run, as Ctrl-C does. Its exit code follows."""
        self._is_stopped.set()

    # --- the thread of the run --------------------------------------------------------------------

    def _live(self) -> None:
        exit_code = 1
        try:
            exit_code = self._run()
        except Exception as error:
            self.says = f"The coordinator has failed: {plain_text(repr(error))}"
            raise
        finally:
            self.fleet.end()
            self.folder.cleanup()
            self.exit_code = exit_code  # last: who reads it ends this actor
            time.sleep(LINGER_S)
            ray.kill(self._me, no_restart=True)

    def _run(self) -> int:
        if not os.path.isdir(self.job.folder):
            return self._refuse(f"The folder {self.job.folder} is not on the coordinator's node "
                                f"{ray.util.get_node_ip_address()}")
        make_folder(self.run_dir)
        place = Ray(nodes_now, self.fleet.lives, agents=self.job.agents,
                    slots=self.job.workers_per_agent, gpus=self.job.gpus_per_agent)
        poller = Poller(place, self.run_dir / "hosts", Policy(lifecycle="any", agents=True),
                        interval_s=TURN_S, key=self.key.encode(), agent_port=1,
                        events_file=self.run_dir / EVENTS_FILE)
        with ThreadPoolExecutor(AT_ONCE, "agents") as pool:
            while True:
                began = time.monotonic()
                self.fleet.turn()
                poller.poll(pool)
                self.fleet.move({one.id: one for one in poller.instances}, poller.health)
                if self.supervisor is None:
                    lacks = [life for life in self.fleet.lives() if life.lacks]
                    if lacks and len(lacks) == len(self.fleet.lives()):
                        return self._refuse(f"On Ray's node {lacks[0].node[:8]} "
                                            f"{lacks[0].lacks}")
                    if self._is_stopped.is_set():
                        return EXIT_INTERRUPTED
                    self._start_supervisor(poller.hosts_file)
                elif self._is_stopped.is_set():
                    self.supervisor.stop()
                if self.supervisor and self.supervisor.wait(
                        max(0.0, TURN_S - (time.monotonic() - began))):
                    assert self.supervisor.exit_code is not None
                    return self.supervisor.exit_code
                time.sleep(max(0.0, TURN_S - (time.monotonic() - began)))

    def _refuse(self, fact: str) -> int:
        self.says = (f"{fact}. Use a folder that all nodes share, or let Ray copy yours: "
                     f"ray job submit --working-dir . -- …")
        return EXIT_BAD_JOB

    def _start_supervisor(self, hosts_file: Path) -> None:
        """Start `elastic-trainer run` when there are hosts, and no earlier one has the run."""
        # After a restart of this actor the list has agents with the key of its earlier life.
        listed = hosts_file.read_text() if hosts_file.is_file() else ""
        if not any(life.name and f"{life.name}:" in listed for life in self.fleet.lives()):
            return
        lock = private(str(self.run_dir / LOCK_FILE), os.O_RDWR | os.O_CREAT)
        try:
            if not locks.take(lock, TAKEN_S):
                return
        finally:
            os.close(lock)
        key_file = Path(self.folder.name, "key")
        key_file.touch(mode=0o600)
        key_file.write_text(self.key)
        command = self.job.supervisor(str(hosts_file), str(key_file),
                                      interface_of(ray.util.get_node_ip_address()))
        self.supervisor = Kept("supervisor", command, self._environment(), self.job.folder)

    def _environment(self) -> dict[str, str]:
        """Return the variables of the supervisor, and so of the workers.

        Ray sets OMP_NUM_THREADS to 1 for this actor, which has no processor reserved. A worker
        has what Ray sets for an actor with the worker's processors.
        """
        threads = max(1, int(self.job.resources.get("CPU", 1)))
        path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"
        return os.environ | {"OMP_NUM_THREADS": str(threads), "PATH": path}
