"""An actor of Ray that keeps our agent on its node: Ray places it, reserves its resources, restarts
it on another node, and takes it for demand while it has none.

Ray → here → keeper.py → `discovery agent` → workers

What always holds:
1. The run's key comes as an argument of a call to this actor, from the coordinator's actor. It is
   not in the actor's creation, which Ray's GCS keeps and shows. On the node it is in a file of mode
   600 until the agent has read it.
2. Each start of the agent is a host of its own, with a name of its own.
3. An actor that the coordinator has not called for ORPHAN_S gives its resources back.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from elastic_trainer.host import own
from elastic_trainer.ray.job import Job
from elastic_trainer.ray.kept import Kept

ORPHAN_S = 600.0
"""Ray restarts a coordinator's actor within seconds."""
START_S = 60.0
"""The time in which an agent must tell its port. It examines its host before."""
GRACE_S = 30.0
"""How long an agent drains whose actor Ray has ended. `ray stop` allows less, but kills no agent:
it is a process apart (keeper.py)."""


class Agent:
    """The actor. All its calls are the coordinator's."""

    def __init__(self, job: Mapping[str, Any]):
        self.job = Job.from_json(job)
        self.kept: Kept | None = None
        self.life: dict[str, Any] = {}
        self._port, self._has_port = 0, threading.Event()
        self._called_at = time.monotonic()
        me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_if_forgotten, args=(me,), daemon=True).start()

    def facts(self) -> dict[str, Any]:
        """Return the facts of the present agent; empty: there is none that runs."""
        self._called_at = time.monotonic()
        return self.life if self.kept and self.kept.exit_code is None else {}

    def begin(self, key: str, key_id: str) -> dict[str, Any]:
        """Start an agent with a run's key, in place of an earlier one; return its facts."""
        self._called_at = time.monotonic()
        if self.kept:
            self.kept.stop()
        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        node = context.get_node_id()
        facts = {"node": node, "key_id": key_id, "began": time.time(), "lacks": self._lacks()}
        if facts["lacks"]:
            self.kept, self.life = None, facts
            return facts
        self._has_port.clear()
        with tempfile.TemporaryDirectory(prefix="elastic-trainer-") as folder:
            key_file = Path(folder, "key")
            key_file.touch(mode=0o600)
            key_file.write_text(key)
            self.kept = Kept("agent", self._command(address, key_file), os.environ,
                             self.job.folder, self._take)
            if not self._has_port.wait(START_S):
                self.kept.stop()
                facts["lacks"] = f"its agent has not started in {START_S:.0f} s (see Ray's logs)"
        name = f"ray-{node[:8]}-{secrets.token_hex(3)}"
        self.life = facts | {"name": name, "address": address, "port": self._port}
        return self.life

    def _command(self, address: str, key_file: Path) -> list[str]:
        place = ["--place", self.job.notices] if self.job.notices else ["--no-metadata"]
        workers = ["--starts-workers", "--workers-end-with-agent"]
        return own.command("elastic_trainer.discovery", "agent", "--bind", address, "--port", "0",
                           "--key-file", str(key_file), "--user", str(os.geteuid()),
                           "--grace", str(GRACE_S),
                           "--stop-reason", "Ray has ended the agent's actor", *workers, *place)

    def _take(self, line: str) -> None:
        """Take a line of the agent: its port."""
        if line.isdecimal():
            self._port = int(line)
            self._has_port.set()

    def _lacks(self) -> str:
        """Return what this node lacks for a worker; "": nothing."""
        if not os.path.isdir(self.job.folder):
            return f"the folder {self.job.folder} is not there"
        script = self.job.script()
        return "" if not script or os.path.isfile(script) else f"the script {script} is not there"

    def _end_if_forgotten(self, me: Any) -> None:
        while time.monotonic() - self._called_at < ORPHAN_S:
            time.sleep(ORPHAN_S / 20)
        ray.kill(me, no_restart=True)
