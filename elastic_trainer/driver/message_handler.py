"""The messages of workers and their answers: heartbeats, and lines for the event log.

wire (signed messages) → here → membership → here → answers

What always holds:
1. A worker reports of itself only. The signature proves its name (wire/messages.py); a copy of its
   message from another address is refused.
2. An answer is held back until there is news for its worker, at most for `hold_s`. The driver never
   calls a worker (F4: Horovod's driver blocks in a call to a vanished rank 0, driver.py:191-206).
3. A refused message changes nothing. The event log has at most one line a minute for each address
   with refused messages.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elastic_trainer.driver.membership import Membership
from elastic_trainer.driver.roster import Phase, Worker, loud
from elastic_trainer.events.log import Events
from elastic_trainer.events.log_shipper import LineHandler, LineRefused, TooEarly
from elastic_trainer.events.schema import flaw_of_message
from elastic_trainer.wire.heartbeat import Heartbeat, News, RankAssignment, load_forms
from elastic_trainer.wire.messages import CONNECTIONS_EACH, MessageRefused
from elastic_trainer.wire.refused_clients import RefusedClients

HEARD_AGAIN_S = 1.0
"""The event log has a line of a worker that was silent for longer than this and four of its
heartbeats, but not long enough to be evicted."""
CLOCK_S = 60.0
"""The event log has a line of a worker whose clock differs by more. (discovery/health.py has the
same limit.)"""


@dataclass(frozen=True)
class Hooks:
    """What the message handler needs of the driver. Both are called under the lock."""

    decide_soon: Callable[[], None]
    """Something has happened on which decisions rest."""
    is_ready: Callable[[Worker, int, float], None]
    """A worker stands ready, with this pid (0: it sends none), at this time."""


@dataclass
class Contact:
    """The driver's connection data of a worker, and its last answer."""

    address: str
    probe_port: int = 0
    """The port to which its peers connect to check that they reach it; 0: it has none."""
    meets_at_once: bool = False
    """Its Horovod finds its peers by one answer of the rendezvous store."""
    seat: RankAssignment | None = None
    clock_doubts: int = 0
    """How many heartbeats in a row had another clock."""
    news: News | None = None
    version: int = -1
    """The version of the handler's basis from which `news` was made; -1: it is to be made anew."""


class MessageHandler:
    """Takes the messages of all workers. Each call takes the driver's lock."""

    def __init__(self, membership: Membership, events: Events, lock: threading.RLock,
                 hooks: Hooks):
        load_forms()
        self.membership, self.events, self.hooks = membership, events, hooks
        self.refusals = RefusedClients(partial(events.emit, "driver.stranger_refused"))
        self.lines = LineHandler(events.write, int(events.bound.get("attempt", 1)))
        self.contacts: dict[str, Contact] = {}
        self.moved_at = 0.0
        """When a worker last reported a step, or a checkpoint on its way to the store."""
        self._lock = lock
        self._news = threading.Condition(lock)
        self._version, self._notice = 0, ""
        self._basis: tuple[Any, ...] = ()
        """What the answers of this version rest on."""

    # --- messages -------------------------------------------------------------------------------

    def take(self, message: Mapping[str, Any], address: str) -> dict[str, Any]:
        """Take a message, and return its answer when it is due. Raises MessageRefused."""
        if wrong := flaw_of_message(message):
            raise MessageRefused(f"a malformed message: {wrong}")
        with self._lock:
            if "line" in message:
                return self._take_line(message, address)
            heartbeat = Heartbeat.from_dict(message)
            deadline = time.monotonic() + self._take_heartbeat(heartbeat, address)
            while True:
                news, left = self._news_for(heartbeat.worker), deadline - time.monotonic()
                if news.version != heartbeat.seen or left <= 0:
                    if news.leave:
                        self.membership.dismiss(heartbeat.worker)
                    return news.to_dict()
                self._news.wait(left)

    def _take_line(self, message: Mapping[str, Any], address: str) -> dict[str, Any]:
        """Write a worker's line into the event log, and return the outcome.

        The worker waits for that answer, so a refused line is answered, too.
        """
        worker = self.membership.workers.get(str(message["worker"]))
        if worker is None or worker.phase is Phase.GONE:
            return {}
        try:
            self.lines.take(dict(message))
        except TooEarly:
            return {"early": True}
        except LineRefused as refused:
            self.refusals.refuse(address, str(refused))
            return {"refused": str(refused)}
        return {}

    def _take_heartbeat(self, heartbeat: Heartbeat, address: str) -> float:
        """Take a heartbeat; return for how many seconds its answer may be held back."""
        now, name = time.monotonic(), heartbeat.worker
        worker = self.membership.workers.get(name)
        hold_s = self.membership.hold_s() if heartbeat.hold_s else 0.0
        if worker is None:  # evicted a while ago, and forgotten
            return hold_s
        before, was, step_before = worker.phase, loud(worker), worker.step
        # Up to the last decision: while the driver itself stands still no worker is silent.
        silent_s = self.membership.decided_at - worker.heard_at
        if self.membership.reported(name, now, heartbeat):
            self._note(heartbeat, address)
            if heartbeat.saves or worker.step > step_before:
                self.moved_at = now
            if before is not Phase.BOOTING:
                self._log_oddities(worker, silent_s, heartbeat)
        elif name in self.contacts and self.contacts[name].address != address:
            raise MessageRefused("a copy of another worker's message")
        if before is Phase.BOOTING and worker.phase is not before:
            self.hooks.is_ready(worker, heartbeat.pid, now)
        if loud(worker) != was:
            if name in self.contacts:
                self.contacts[name].version = -1
            self.hooks.decide_soon()
        return hold_s

    def _note(self, heartbeat: Heartbeat, address: str) -> None:
        """Note the way to a worker. Only a new heartbeat proves that the worker is there."""
        contact = self.contacts.setdefault(heartbeat.worker, Contact(address))
        contact.address, contact.probe_port = address, heartbeat.probe_port
        contact.meets_at_once = heartbeat.meets_at_once

    def _log_oddities(self, worker: Worker, silent_s: float, heartbeat: Heartbeat) -> None:
        """Log what costs nothing yet: a connection with gaps, a wrong clock."""
        every_s = self.membership.limits.heartbeat_s
        allowed_s = max(HEARD_AGAIN_S, 4 * every_s) + self.membership.hold_s() - every_s
        if silent_s > allowed_s:
            self.events.emit("driver.worker_heard_again", worker=worker.name,
                             silent_s=round(silent_s, 2))
        off_s = 0.0 if heartbeat.time is None else heartbeat.time - time.time()
        contact = self.contacts[worker.name]
        contact.clock_doubts = contact.clock_doubts + 1 if abs(off_s) > CLOCK_S else 0
        if contact.clock_doubts == 2:  # a single one may be old: the driver may have been frozen
            self.events.emit("driver.clock_differs", worker=worker.name, host=worker.host,
                             off_s=round(off_s, 1))

    # --- answers --------------------------------------------------------------------------------

    def _news_for(self, name: str) -> News:
        contact = self.contacts.get(name)
        if contact and contact.news and contact.version == self._version:
            return contact.news
        news = self.membership.news_for(name, time.monotonic(), self._notice)
        if news.place and contact and contact.seat:
            news = replace(news, place=contact.seat)
        peers = ((peer, self.contacts.get(peer)) for peer in self.membership.peers_of(name))
        reach = {peer: (known.address, known.probe_port) for peer, known in peers
                 if known and known.probe_port}
        news = replace(news, reach=reach)
        news = replace(news, version=hashlib.sha256(repr(news).encode()).hexdigest()[:16])
        if contact:
            contact.news, contact.version = news, self._version
        return news

    def turned(self, now: float) -> bool:
        """Answer the workers for which a decision has brought news; False if it has for none.

        Call it after each decision, under the lock.
        """
        self._notice = self.membership.notice(now)
        basis = self.membership.basis(self._notice)
        if basis == self._basis:
            return False
        self._basis = basis
        self.spread()
        return True

    def spread(self) -> None:
        """Let each worker whose answer is held back see whether there is news for it."""
        self._version += 1
        self._news.notify_all()
        for name in self.contacts.keys() - self.membership.workers.keys():
            del self.contacts[name]

    def addresses(self) -> dict[str, str]:
        """Return the addresses of the workers, by name."""
        return {name: contact.address for name, contact in self.contacts.items()}

    def seat(self, name: str, seat: RankAssignment) -> None:
        """Give a worker its place in the newest generation."""
        self.contacts[name].seat = seat

    def expected_connections(self) -> int:
        """Return how many connections the workers may have that live, or that are to start."""
        slots = sum(self.membership.roster.listed.values())
        return CONNECTIONS_EACH * max(len(self.membership.workers), slots)

    def forget(self, worker: str) -> int:
        """Forget a worker that is gone; return how many of its lines were refused."""
        return self.lines.forget(worker)
