"""The poller: asks the cloud and the agents again and again, and keeps the hosts file true.

ec2, agents → here → hosts file (replaced whole) → `python -m elastic_trainer.discovery hosts-file` → horovodrun

What always holds:
1. The file is replaced whole, and only by an answer that was whole. While the cloud does not answer it stays as it is, but
   for what the agents say. Its age is that of what is known of the hosts on it, whatever was written since: of each the
   cloud's last believed answer or its agent's last word, whichever is later, and of all hosts the earliest. The script
   that prints it says by its exit code that it is too old.
2. Every change of the list is an event with its reason, in the run's diary.
3. The agents are asked every second, the cloud every few, in a thread of its own: a notice reaches the file within two
   seconds, also while the cloud hangs.
4. A poller that is killed at any moment has written down what it knows (memory.py), before the list that it decided.
5. That AWS refuses machines is in the diary and in the table, until machines come (refusals.py). Not to know it delays
   nothing else.
6. A full disk or a diary that cannot be written does not end it: it says so on stderr and tries again at its next turn.
"""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from elastic_trainer.discovery.agent import AgentUnreachable, ask
from elastic_trainer.discovery.ec2 import CloudUnavailable
from elastic_trainer.discovery.hosts import (
    DOUBTED,
    HELD,
    IN,
    MOST_DOUBLINGS,
    SICK,
    Decision,
    Health,
    History,
    Instance,
    Past,
    Policy,
    decide,
)
from elastic_trainer.discovery.memory import Memory, recall, write_down
from elastic_trainer.discovery.refusals import Supply, Told, tell

AGENTS_S = 1.0
AT_ONCE = 256
MOST_BACK_OFF_S = 60.0
GIVE_UP_S = 60.0
"""boto3 has given up long before, unless an answer trickles in byte by byte."""
STRANGERS_S = 60.0
"""So often at most a host's strangers are told."""
Answer = TypeVar("Answer")


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
    patience_s: float = 0.5
    """So long a turn waits for the cloud's answer; one that comes later is taken by a later turn."""
    agent_port: int | None = None
    agent_timeout_s: float = 0.8
    agents_patience_s: float = 1.0
    """So long a turn waits for agents; who answers later (or never, or by a name that does not resolve) delays no other's
    notice."""
    key: bytes = b""
    supply: Callable[[], Supply | None] = lambda: None
    """Asked after each answer of the cloud's, in the same thread: whether machines are lacking, and why."""
    events_file: Path | None = None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    history: History = field(default_factory=History)
    instances: list[Instance] = field(default_factory=list)
    health: dict[str, Health] = field(default_factory=dict)
    failures: int = 0
    """Polls of the cloud that failed in a row."""
    _asked_at: float = -math.inf
    _question: Future[tuple[list[Instance], Supply | str | None]] | None = None
    _asking: dict[str, Future[Health | None]] = field(default_factory=dict)
    """The questions to agents, by instance, whose answers no turn has taken: one at most to each."""
    _answered_at: float | None = None
    """When the cloud's last believed answer came, by `wall`."""
    _heard_at: dict[str, float] = field(default_factory=dict)
    """When each instance's agent last said something by the right time, by `clock`; of this poller's life only."""
    _written: str | None = None
    _reasons: Mapping[str, str] = field(default_factory=dict)
    _strangers: dict[str, int] = field(default_factory=dict)
    _told_at: dict[str, float] = field(default_factory=dict)
    _complaints: set[str] = field(default_factory=set)
    _told: Told = field(default_factory=Told)
    """Of AWS's refusals."""
    _is_supply_known: bool = True

    def __post_init__(self) -> None:
        """Take over from the poller before."""
        try:
            memory = recall(self._memory_file.read_text(), self.clock())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            return self._complain(f"{self._memory_file} cannot be trusted, so this poller begins anew: {error}")
        self.history, self.instances, self._reasons = memory.history, list(memory.instances), memory.reasons
        self._answered_at, self._strangers, self._told = memory.answered_at, dict(memory.strangers), memory.told
        if self.hosts_file.is_file():
            self._written = self.hosts_file.read_text(errors="replace")

    @property
    def _memory_file(self) -> Path:
        return self.hosts_file.with_name(self.hosts_file.name + ".memory")

    def run(self) -> None:
        """Poll until SIGTERM or SIGINT."""
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            # In a thread: the handler may interrupt `stopping.wait` where that holds a lock that `set` needs.
            signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())
        pool = ThreadPoolExecutor(AT_ONCE, "agents")
        while not stopping.is_set():
            started = self.clock()
            self.poll(pool)
            stopping.wait(max(0.0, AGENTS_S - (self.clock() - started)))
        pool.shutdown(wait=False, cancel_futures=True)

    def poll(self, pool: ThreadPoolExecutor) -> None:
        """Ask whoever is due, decide, and write what has changed."""
        answer, before, former = self._ask_cloud(), self.instances, self.history
        is_fresh = answer is not None
        self.instances = before if answer is None else answer
        if self._answered_at is None and not is_fresh:
            return  # nothing was ever known: there is no file yet, and the script says so
        asked, doubted = self._ask_agents(pool), self.history.doubted
        history = self.history if is_fresh else replace(self.history, doubted=())
        decision = decide(self.instances, asked, history, self.clock(), self.policy)
        self.history = decision.history
        if not is_fresh:
            self.history = replace(self.history, doubted=doubted)  # settled by the cloud's next answer, by nothing else
        elif self.history.doubted:
            self.instances = before  # whom the answer lacks is asked still, and a notice of theirs counts
            self.emit("discovery.answer_doubted", listed=len(decision.hosts),
                      lacks=sum(why.endswith(DOUBTED) for why in decision.reasons.values()))
        else:
            self._answered_at = self.wall()
        self._tell(decision, former, before)
        self._publish(decision)

    def _ask_cloud(self) -> list[Instance] | None:
        """Ask the cloud, if it is due; returns the answer if one has come. It is awaited for patience_s only."""
        now = self.clock()
        if self._question is None:
            pause_s = min(MOST_BACK_OFF_S, self.interval_s * 2.0 ** min(self.failures, MOST_DOUBLINGS))
            if now - self._asked_at < pause_s:
                return None
            self._asked_at, self._question = now, _begin(self._ask_both)
            wait([self._question], self.patience_s)
        question = self._question
        if not question.done() and now - self._asked_at < GIVE_UP_S:
            return None
        self._question = None
        try:
            if not question.done():
                raise CloudUnavailable(f"the cloud has begun no answer, or not ended it, in {GIVE_UP_S:.0f} s")
            answer, supply = question.result()
        except CloudUnavailable as error:
            self.failures += 1
            self.emit("discovery.cloud_unavailable", error=str(error), failures=self.failures)
            return None
        self.failures = 0
        self._take_supply(supply)
        return answer

    def _ask_both(self) -> tuple[list[Instance], Supply | str | None]:
        """Return who is here, and what is lacking, or why nobody knows."""
        instances = self.cloud.instances()
        try:
            return instances, self.supply()
        except CloudUnavailable as error:
            return instances, str(error)

    def _take_supply(self, supply: Supply | str | None) -> None:
        is_known, self._is_supply_known = self._is_supply_known, not isinstance(supply, str)
        if isinstance(supply, str):
            if is_known:
                sys.stderr.write(f"discovery: nobody knows now whether AWS refuses machines; what was known stands: "
                                 f"{printable(supply)}\n")
        elif supply is not None:
            self._told, events = tell(supply, self._told, self.clock())
            for event, facts in events:
                self.emit(event, **facts)

    def _ask_agents(self, pool: ThreadPoolExecutor) -> dict[str, Health]:
        if self.agent_port is None:
            return {}
        running = {i.id: i.name for i in self.instances if i.state == "running" and i.name}

        def one(name: str) -> Health | None:
            try:
                says = ask(f"{name}:{self.agent_port}", self.key, self.agent_timeout_s, self.wall)
                return replace(says, heard_at=self.clock())
            except AgentUnreachable:
                return None

        self._asking |= {i: pool.submit(one, name) for i, name in running.items() if i not in self._asking}
        done, _ = wait(self._asking.values(), self.agents_patience_s)
        answers = {i: self._asking.pop(i).result() for i, question in list(self._asking.items()) if question in done}
        self.health = {i: says for i, says in answers.items() if says and i in running}
        self._heard_at |= {i: says.heard_at for i, says in self.health.items() if not says.is_clock_off}
        return self.health

    def _known_at(self) -> float:
        """Return since when it may be that the list is not true any more, by `wall`."""
        said, now, wall = self._answered_at or 0.0, self.clock(), self.wall()
        known_at = {i: max(said if said <= wall else 0.0, wall - (now - heard_at))  # else our clock was set back since
                    for i, heard_at in self._heard_at.items()}
        here = {i.id: self.history.past.get(i.id, Past()) for i in self.instances}
        if self.history.listed:
            return min(known_at.get(i, said) for i, _, _ in self.history.listed)
        heard = {i for i, heard_at in self._heard_at.items() if now - heard_at <= self.policy.silence_s}
        if any(past.heard_at is not None and not past.leaves and i not in heard for i, past in here.items()):
            return said  # who has fallen silent may work all the same
        return max([said, *(known_at.get(i, said) for i, past in here.items() if past.leaves)])

    def _tell(self, decision: Decision, former: History, before: Sequence[Instance]) -> None:
        """Say in the diary what has changed, and why."""
        names = {i.id: i.name for i in (*before, *self.instances)}
        reasons = {i: self._reasons.get(i, why) if why.endswith(DOUBTED) else why for i, why in decision.reasons.items()}
        if decision.history.doubted:  # whom else the answer lacks is not gone, and whom it has anew is not known yet
            known = {i.id for i in self.instances}
            reasons = {**self._reasons, **{i: why for i, why in reasons.items() if i in known}}
        for identity, why in reasons.items():
            was, name = self._reasons.get(identity), names.get(identity, identity)
            if why != was and (why == IN) != (was == IN):
                self.emit("discovery.host_in" if why == IN else "discovery.host_out", host=name, id=identity, why=why)
            elif why.startswith(HELD) and not (was or "").startswith(HELD):
                self.emit("discovery.host_held_back", host=name, id=identity, why=why)
            elif why.startswith(SICK) and _words(why) != _words(was or ""):
                self.emit("discovery.host_sick", host=name, id=identity, why=why)
        for identity in sorted(self._reasons.keys() - reasons.keys()):
            self.emit("discovery.host_out" if self._reasons[identity] == IN else "discovery.host_gone",
                      host=names.get(identity, identity), id=identity, why="the cloud knows it no more")
        self._reasons = reasons
        if decision.history.unheard and not former.unheard:
            self.emit("discovery.poller_doubts_itself", unheard=decision.history.unheard, listed=len(decision.hosts),
                      clock_off=sum(says.is_clock_off for says in self.health.values()))
        elif former.unheard and not decision.history.unheard:
            self.emit("discovery.poller_hears_again", listed=len(decision.hosts))
        self._tell_of_strangers(names)

    def _tell_of_strangers(self, names: Mapping[str, str]) -> None:
        for identity, says in self.health.items():
            refused, known = says.refused, self._strangers.get(identity, 0)
            if refused < known:
                self._strangers[identity] = 0  # another life of the agent
            elif refused > known and self.clock() - self._told_at.get(identity, -math.inf) >= STRANGERS_S:
                self._strangers[identity], self._told_at[identity] = refused, self.clock()
                self.emit("discovery.stranger_refused", host=names.get(identity, identity), id=identity,
                          refused=refused - known)

    def _publish(self, decision: Decision) -> None:
        """Write memory, list and table; what cannot be written is tried again at the next turn."""
        text, at = "".join(f"{name}:{slots}\n" for name, slots in decision.hosts), self._known_at()
        self._heard_at = {i: heard_at for i, heard_at in self._heard_at.items() if i in self.history.past}
        memory = Memory(self.clock(), self._answered_at or 0.0, tuple(self.instances), self.history, self._reasons,
                        {i: count for i, count in self._strangers.items() if i in self.history.past}, self._told)
        is_kept = self._write(self._memory_file, write_down(memory))
        if text != self._written:
            if is_listed := self._write(self.hosts_file, text, at):
                self._written = text
                self.emit("discovery.hosts_changed", hosts=[name for name, _ in decision.hosts])
        elif not (is_listed := self._touch(at)):
            self._written = None
        is_shown = self._write(self.hosts_file.with_name(self.hosts_file.name + ".json"), json.dumps(self.table(decision)))
        if is_kept and is_listed and is_shown:
            self._complaints.clear()

    def _write(self, path: Path, text: str, at: float | None = None) -> bool:
        try:
            replace_whole(path, text, at)
            return True
        except OSError as error:
            self._complain(f"{path} cannot be written, and is tried again every second: {error}")
            return False

    def _touch(self, at: float) -> bool:
        """Give the list the age of what is known."""
        try:
            os.utime(self.hosts_file, (at, at))
            return True
        except OSError as error:
            self._complain(f"{self.hosts_file} has gone, and is written again: {error}")
            return False

    def _complain(self, what: str) -> None:
        """Say it on stderr, once until all is well again."""
        if what not in self._complaints:
            self._complaints.add(what)
            sys.stderr.write(f"discovery: {printable(what)}\n")

    def table(self, decision: Decision) -> dict[str, Any]:
        """Return what `elastic-trainer hosts` shows."""
        return {"time": self.wall(), "cloud_failures": self.failures, "unheard": decision.history.unheard,
                "supply": asdict(self._told.supply) if self._told.supply else None,
                "hosts": [self._row(i, decision) for i in sorted(self.instances, key=lambda i: (i.launched, i.id))]}

    def _row(self, instance: Instance, decision: Decision) -> dict[str, Any]:
        past, says = decision.history.past.get(instance.id, Past()), self.health.get(instance.id)
        since = past.first_unfit if past.first_fit is None else past.first_fit
        why = decision.reasons.get(instance.id, "")
        return {**vars(instance), "why": why, "is_in": why == IN,
                "since_s": None if since is None else self.clock() - since,
                "agent": says.state if says else "", "agent_why": says.why if says else "",
                "rebalance": bool(says and says.rebalance), "deadline": says.deadline if says else None,
                "workers": says.facts.get("workers") if says else None,
                "standby": says.facts.get("standby") if says else None, "refused": says.refused if says else 0}

    def emit(self, event: str, **facts: Any) -> None:
        """Write one line into the run's diary."""
        try:
            append_event(self.events_file, event, **facts)
        except OSError as error:
            self._complain(f"{self.events_file} cannot be written, and lacks {event}: {error}")


def append_event(file: Path | None, event: str, **facts: Any) -> None:
    """Write one line into the run's diary, if there is one. Raises OSError."""
    if file is None:
        return
    line = json.dumps({"time": round(time.time(), 4), "event": event, **facts}) + "\n"
    descriptor = _opened(file)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def printable(text: str) -> str:
    """Return a text without control characters, for a terminal: clouds and agents have written parts of it."""
    return "".join(it if it.isprintable() or it == "\n" else it.encode("unicode_escape").decode() for it in text)


def _opened(events_file: Path) -> int:
    """Open a run's event log for append: 0600, 0660 in a group's folder (as in elastic_trainer/host/modes.py)."""
    shared = stat.S_ISGID | stat.S_IWGRP
    is_shared = events_file.parent.stat().st_mode & shared == shared
    is_new = not events_file.exists()
    descriptor = os.open(events_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    if is_shared and is_new:
        with suppress(PermissionError):  # another user's, who has made it in between
            os.fchmod(descriptor, 0o660)
    return descriptor


def once(cloud: Cloud, policy: Policy) -> Sequence[tuple[str, int]]:
    """Return the list straight from the cloud, without agents and without a past. Raises CloudUnavailable."""
    return decide(cloud.instances(), {}, History(), 0.0, policy).hosts


def replace_whole(path: Path, text: str, at: float | None = None) -> None:
    """Replace a file so that every reader sees the old text or the new one; `at` is its time, by default now."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text)
        if at is not None:
            os.utime(new, (at, at))
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _words(why: str) -> str:
    """Return a reason without its figures, which change from turn to turn."""
    return "".join(letter for letter in why if letter not in "+-.0123456789")


def _begin(question: Callable[[], Answer]) -> Future[Answer]:
    """Ask in a thread that nobody waits for: a hanging question must not keep the poller from its end."""
    future: Future[Answer] = Future()

    def ask_and_tell() -> None:
        try:
            future.set_result(question())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask_and_tell, name="cloud", daemon=True).start()
    return future
