"""The poller: asks the cloud and the agents periodically, and keeps the hosts file true.

place, agents → here → hosts file → `discovery hosts-file` → horovodrun

What always holds:
1. The hosts file is replaced whole, and only after a complete answer. While the cloud does not
   answer, only the agents' answers change the file. The file's age is that of its oldest host. A
   host's age counts from the later one of the cloud's last believed answer and its agent's last
   answer. The script that prints the file fails if the file is too old.
2. Every change of the list is an event with its reason, in the run's event log.
3. The agents are asked every second, the cloud every few, in a thread of its own: a notice reaches
   the file within two seconds, also while the cloud hangs.
4. A poller that is killed at any moment has written down what it knows (memory.py) before the list
   that follows from it.
5. The event log and the table show that the place refuses machines, until machines come
   (place_protocol.py).
   An unknown state of that delays nothing else.
6. A full disk or an event log that cannot be written does not end the poller: it prints that on
   stderr and tries again at its next turn.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_trainer.discovery.files import append_event
from elastic_trainer.discovery.hosts import (
    DOUBTED,
    HELD,
    IN,
    SICK,
    Decision,
    Health,
    History,
    Past,
    Policy,
    decide,
    lines,
)
from elastic_trainer.discovery.memory import Memory, recall, write_down
from elastic_trainer.discovery.place_protocol import (
    Instance,
    Place,
    PlaceUnavailable,
    Reported,
    Supply,
    report,
)
from elastic_trainer.discovery.questions import Agents, CloudQuestion
from elastic_trainer.host.modes import replace_whole
from elastic_trainer.wire.plain import plain_text

AGENTS_S = 1.0
AT_ONCE = 256
PRICED_BY = ("type", "zone", "lifecycle")
"""What the price of a machine depends on."""
REFUSED_EVERY_S = 60.0
"""The shortest interval between two events of clients that one host has refused."""


@dataclass
class Poller:
    """One fleet's poller."""

    place: Place
    hosts_file: Path
    policy: Policy
    interval_s: float = 5.0
    patience_s: float = 0.5
    """The time for which a turn waits for the cloud's answer. A later turn takes a later answer."""
    agent_port: int | None = None
    agent_timeout_s: float = 0.8
    agents_patience_s: float = 1.0
    """The time for which a turn waits for the agents' answers."""
    key: bytes = b""
    events_file: Path | None = None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    history: History = field(default_factory=History)
    instances: list[Instance] = field(default_factory=list)
    health: dict[str, Health] = field(default_factory=dict)
    """The answers of this turn's agents, by instance."""
    _answered_at: float | None = None
    """When the cloud's last believed answer came, by `wall`."""
    _heard_at: dict[str, float] = field(default_factory=dict)
    """The time of each agent's last answer with the right time to this process, by `clock`."""
    _written: str | None = None
    _reasons: Mapping[str, str] = field(default_factory=dict)
    _refused: dict[str, int] = field(default_factory=dict)
    _logged_at: dict[str, float] = field(default_factory=dict)
    _complaints: set[str] = field(default_factory=set)
    _reported: Reported = field(default_factory=Reported)
    """The refusals of the place that are in the event log."""
    _is_supply_known: bool = True

    def __post_init__(self) -> None:
        """Take over from the poller before."""
        self.question = CloudQuestion(self._ask_both, self.interval_s, self.patience_s, self.clock)
        self.agents = self.agent_port and Agents(
            self.agent_port, self.key, self.agent_timeout_s, self.agents_patience_s, self.clock,
            self.wall)
        try:
            memory = recall(self._memory_file.read_text(), self.clock())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            return self._complain(f"{self._memory_file} cannot be used, so this poller starts "
                                  f"without a past: {error}")
        self.history, self.instances = memory.history, list(memory.instances)
        self._reasons, self._answered_at = memory.reasons, memory.answered_at
        self._refused, self._reported = dict(memory.refused), memory.reported
        if self.hosts_file.is_file():
            self._written = self.hosts_file.read_text(errors="replace")

    @property
    def _memory_file(self) -> Path:
        return self.hosts_file.with_name(self.hosts_file.name + ".memory")

    def run(self) -> None:
        """Poll until SIGTERM or SIGINT."""
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            # In a thread: the handler may interrupt `stopping.wait` where that holds a lock that
            # `set` needs.
            signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())
        pool = ThreadPoolExecutor(AT_ONCE, "agents")
        while not stopping.is_set():
            started = self.clock()
            self.poll(pool)
            stopping.wait(max(0.0, AGENTS_S - (self.clock() - started)))
        pool.shutdown(wait=False, cancel_futures=True)

    def poll(self, pool: ThreadPoolExecutor) -> None:
        """Ask what is due, decide, and write what has changed."""
        answer, before, former = self._ask_cloud(), self.instances, self.history
        is_fresh = answer is not None
        self.instances = before if answer is None else answer
        if self._answered_at is None and not is_fresh:
            return  # nothing was ever known: there is no file, and the script reports that
        doubted = self.history.doubted
        history = self.history if is_fresh else replace(self.history, doubted=())
        decision = decide(self.instances, self._ask_agents(pool), history, self.clock(),
                          self.policy)
        self.history = decision.history
        if leaving(former) != leaving(self.history):
            self.question.hasten()
        if not is_fresh:  # only the cloud's next answer settles a doubt
            self.history = replace(self.history, doubted=doubted)
        elif self.history.doubted:
            self.instances = before  # missing hosts are still asked, and their notices count
            self.emit("discovery.answer_doubted", listed=len(decision.hosts),
                      lacks=sum(why.endswith(DOUBTED) for why in decision.reasons.values()))
        else:
            self._answered_at = self.wall()
        self._log_changes(decision, former, before)
        self._publish(decision)

    def _ask_cloud(self) -> list[Instance] | None:
        """Ask the cloud, if it is due; return the answer if one has come."""
        try:
            answer = self.question.answer()
        except PlaceUnavailable as error:
            self.emit("discovery.cloud_unavailable", error=str(error),
                      failures=self.question.failures)
            return None
        if answer is None:
            return None
        instances, supply = answer
        self._take_supply(supply)
        return instances

    def _ask_both(self) -> tuple[list[Instance], Supply | str | None]:
        """Return the machines, and what is lacking, or why that is unknown."""
        instances = self.place.instances()
        try:
            return instances, self.place.supply()
        except PlaceUnavailable as error:
            return instances, str(error)

    def _take_supply(self, supply: Supply | str | None) -> None:
        is_known, self._is_supply_known = self._is_supply_known, not isinstance(supply, str)
        if isinstance(supply, str):
            if is_known:
                sys.stderr.write(f"discovery: It is unknown now whether the place refuses "
                                 f"machines. The last known state stands. {plain_text(supply)}\n")
        elif supply is not None:
            self._reported, events = report(supply, self._reported, self.clock())
            for event, facts in events:
                self.emit(event, **facts)

    def _ask_agents(self, pool: ThreadPoolExecutor) -> dict[str, Health]:
        if self.agents:
            self.health = self.agents.ask(self.instances, pool)
            self._heard_at |= {identity: answer.heard_at for identity, answer in self.health.items()
                               if not answer.is_clock_off}
        return self.health

    # --- what is written ------------------------------------------------------------------------

    def _log_changes(self, decision: Decision, former: History, before: Sequence[Instance]) -> None:
        """Log what has changed, and why."""
        names = {i.id: i.name for i in (*before, *self.instances)}
        reasons = {identity: self._reasons.get(identity, why) if why.endswith(DOUBTED) else why
                   for identity, why in decision.reasons.items()}
        if decision.history.doubted:  # other missing hosts are not gone, and new ones not known
            known = {i.id for i in self.instances}
            reasons = {**self._reasons, **{identity: why for identity, why in reasons.items()
                                           if identity in known}}
        for identity, why in reasons.items():
            self._log_host(names.get(identity, identity), identity, why)
        for identity in sorted(self._reasons.keys() - reasons.keys()):
            was_in = self._reasons[identity] == IN
            self.emit("discovery.host_out" if was_in else "discovery.host_gone",
                      host=names.get(identity, identity), id=identity,
                      why="the cloud does not know it any more")
        self._reasons = reasons
        if decision.history.unheard and not former.unheard:
            clock_off = sum(answer.is_clock_off for answer in self.health.values())
            self.emit("discovery.poller_doubts_itself", unheard=decision.history.unheard,
                      listed=len(decision.hosts), clock_off=clock_off)
        elif former.unheard and not decision.history.unheard:
            self.emit("discovery.poller_hears_again", listed=len(decision.hosts))
        self._log_refused(names)

    def _log_host(self, name: str, identity: str, why: str) -> None:
        """Log that a host came onto the list or left it, is held back, or is sick."""
        was = self._reasons.get(identity)
        if why != was and (why == IN) != (was == IN):
            machine = next((it for it in self.instances if it.id == identity), None)
            known = {name: getattr(machine, name) for name in PRICED_BY} if machine else {}
            self.emit("discovery.host_in" if why == IN else "discovery.host_out", host=name,
                      id=identity, why=why, **known)
        elif why.startswith(HELD) and not (was or "").startswith(HELD):
            self.emit("discovery.host_held_back", host=name, id=identity, why=why)
        elif why.startswith(SICK) and _without_figures(why) != _without_figures(was or ""):
            self.emit("discovery.host_sick", host=name, id=identity, why=why)

    def _log_refused(self, names: Mapping[str, str]) -> None:
        """Log the clients that agents have refused."""
        for identity, answer in self.health.items():
            refused, known = answer.refused, self._refused.get(identity, 0)
            logged_s = self.clock() - self._logged_at.get(identity, -math.inf)
            if refused < known:
                self._refused[identity] = 0  # another life of the agent
            elif refused > known and logged_s >= REFUSED_EVERY_S:
                self._refused[identity], self._logged_at[identity] = refused, self.clock()
                self.emit("discovery.stranger_refused", host=names.get(identity, identity),
                          id=identity, refused=refused - known)

    def _publish(self, decision: Decision) -> None:
        """Write memory, list and table. A failed write is tried again at the next turn."""
        text = lines(decision.history, with_zones=True)
        past, at = self.history.past, known_at(
            self.history, self.instances, self._heard_at, self._answered_at or 0.0, self.clock(),
            self.wall(), self.policy.silence_s)
        self._heard_at = {i: heard_at for i, heard_at in self._heard_at.items() if i in past}
        refused = {i: count for i, count in self._refused.items() if i in past}
        memory = Memory(self.clock(), self._answered_at or 0.0, tuple(self.instances),
                        self.history, self._reasons, refused, self._reported)
        is_kept = self._write(self._memory_file, write_down(memory))
        if text != self._written:
            if is_listed := self._write(self.hosts_file, text, at):
                self._written = text
                names = [name for name, _ in decision.hosts]
                self.emit("discovery.hosts_changed", hosts=names)
        elif not (is_listed := self._touch(at)):
            self._written = None
        table = self.hosts_file.with_name(self.hosts_file.name + ".json")
        is_shown = self._write(table, json.dumps(self.table(decision)))
        if is_kept and is_listed and is_shown:
            self._complaints.clear()

    def _write(self, path: Path, text: str, at: float | None = None) -> bool:
        try:
            replace_whole(path, text, opener=None, at=at)
            return True
        except OSError as error:
            self._complain(f"{path} cannot be written. The poller tries again every second: "
                           f"{error}")
            return False

    def _touch(self, at: float) -> bool:
        """Give the list the age of its oldest fact."""
        try:
            os.utime(self.hosts_file, (at, at))
            return True
        except OSError as error:
            self._complain(f"{self.hosts_file} is missing, and is written again: {error}")
            return False

    def _complain(self, what: str) -> None:
        """Print it on stderr, once until all can be written again."""
        if what not in self._complaints:
            self._complaints.add(what)
            sys.stderr.write(f"discovery: {plain_text(what)}\n")

    def table(self, decision: Decision) -> dict[str, Any]:
        """Return what `elastic-trainer hosts` shows."""
        instances = sorted(self.instances, key=lambda i: (i.launched, i.id))
        return {"time": self.wall(), "cloud_failures": self.question.failures,
                "unheard": decision.history.unheard,
                "supply": asdict(self._reported.supply) if self._reported.supply else None,
                "hosts": [row(i, decision, self.health.get(i.id), self.clock())
                          for i in instances]}

    def emit(self, event: str, **facts: Any) -> None:
        """Write one line into the run's event log."""
        try:
            append_event(self.events_file, event, **facts)
        except OSError as error:
            self._complain(f"{self.events_file} cannot be written, and lacks {event}: {error}")


def leaving(history: History) -> set[str]:
    """Return the hosts that leave by the report of their own agents, or by a notice."""
    return {identity for identity, past in history.past.items() if past.leaves}


def known_at(history: History, instances: Sequence[Instance], heard_at: Mapping[str, float],
             answered_at: float, now: float, wall: float, silence_s: float) -> float:
    """Return the time of the oldest fact on which the list rests, by the clock of `wall`.

    `heard_at` has the agents' last answers by the clock of `now`; `answered_at` is the time of the
    cloud's last believed answer.
    """
    believed = answered_at if answered_at <= wall else 0.0  # else the clock was set back
    known = {identity: max(believed, wall - (now - heard)) for identity, heard in heard_at.items()}
    if history.listed:
        return min(known.get(identity, answered_at) for identity, _, _ in history.listed)
    here = {i.id: history.past.get(i.id, Past()) for i in instances}
    speaking = {identity for identity, heard in heard_at.items() if now - heard <= silence_s}
    if any(past.heard_at is not None and not past.leaves and identity not in speaking
           for identity, past in here.items()):
        return answered_at  # a host whose agent has fallen silent may still work
    leaving = [identity for identity, past in here.items() if past.leaves]
    return max([answered_at, *(known.get(identity, answered_at) for identity in leaving)])


def row(instance: Instance, decision: Decision, answer: Health | None,
        now: float) -> dict[str, Any]:
    """Return one host's row of the table."""
    past = decision.history.past.get(instance.id, Past())
    since = past.first_unfit if past.first_fit is None else past.first_fit
    why = decision.reasons.get(instance.id, "")
    notice = instance.notice.deadline if instance.notice else None
    return {**vars(instance), "notice": instance.notice and instance.notice.sentence(),
            "why": why, "is_in": why == IN,
            "since_s": None if since is None else now - since,
            "agent": answer.state if answer else "", "agent_why": answer.why if answer else "",
            "rebalance": bool(answer and answer.rebalance),
            "deadline": answer.deadline if answer and answer.deadline else notice,
            "workers": answer.facts.get("workers") if answer else None,
            "standby": answer.facts.get("standby") if answer else None,
            "refused": answer.refused if answer else 0}


def once(place: Place, policy: Policy) -> str:
    """Return the list straight from the cloud, without agents and without a past.

    Raises PlaceUnavailable.
    """
    return lines(decide(place.instances(), {}, History(), 0.0, policy).history)


def _without_figures(why: str) -> str:
    """Return a reason without its figures, which change from turn to turn."""
    return "".join(letter for letter in why if letter not in "+-.0123456789")
