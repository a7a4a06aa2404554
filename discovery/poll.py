"""The poller: asks the cloud and the agents again and again, and keeps the hosts file true.

ec2, agents → here → hosts file (replaced whole) → `python -m discovery hosts-file` → horovodrun

What always holds:
1. The file is replaced whole, and only by an answer that was whole. While the cloud does not answer it stays as it is, but
   for hosts under notice; after `stale_s` it is old, and the script that prints it says so by its exit code.
2. Every change of the list is an event with its reason, in the run's diary.
3. The agents are asked every second, the cloud every few: a notice reaches the file within two seconds.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from discovery.agent import AgentUnreachable, ask
from discovery.ec2 import CloudUnavailable
from discovery.hosts import DOUBTED, HELD, IN, Decision, Health, History, Instance, Policy, decide

AGENTS_S = 1.0
AGENT_TIMEOUT_S = 0.8
AT_ONCE = 64
MOST_BACK_OFF_S = 60.0


class Cloud(Protocol):
    """Who is here, as a cloud sees it."""

    def instances(self) -> list[Instance]: ...


@dataclass
class Poller:
    """One fleet's poller."""

    cloud: Cloud
    hosts_file: Path
    policy: Policy
    interval_s: float = 5.0
    agent_port: int | None = None
    key: bytes = b""
    events_file: Path | None = None
    clock: Callable[[], float] = time.monotonic
    history: History = field(default_factory=History)
    instances: list[Instance] = field(default_factory=list)
    health: dict[str, Health] = field(default_factory=dict)
    failures: int = 0
    """Polls of the cloud that failed in a row."""
    _asked_at: float | None = None
    _written: str | None = None
    _reasons: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Poll until SIGTERM or SIGINT."""
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        with ThreadPoolExecutor(AT_ONCE, "agents") as pool:
            while not stopping.is_set():
                started = self.clock()
                self.poll(pool)
                stopping.wait(max(0.0, AGENTS_S - (self.clock() - started)))

    def poll(self, pool: ThreadPoolExecutor) -> None:
        """Ask whoever is due, decide, and write what has changed."""
        now, is_fresh, before = self.clock(), False, self.instances
        wait_s = min(MOST_BACK_OFF_S, self.interval_s * 2.0 ** self.failures)
        if self._asked_at is None or now - self._asked_at >= wait_s:
            self._asked_at = now
            try:
                self.instances = self.cloud.instances()
                self.failures, is_fresh = 0, True
            except CloudUnavailable as error:
                self.failures += 1
                self.emit("discovery.cloud_unavailable", error=str(error), failures=self.failures)
        if self._written is None and not is_fresh and not self.instances:
            return  # nothing was ever known: there is no file yet, and the script says so
        asked, doubts = self._ask_agents(pool), self.history.doubts
        history = self.history if is_fresh else replace(self.history, doubts=0)
        decision = decide(self.instances, asked, history, self.clock(), self.policy)
        self.history = decision.history
        if is_fresh and self.history.doubts:
            self.instances = before  # whom the answer lacks is asked still, and a notice of theirs counts
        elif doubts and not is_fresh:
            self.history = replace(self.history, doubts=doubts)  # settled by the cloud's next answer, by nothing else
        self._publish(decision, is_fresh)

    def _ask_agents(self, pool: ThreadPoolExecutor) -> dict[str, Health]:
        if self.agent_port is None:
            return {}
        running = [i for i in self.instances if i.state == "running" and i.name]

        def one(instance: Instance) -> Health | None:
            try:
                says = ask(f"{instance.name}:{self.agent_port}", self.key, AGENT_TIMEOUT_S)
                return replace(says, heard_at=self.clock())
            except AgentUnreachable:
                return None

        answers = dict(zip((i.id for i in running), pool.map(one, running), strict=True))
        self.health = {i: says for i, says in answers.items() if says}
        return self.health

    def _publish(self, decision: Decision, is_fresh: bool) -> None:
        text = "".join(f"{name}:{slots}\n" for name, slots in decision.hosts)
        by_id = {i.id: i for i in self.instances}
        reasons = {i: self._reasons.get(i, why) if why.endswith(DOUBTED) else why for i, why in decision.reasons.items()}
        for identity, why in reasons.items():
            was = self._reasons.get(identity)
            name = by_id[identity].name if identity in by_id else identity
            if why != was and (why == IN) != (was == IN):
                self.emit("discovery.host_in" if why == IN else "discovery.host_out", host=name, id=identity, why=why)
            elif why.startswith(HELD) and not (was or "").startswith(HELD):
                self.emit("discovery.host_held_back", host=name, id=identity, why=why)
        for identity in self._reasons.keys() - reasons.keys():
            if self._reasons[identity] == IN:
                self.emit("discovery.host_out", host=identity, id=identity, why="the cloud knows it no more")
        self._reasons = reasons
        if text != self._written:
            replace_whole(self.hosts_file, text)
            self.emit("discovery.hosts_changed", hosts=[name for name, _ in decision.hosts])
            self._written = text
        elif is_fresh:
            os.utime(self.hosts_file)  # the script looks at its age
        replace_whole(self.hosts_file.with_name(self.hosts_file.name + ".json"), json.dumps(self.table(decision)))

    def table(self, decision: Decision) -> dict[str, Any]:
        """Return what `elastic-trainer hosts` shows."""
        past = decision.history.past
        return {"time": time.time(), "cloud_failures": self.failures, "hosts": [
            {**asdict(i), "why": decision.reasons.get(i.id, ""), "is_in": decision.reasons.get(i.id) == IN,
             "since_s": self.clock() - past[i.id].first_fit if i.id in past and past[i.id].first_fit is not None else None,  # type: ignore[operator]
             "agent": self.health[i.id].state if i.id in self.health else "",
             "agent_why": self.health[i.id].why if i.id in self.health else "",
             "rebalance": self.health[i.id].rebalance if i.id in self.health else False,
             "deadline": self.health[i.id].deadline if i.id in self.health else None,
             "workers": self.health[i.id].facts.get("workers") if i.id in self.health else None,
             "standby": self.health[i.id].facts.get("standby") if i.id in self.health else None}
            for i in sorted(self.instances, key=lambda i: (i.launched, i.id))]}

    def emit(self, event: str, **facts: Any) -> None:
        """Write one line into the run's diary."""
        if self.events_file is not None:
            line = json.dumps({"time": round(time.time(), 4), "event": event, **facts}) + "\n"
            descriptor = os.open(self.events_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


def once(cloud: Cloud, policy: Policy) -> Sequence[tuple[str, int]]:
    """Return the list straight from the cloud, without agents and without a past. Raises CloudUnavailable."""
    return decide(cloud.instances(), {}, History(), 0.0, policy).hosts


def replace_whole(path: Path, text: str) -> None:
    """Replace a file so that every reader sees the old text or the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)
