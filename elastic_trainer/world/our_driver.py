"""The worker's side of our driver (driver/driver.py): heartbeats to it, news and places from it.

worker → heartbeat → driver → news → here → generations

What always holds:
1. Heartbeats have a thread of their own. They continue while the main thread computes, waits in a
   collective or runs the user's code, and their answers bring news within milliseconds.
2. Each heartbeat reports the whole state of the worker, with a number of its own. So the driver
   ignores a heartbeat that is late or was sent twice, and a lost one is not repeated.
3. A worker that cannot reach its driver for `driver_lost_s` stops at its next step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from elastic_trainer.config import Launch
from elastic_trainer.host.processes import show
from elastic_trainer.wire.heartbeat import (
    Heartbeat,
    MachineFault,
    News,
    RankAssignment,
    load_forms,
)
from elastic_trainer.wire.messages import DriverClient, DriverUnreachable
from elastic_trainer.world.arithmetic import Arithmetic
from elastic_trainer.world.place import (
    MAX_ERROR_CHARACTERS,
    Dismissed,
    Driver,
    DriverHooks,
    RunOver,
    Wants,
)
from elastic_trainer.world.reach import (
    REACH_S,
    close_probes,
    interface_towards,
    open_listener,
    unreachable,
)

REACH_AGAIN_S = 2.0
"""The time between two tries of a newcomer that does not reach all members."""
ASK_AGAIN_S = 0.02
"""The time between two tries to reach the driver."""
REVIVE_S = 0.5
"""The time for which a process that is about to restart in place waits for the driver."""
NAMED_S = 10.0
"""The time for which a worker waits until the driver names the worker that writes the state."""


class InvalidAnswer(RuntimeError):
    """The driver has this worker's key, and its answer to a heartbeat has another form: it is of
    another version. To ask again does not help."""


class OurDriver(Driver):
    """A worker's connection to our driver.

    `go_back` does nothing: if no worker reports that it holds the state, the driver ends the
    attempt, and the next attempt restores.
    """

    is_mended = drains_on_sigterm = True

    def __init__(self, launch: Launch):
        assert launch.driver is not None
        load_forms()
        self.launch, self.limits = launch, launch.limits
        self.generation = 0
        self.interface = interface_towards(launch.driver.rpartition(":")[0])
        self._listener = open_listener(launch.driver)
        self._reports = Reports(launch.revived_count, self._listener.getsockname()[1])
        self._hooks = DriverHooks()
        self._news = News()
        self._is_lost = False
        self._heard_at = time.monotonic()
        """The time of the driver's last answer, in any thread."""
        self._main = self._client(self.limits.driver_lost_s / 2)
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="heartbeats",
                                            daemon=True)

    # --- places ---------------------------------------------------------------------------------

    def start(self, hooks: DriverHooks, holds_state: bool, step: int,
              arithmetic: Arithmetic | None = None, *, meets_at_once: bool = False) -> None:
        """Start the heartbeats. A worker that restarted in place continues in its generation."""
        self._hooks = hooks
        self.generation = self.launch.revived_generation
        self._heard_at = time.monotonic()
        self._reports.change(
            generation=self.generation, holds_state=holds_state, step=step,
            phase="waiting" if self.generation else "standby", meets_at_once=meets_at_once,
            arithmetic=arithmetic.to_dict() if arithmetic else None,
            proof=arithmetic.proof.to_dict() if arithmetic and arithmetic.proof else None)
        self._heartbeats.start()

    def next_place(self, holds_state: bool, step: int) -> RankAssignment:
        """Wait without a limit for a place in a later generation. Raises Dismissed, RunOver,
        InvalidAnswer."""
        accepted, seen, probes = 0, "", Probes()
        phase = "waiting" if self.generation else "standby"
        while True:
            self._reports.change(phase=phase, accepted=accepted, holds_state=holds_state, step=step)
            try:
                news = self._ask(self._main, seen)
            except DriverUnreachable as error:
                if time.monotonic() - self._heard_at > self.limits.driver_lost_s:
                    self._is_lost = True
                    raise RunOver("failed", f"driver lost: {error}") from error
                time.sleep(ASK_AGAIN_S)
                continue
            self._news, seen = news, news.version
            self._raise_if_out(news)
            if news.place and news.place.generation > self.generation:
                return self._take(news.place)
            if news.finished:
                raise RunOver("finished", "")
            if news.writes:
                self._hooks.write_alone()
            if probes.try_again(news.reach, is_new_offer=news.offer != accepted):
                self._reports.change(unreachable=probes.failed)
            accepted = news.offer

    def _raise_if_out(self, news: News) -> None:
        if news.over:
            raise RunOver(news.over, news.detail)
        if news.evicted or news.leave or (news.finished and not self.generation):
            raise Dismissed

    def _take(self, assigned: RankAssignment) -> RankAssignment:
        self.generation = assigned.generation
        self._reports.change(phase="training", generation=self.generation, accepted=0,
                             arithmetic=None)  # the driver has it
        return assigned

    # --- heartbeats -----------------------------------------------------------------------------

    def _client(self, timeout_s: float) -> DriverClient:
        assert self.launch.driver is not None
        return DriverClient(self.launch.driver, self.launch.worker, self.launch.key, timeout_s)

    def _ask(self, client: DriverClient, seen: str) -> News:
        """Send a heartbeat and wait for news. Raises DriverUnreachable, InvalidAnswer."""
        heartbeat = self._next_heartbeat(hold_s=self.limits.heartbeat_s, seen=seen)
        news = exchange(client, heartbeat)
        self._heard_at = time.monotonic()
        if heartbeat.proof is not None:
            self._reports.change(proof=None)  # the driver has it
        return news

    def _next_heartbeat(self, hold_s: float, seen: str) -> Heartbeat:
        saves, published = self._hooks.is_saving(), self._hooks.published()
        return self._reports.next(saves=saves, published=published, hold_s=hold_s, seen=seen,
                                  at=self._hooks.at(), needs=self._hooks.needs())

    def _send_heartbeats(self) -> None:
        client, version = self._client(self.limits.silence_s / 2), ""
        while True:
            show(self._reports.phase, self._reports.step)
            try:
                news = self._ask(client, version)
            except (OSError, InvalidAnswer) as error:  # no OSError may end the heartbeats
                self._is_lost = isinstance(error, InvalidAnswer) or (
                    time.monotonic() - self._heard_at > self.limits.driver_lost_s)
                if self._is_lost and self._reports.phase == "finished":
                    return
                time.sleep(self.limits.heartbeat_s / 5)
                continue
            self._news, self._is_lost, version = news, False, news.version
            if self._reports.phase == "training" and self.is_broken():
                self._hooks.on_broken()
            close_probes(self._listener)

    # --- news -----------------------------------------------------------------------------------

    def wants(self) -> Wants:
        """Return what the driver wants now. A driver that is lost has stopped."""
        news, is_urgent = self._news, self._reports.drains
        return Wants(change=bool(news.notice) or is_urgent, stop=self._is_lost or bool(news.over),
                     drains=is_urgent or news.unwanted, is_urgent=is_urgent,
                     host_leaves=news.notice == "leave")

    def is_writer(self, rank: int, waited_s: float) -> bool:
        """True when this worker should write the state, because the attempt is over.

        The driver names one worker, and another one if that worker is gone. If it names none, each
        rank waits a second for each lower rank.
        """
        return self._news.writes or waited_s >= rank + (0.0 if self._is_lost else NAMED_S)

    def is_broken(self) -> bool:
        """True when a member of our generation is gone, or the driver has evicted this worker."""
        news = self._news
        is_ours = news.place is not None and news.place.generation == self.generation
        return news.evicted or (is_ours and bool(news.dead))

    # --- reports --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ask to leave at the next step boundary. Takes no lock: a signal handler may call it."""
        self._reports.drains = True

    def note(self, phase: str, step: int) -> None:
        """Put into the next heartbeat what this worker does, and that it holds the state."""
        if self._reports.phase != "reviving":
            self._reports.change(phase=phase, step=step, holds_state=True)

    def revive_soon(self) -> None:
        """Report that this process is about to restart in place. Any thread may call it."""
        self._reports.change(phase="reviving")
        with suppress(DriverUnreachable, InvalidAnswer):  # the missing heartbeats inform the driver
            exchange(self._client(REVIVE_S), self._next_heartbeat(hold_s=0.0, seen=""))

    def report(self, **facts: Any) -> None:
        """Send what changes until the driver has it or is lost.

        A worker that is not ready reports nothing: the cause may be its host, and the other workers
        must not end with it.
        """
        is_last_step = facts.keys() == {"step"}  # of an attempt that a lost driver has ended
        if not self._heartbeats.is_alive() or (is_last_step and self._is_lost):
            return
        self._reports.change(**{name: _shortened(fact) for name, fact in facts.items()})
        heartbeat, since = self._next_heartbeat(hold_s=0.0, seen=""), time.monotonic()
        while True:
            try:
                exchange(self._main, heartbeat)
                return
            except InvalidAnswer:
                return  # the driver has the report
            except DriverUnreachable:
                if time.monotonic() - since > self.limits.driver_lost_s:
                    self._is_lost = True
                    return
                time.sleep(ASK_AGAIN_S)

    @property
    def count(self) -> int:  # type: ignore[override]
        """The number of our newest heartbeat, from which a successor continues."""
        return self._reports.count


class Reports:
    """The facts that a worker reports, for all its threads."""

    def __init__(self, count: int, probe_port: int):
        self._lock = threading.Lock()
        self._now = Heartbeat(count=count, phase="standby", generation=0, unreachable=None,
                              probe_port=probe_port, pid=os.getpid())
        self.drains = False
        """The host wants this worker to leave. A signal handler sets it, so without the lock."""

    @property
    def count(self) -> int:
        return self._now.count

    @property
    def phase(self) -> str:
        return self._now.phase

    @property
    def step(self) -> int:
        return self._now.step

    def change(self, **changes: Any) -> None:
        """Change what this and all later heartbeats report."""
        with self._lock:
            self._now = replace(self._now, **changes)

    def next(self, **changes: Any) -> Heartbeat:
        """Return the next heartbeat, with the next number."""
        with self._lock:
            self._now = replace(self._now, count=self._now.count + 1, time=time.time(),
                                drains=self.drains, **changes)
            return self._now


class Probes:
    """The members that this worker did not reach when it last tried."""

    def __init__(self) -> None:
        self.failed: tuple[str, ...] | None = None
        """None: the driver has named no peers."""
        self._tried: Mapping[str, tuple[str, int]] | None = None
        self._tried_at = 0.0

    def try_again(self, peers: Mapping[str, tuple[str, int]], *, is_new_offer: bool) -> bool:
        """Try to reach the peers if they are new, or if some were not reached REACH_AGAIN_S ago.

        Returns whether it tried. Network: a connection to each peer.
        """
        is_due = is_new_offer or time.monotonic() - self._tried_at > REACH_AGAIN_S
        if peers == self._tried and not (self.failed and is_due):
            return False
        failed = tuple(unreachable(peers, REACH_S))
        self._tried, self._tried_at = peers, time.monotonic()
        self.failed = failed if peers else None
        return True


def _shortened(fact: Any) -> Any:
    """Return a fact with the end of its text, where that is long."""
    if isinstance(fact, MachineFault):
        return replace(fact, text=_shortened(fact.text))
    return fact[-MAX_ERROR_CHARACTERS:] if isinstance(fact, str) else fact


def exchange(client: DriverClient, heartbeat: Heartbeat) -> News:
    """Send a heartbeat and return the answer. Raises DriverUnreachable, InvalidAnswer."""
    answer = client.ask(heartbeat.to_dict())
    try:
        return News.from_dict(answer)
    except ValueError as error:
        raise InvalidAnswer(
            f"The driver at {client.address} sent an invalid answer to a heartbeat. Install the "
            f"same version of elastic-trainer on all hosts. ({error})") from error
