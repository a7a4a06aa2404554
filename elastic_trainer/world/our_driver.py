"""Our driver (launch/driver.py), as a worker sees it: heartbeats out, news and places back.

worker → heartbeat → driver → news → here → generations

What always holds:
1. Heartbeats have a thread of their own: they go on while the main thread computes, waits in a
   collective or runs the user's code, and they bring news within milliseconds.
2. Each heartbeat reports everything, with a number that no other has. So the driver ignores one
   that is late or was sent twice, and a lost one needs no repetition.
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
"""Between two tries of a newcomer that does not reach all members."""
ASK_AGAIN_S = 0.02
"""Between two tries to reach the driver."""
REVIVE_S = 0.5
"""A process that is about to start anew waits this long for the driver's answer."""
NAMED_S = 10.0
"""How long a worker waits for the driver to name the worker that writes what only memory holds."""


class OurDriver:
    """A worker's way to our driver."""

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
        """When the driver answered last, in any thread."""
        self._main = self._client(self.limits.driver_lost_s / 2)
        self._heartbeats = threading.Thread(target=self._beat, name="heartbeats", daemon=True)

    # --- places ---------------------------------------------------------------------------------

    def start(self, hooks: DriverHooks, holds_state: bool, step: int,
              arithmetic: Arithmetic | None = None, *, meets_at_once: bool = False) -> None:
        """Begin with the heartbeats. A worker that started anew goes on in its generation."""
        self._hooks = hooks
        self.generation = self.launch.revived_generation
        self._heard_at = time.monotonic()
        self._reports.change(
            generation=self.generation, holds_state=holds_state, step=step,
            phase="waiting" if self.generation else "standby", meets_at_once=meets_at_once,
            arithmetic=arithmetic.to_dict() if arithmetic else None)
        self._heartbeats.start()

    def next_place(self, holds_state: bool, step: int) -> Place:
        """Wait for a place in a generation after ours, without a limit. Raises Dismissed, RunOver.
        """
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
        news = exchange(client, self._next_heartbeat(hold_s=self.limits.beat_s, seen=seen))
        self._heard_at = time.monotonic()
        return news

    def _next_heartbeat(self, hold_s: float, seen: str) -> Heartbeat:
        saves, published = self._hooks.is_saving(), self._hooks.published()
        return self._reports.next(saves=saves, published=published, hold_s=hold_s, seen=seen)

    def _beat(self) -> None:
        client, version = self._client(self.limits.silence_s / 2), ""
        while True:
            show(self._reports.phase, self._reports.step)
            try:
                news = self._ask(client, version)
            except OSError:  # DriverUnreachable is one. No other may end the heartbeats either.
                self._is_lost = time.monotonic() - self._heard_at > self.limits.driver_lost_s
                if self._is_lost and self._reports.phase == "finished":
                    return
                time.sleep(self.limits.beat_s / 5)
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
        """True when this worker should leave, by its host or by the list of hosts."""
        return self.must_hurry() or self._news.unwanted

    def must_hurry(self) -> bool:
        """True when this worker's own host wants it to leave (SIGTERM): it has seconds."""
        return self._reports.drains

    def somebody_leaves(self) -> bool:
        """True when the host of a member of this generation has left the list."""
        return self._news.notice == "leave"

    def is_writer(self, rank: int, waited_s: float) -> bool:
        """True when this worker should write what only memory holds: the attempt is over.

        The driver names one worker, and another when that is gone. If it names none, each rank
        gives those before it a second.
        """
        return self._news.writes or waited_s >= rank + (0.0 if self._is_lost else NAMED_S)

    def is_broken(self) -> bool:
        """True when a member of our generation is gone (or this worker is, for the driver)."""
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
        """Put into the next heartbeat what this worker does. It holds the state."""
        if self._reports.phase != "reviving":
            self._reports.change(phase=phase, step=step, holds_state=True)

    def go_back(self) -> None:
        """Do nothing: the driver ends the attempt when no worker reports that it holds the state,
        and the next attempt restores."""

    def fail(self, error: str) -> None:
        """Report the user's own exception: it ends the run everywhere. Not before this worker stood
        ready: a failure while it boots may be its host's, and must not take the others with it."""
        if self._heartbeats.is_alive():
            self._report(error=error[-MAX_ERROR_CHARACTERS:])

    def fail_machine(self, fault: MachineFault) -> None:
        """Report that this machine has failed, and that this worker leaves."""
        self._report(machine=replace(fault, text=fault.text[-MAX_ERROR_CHARACTERS:]))

    def report_last_step(self, step: int) -> None:
        """Report how far this worker has come before it leaves an attempt that is over: its next
        heartbeat may come too late."""
        if not self._is_lost:
            self._report(step=step)

    def finish(self, step: int) -> None:
        """Report that the last vote has passed."""
        self._report(phase="finished", step=step)

    def revive_soon(self) -> None:
        """Report that this process is about to start anew (from any thread)."""
        self._reports.change(phase="reviving")
        with suppress(DriverUnreachable):  # the driver will notice, by our silence
            exchange(self._client(REVIVE_S), self._next_heartbeat(hold_s=0.0, seen=""))

    def _report(self, **changes: Any) -> None:
        """Send changes now, and again until the driver has them, or is lost."""
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
        """The number of our newest heartbeat: a successor counts on from there."""
        return self._reports.count


class Reports:
    """What a worker reports of itself, for all its threads."""

    def __init__(self, count: int, door: int):
        self._lock = threading.Lock()
        self._now = Heartbeat(count=count, phase="standby", generation=0, unreachable=None,
                              door=door, pid=os.getpid())
        self.drains = False
        """This worker's host wants it to leave. Set by a signal handler, so without the lock."""

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
    """Which members this worker does not reach, as far as it has tried."""

    def __init__(self) -> None:
        self.failed: tuple[str, ...] | None = None
        """None: it knows of no peers."""
        self._tried: Mapping[str, tuple[str, int]] | None = None
        self._tried_at = 0.0

    def try_again(self, peers: Mapping[str, tuple[str, int]], *, is_new_offer: bool) -> bool:
        """Try to reach the peers, if they are others, or if it failed before and time has passed.
        Returns whether it has. Network: a connection to each peer.
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
    words = client.ask(heartbeat.to_dict())
    try:
        return News.from_dict(words)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DriverUnreachable(f"the driver at {client.address} answered what is no answer to a "
                                f"heartbeat: {error!r}") from error
