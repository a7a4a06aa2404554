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
from elastic_trainer.wire.heartbeat import Heartbeat, MachineFault, News, Seat
from elastic_trainer.wire.messages import DriverClient, DriverUnreachable
from elastic_trainer.world.arithmetic import Arithmetic
from elastic_trainer.world.place import (
    MAX_ERROR_CHARACTERS,
    Dismissed,
    DriverHooks,
    Place,
    RunOver,
)
from elastic_trainer.world.reach import (
    REACH_S,
    answer_door,
    interface_towards,
    open_door,
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


class OurDriver:
    """A worker's connection to our driver."""

    def __init__(self, launch: Launch):
        assert launch.driver is not None
        self.launch, self.limits = launch, launch.limits
        self.generation = 0
        self._interface = interface_towards(launch.driver.rpartition(":")[0])
        self._door = open_door(launch.driver)
        self._reports = Reports(launch.revived_count, self._door.getsockname()[1])
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

    def next_place(self, holds_state: bool, step: int) -> Place:
        """Wait without a limit for a place in a later generation. Raises Dismissed, RunOver."""
        accepted, seen, knocks = 0, "", Knocks()
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
            if knocks.try_again(news.reach, is_new_offer=news.offer != accepted):
                self._reports.change(unreachable=knocks.failed)
            accepted = news.offer

    def _raise_if_out(self, news: News) -> None:
        if news.over:
            raise RunOver(news.over, news.detail)
        if news.evicted or news.leave or (news.finished and not self.generation):
            raise Dismissed

    def _take(self, seat: Seat) -> Place:
        self.generation = seat.generation
        self._reports.change(phase="training", generation=seat.generation, accepted=0,
                             arithmetic=None)  # the driver has it
        return Place(generation=seat.generation, rank=seat.rank, size=seat.size,
                     local_rank=seat.local_rank, local_size=seat.local_size,
                     rendezvous=(seat.address, seat.port), at_once=seat.at_once)

    # --- heartbeats -----------------------------------------------------------------------------

    def _client(self, timeout_s: float) -> DriverClient:
        assert self.launch.driver is not None
        return DriverClient(self.launch.driver, self.launch.worker, self.launch.key, timeout_s)

    def _ask(self, client: DriverClient, seen: str) -> News:
        """Send a heartbeat and wait for news. Raises DriverUnreachable."""
        heartbeat = self._next_heartbeat(hold_s=self.limits.heartbeat_s, seen=seen)
        news = exchange(client, heartbeat)
        self._heard_at = time.monotonic()
        if heartbeat.proof is not None:
            self._reports.change(proof=None)  # the driver has it
        return news

    def _next_heartbeat(self, hold_s: float, seen: str) -> Heartbeat:
        saves, published = self._hooks.is_saving(), self._hooks.published()
        return self._reports.next(saves=saves, published=published, hold_s=hold_s, seen=seen,
                                  at=self._hooks.at())

    def _send_heartbeats(self) -> None:
        client, version = self._client(self.limits.silence_s / 2), ""
        while True:
            show(self._reports.phase, self._reports.step)
            try:
                news = self._ask(client, version)
            except OSError:  # DriverUnreachable is one; no OSError may end the heartbeats
                self._is_lost = time.monotonic() - self._heard_at > self.limits.driver_lost_s
                if self._is_lost and self._reports.phase == "finished":
                    return
                time.sleep(self.limits.heartbeat_s / 5)
                continue
            self._news, self._is_lost, version = news, False, news.version
            if self._reports.phase == "training" and self.is_broken():
                self._hooks.on_broken()
            answer_door(self._door)

    # --- news -----------------------------------------------------------------------------------

    def wants_change(self) -> bool:
        """True when the driver wants a new generation, or this worker should drain."""
        return bool(self._news.notice) or self._reports.drains

    def wants_stop(self) -> bool:
        """True when the attempt should stop at the next step: the driver is lost or was stopped."""
        return self._is_lost or bool(self._news.over)

    def drains(self) -> bool:
        """True when its host, or the list of hosts, wants this worker to leave."""
        return self.must_hurry() or self._news.unwanted

    def must_hurry(self) -> bool:
        """True when this worker's own host wants it to leave (SIGTERM), within seconds."""
        return self._reports.drains

    def is_host_leaving(self) -> bool:
        """True when the host of a member of this generation has left the list."""
        return self._news.notice == "leave"

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

    def is_finished(self) -> bool:
        """True when a member has seen the last vote pass."""
        return self._news.finished

    # --- reports --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ask to leave at the next step boundary. Takes no lock: a signal handler may call it."""
        self._reports.drains = True

    def note(self, phase: str, step: int) -> None:
        """Put into the next heartbeat what this worker does, and that it holds the state."""
        if self._reports.phase != "reviving":
            self._reports.change(phase=phase, step=step, holds_state=True)

    def go_back(self) -> None:
        """Do nothing: if no worker reports that it holds the state, the driver ends the attempt,
        and the next attempt restores."""

    def fail(self, error: str) -> None:
        """Report the user's own exception, which ends the run on all workers.

        A worker that is not ready does not report it: the cause may be its host, and the other
        workers must not end with it.
        """
        if self._heartbeats.is_alive():
            self._report(error=error[-MAX_ERROR_CHARACTERS:])

    def leave(self, why: str, *, is_saved: bool = True) -> None:
        """Report that the run stops here. It ends on all workers, and can be resumed."""
        if self._heartbeats.is_alive():
            self._report(**{"left" if is_saved else "unsaved": why[-MAX_ERROR_CHARACTERS:]})

    def fail_machine(self, fault: MachineFault) -> None:
        """Report that this machine has failed, and that this worker leaves."""
        self._report(machine=replace(fault, text=fault.text[-MAX_ERROR_CHARACTERS:]))

    def differ(self) -> None:
        """Report that this worker holds other bits, and leaves."""
        self._report(differs=True)

    def report_last_step(self, step: int) -> None:
        """Report the last step before this worker leaves an attempt that is over: the next
        heartbeat may come too late."""
        if not self._is_lost:
            self._report(step=step)

    def finish(self, step: int) -> None:
        """Report that the last vote has passed."""
        self._report(phase="finished", step=step)

    def revive_soon(self) -> None:
        """Report that this process is about to restart in place. Any thread may call it."""
        self._reports.change(phase="reviving")
        with suppress(DriverUnreachable):  # the missing heartbeats inform the driver
            exchange(self._client(REVIVE_S), self._next_heartbeat(hold_s=0.0, seen=""))

    def _report(self, **changes: Any) -> None:
        """Send changes until the driver has them or is lost."""
        self._reports.change(**changes)
        heartbeat, since = self._next_heartbeat(hold_s=0.0, seen=""), time.monotonic()
        while True:
            try:
                exchange(self._main, heartbeat)
                return
            except DriverUnreachable:
                if time.monotonic() - since > self.limits.driver_lost_s:
                    self._is_lost = True
                    return
                time.sleep(ASK_AGAIN_S)

    # --- what differs between drivers -----------------------------------------------------------

    def interface(self) -> str:
        """Return the network interface that leads to the driver."""
        return self._interface

    def drains_on_sigterm(self) -> bool:
        """Always."""
        return True

    counts_idle_generations = compares_arithmetic = takes_machine_faults = drains_on_sigterm
    revives_workers = drains_on_sigterm

    @property
    def count(self) -> int:
        """The number of our newest heartbeat, from which a successor continues."""
        return self._reports.count


class Reports:
    """The facts that a worker reports, for all its threads."""

    def __init__(self, count: int, door: int):
        self._lock = threading.Lock()
        self._now = Heartbeat(count=count, phase="standby", generation=0, unreachable=None,
                              door=door, pid=os.getpid())
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


class Knocks:
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


def exchange(client: DriverClient, heartbeat: Heartbeat) -> News:
    """Send a heartbeat and return the answer. Raises DriverUnreachable."""
    answer = client.ask(heartbeat.to_dict())
    try:
        return News.from_dict(answer)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DriverUnreachable(f"the driver at {client.address} sent an invalid answer to a "
                                f"heartbeat: {error!r}") from error
