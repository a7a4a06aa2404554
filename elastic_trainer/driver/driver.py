"""The mended driver: one attempt, which one dead host cannot stop.

hosts, heartbeats, exits → here → membership (decides) → here → processes, stores, event log

Facts about Horovod 0.28.1 that this project answers, by the numbers that its comments use:
- F1  A failure inside `hvd.init()` aborts all participants (operations.cc:444).
      → membership, 06-init-fails.patch. Where that is missing, or where Gloo throws in a
      thread of its own → world/revive
- F2  After an error a rank keeps its sockets open (gloo_context.cc:385-388). → world
- F3  The driver's barrier waits for a dead host's ssh, without a limit (registration.py:121).
      → membership, process
- F4  It blocks in a call to a vanished rank 0 (driver.py:191-206). → message_handler
- F5  Its rendezvous listens with a backlog of 5: a dropped SYN costs a second. → rendezvous
- F6, F7, F8  TorchState: a newcomer's first step; `sync` saves nothing; `restore` aliases.
      → state/live_state
- F9  skip_sync deadlocks when a worker is new (state.py). → world: reconcile
- F10 Its rendezvous unpickles what any client puts there (rendezvous.py:44-47).
      → rendezvous, wire (signed JSON)
- F11 Exit code 0 of one worker ends the job for all (registration.py:146-149).
      → training, world/plain_driver

It replaces one function of Horovod's launcher (horovodrun.py). Every generation has a rendezvous
store of its own, so a late worker of an older generation cannot disturb it.
"""

from __future__ import annotations

import math
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_trainer.config import (
    ALLOCATOR,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_UNSAVED,
    EXIT_USER_ERROR,
    HASH_SEED,
    Attempt,
)
from elastic_trainer.driver import local_gpus
from elastic_trainer.driver.ends import host_kept_out
from elastic_trainer.driver.hosts import (
    DISCOVERY_EVERY_S,
    DISCOVERY_FAILS,
    Discovery,
    Locations,
    own_address,
)
from elastic_trainer.driver.membership import Membership
from elastic_trainer.driver.message_handler import Hooks, MessageHandler
from elastic_trainer.driver.process import WorkerProcess
from elastic_trainer.driver.progress import Reached
from elastic_trainer.driver.reach import Reach
from elastic_trainer.driver.rendezvous import Rendezvous
from elastic_trainer.driver.roster import (
    Action,
    End,
    Form,
    Phase,
    Report,
    Start,
    Stop,
    Worker,
)
from elastic_trainer.driver.stalls import Stalls, Stragglers
from elastic_trainer.driver.standby_shim import through_shim
from elastic_trainer.events.log import Events
from elastic_trainer.host.stacks import FAULTHANDLER
from elastic_trainer.host.tracebacks import Tracebacks
from elastic_trainer.wire.heartbeat import RankAssignment
from elastic_trainer.wire.messages import MessageServer
from elastic_trainer.wire.plain import plain_text
from elastic_trainer.wire.seal import worker_key

TURN_S = 0.1
"""The longest interval between two decisions."""
STORES_KEPT = 2
"""No worker can still be in the `hvd.init()` of the generation before the last one."""
STOP_S = 30.0
"""The time that workers have for their last step and checkpoint when the attempt is stopped. It
counts from the stop, the last finished step, or the last heartbeat that reports a moving upload."""
STOP_MOST_S = 900.0
"""The limit of that time in all. A worker abandons an upload without progress after the same time.
"""
STOP_AGAIN_S = 2.0
"""A stop signal this long after the first one ends the workers at once. An earlier one is the same
stop: a service manager signals the supervisor, which signals the driver, and the driver."""
LAST_OUTPUT_S = 2.0
"""The time for which the driver waits for the last lines of workers that have ended. A process that
a worker left behind may hold its output."""


def ended_early(code: int, host: str) -> str:
    """Return what to print of a command that has ended while its worker booted."""
    how = "before its worker stood ready" if code else "and never began to train"
    return (f"elastic-trainer: The command ended with exit code {code} on {host} {how}. The driver "
            f"starts it there again, after a back-off, while that host is listed.")


def stop_deadline(began: float, moved_at: float) -> float:
    """Return until when the driver waits for the workers of an attempt stopped at `began`."""
    return min(began + STOP_MOST_S, max(began, moved_at) + STOP_S)


def exit_code_of(end: End, *, is_left: bool) -> int:
    """Return the driver's exit code. `is_left`: the user's loop was left by break or return."""
    if end.verdict == "interrupted" and is_left:
        return EXIT_INTERRUPTED  # after a signal the supervisor, which sent it, knows
    codes = {"finished": EXIT_FINISHED, "user_error": EXIT_USER_ERROR, "unsaved": EXIT_UNSAVED}
    return codes.get(end.verdict, 1)


def membership_of(settings: Any, attempt: Attempt) -> Membership:
    """Return the membership of an attempt with horovodrun's settings."""
    return Membership(
        settings.num_proc, settings.min_num_proc, settings.max_num_proc, limits=attempt.limits,
        wait_s=settings.elastic_timeout, refuses_mixed=attempt.mixed_hardware != "warn",
        allow_change=attempt.allow_change,
        has_trained=bool(attempt.resume_step or attempt.lost_attempts))


def worker_environment(start: Start, address: str, port: int, key: bytes,
                       here: Mapping[str, str], zone: str, min_workers: int) -> dict[str, str]:
    """Return the variables that name a worker's place, its driver and its own key; with `here`, the
    driver's environment on this machine, its GPU too."""
    return {
        "HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": start.host,
        "HOROVOD_LOCAL_RANK": str(start.slot), "ELASTIC_TRAINER_SLOT": str(start.slot),
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "PYTHONUNBUFFERED": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
        "ELASTIC_TRAINER_DRIVER": f"{address}:{port}", "ELASTIC_TRAINER_ZONE": zone,
        "ELASTIC_TRAINER_MIN_WORKERS": str(min_workers),
        "ELASTIC_TRAINER_KEY": worker_key(key, start.worker).hex(),
        "ELASTIC_TRAINER_WORKER": start.worker} | local_gpus.place_of(here, start.host)


def log_hosts(events: Events, before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Log which hosts have joined the list and left it."""
    for host in after.keys() - before.keys():
        events.emit("driver.host_added", host=host, slots=after[host])
    for host in before.keys() - after.keys():
        events.emit("driver.host_removed", host=host)


def log_start(events: Events, start: Start, process: WorkerProcess, address: str,
              reach: Reach) -> None:
    """Log that a worker has been started, and how its host is reached."""
    events.emit("driver.worker_started", host=start.host, address=address, slot=start.slot,
                worker=start.worker, pid=process.process.pid, over_ssh=process.is_remote,
                by_agent=reach.by_agent)


def await_output(forwards: list[threading.Thread]) -> None:
    """Wait for the workers' last lines: a traceback is what the user needs most."""
    deadline = time.monotonic() + LAST_OUTPUT_S
    for thread in forwards:
        thread.join(max(0.0, deadline - time.monotonic()))


def seats(workers: list[Worker], generation: int, address: str, port: int,
          at_once: bool) -> Iterator[RankAssignment]:
    """Yield the place of each member of a generation, by rank."""
    for rank, worker in enumerate(workers):
        neighbours = [w.name for w in workers if w.host == worker.host]
        yield RankAssignment(generation=generation, rank=rank, size=len(workers),
                   local_rank=neighbours.index(worker.name), local_size=len(neighbours),
                   address=address, port=port, at_once=at_once)


class MendedDriver:
    """One attempt: acts for `Membership`, which decides. `settings` are horovodrun's."""

    def __init__(self, settings: Any, env: dict[str, str], command: list[str], events: Events):
        self.settings, self.env, self.command, self.events = settings, env, command, events
        self.attempt = Attempt.from_environment(env)
        self.reach = Reach.of(settings, self.attempt)
        self.key = secrets.token_bytes(32)
        """This attempt's key. It is in this process's memory only, so that workers of an older
        attempt have no valid key."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Wakes the main thread, which decides."""
        self.membership = membership_of(settings, self.attempt)
        self.messages = MessageHandler(self.membership, events, self.lock,
                                Hooks(self._decide_soon, self._worker_is_ready))
        self.locations, self.tracebacks = Locations(), Tracebacks()
        self.reached = Reached(self.attempt.newest_step, self.attempt.resume_step)
        self.processes: dict[str, WorkerProcess] = {}
        self.forwards: list[threading.Thread] = []
        """The threads that read workers' output."""
        self.stalls = Stalls(self.membership, self.processes, self.messages.addresses, events.emit)
        self.stragglers = Stragglers(self.membership, self.attempt.replaces_stragglers,
                                     events.emit)
        self.stores: list[Rendezvous] = []
        self.address = ""
        self.server: MessageServer | None = None
        self.interrupted_at: float | None = None
        self.must_end = False
        """A second stop signal came: the driver does not wait for the workers any more."""
        self.ended: End | None = None

    def run(self) -> int:
        """Run the attempt to its end; returns the exit code.

        Raises ConfigError, DiscoveryUnavailable, HostsUnreachable, WaitedTooLong.
        """
        discovery = Discovery(self.settings, self.events, self.attempt.had_hosts)
        hosts = discovery.first_hosts()
        self.locations.addresses, self.locations.zones = discovery.addresses, discovery.zones
        self.address = own_address(self.settings, map(self.locations.reached_at, hosts))
        self.server = MessageServer(self.address, self.key, self.messages.take,
                                    self.messages.refusals.refuse,
                                    self.messages.expected_connections)
        threading.Thread(target=self.server.serve_forever, name="messages", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):  # in a thread: it waits for the lock
            signal.signal(number, lambda *_: threading.Thread(
                target=self.interrupt, daemon=True).start())
        self.locations.look_up(hosts)
        with self.changed:
            self._take_hosts(hosts)
        threading.Thread(target=self._follow_hosts, args=(discovery,), name="discovery",
                         daemon=True).start()
        while not self.ended:
            with self.changed:
                if not self.ended:
                    self._turn()
                    self._report_reached()
                    self.stalls.look(time.monotonic())
                    self.stragglers.look(time.monotonic())
                    self.changed.wait(TURN_S)
            self.messages.refusals.log(time.monotonic())
        return self.stop_all()

    # --- what happens ---------------------------------------------------------------------------

    def _follow_hosts(self, discovery: Discovery) -> None:
        while not self.ended:
            time.sleep(DISCOVERY_EVERY_S)
            try:
                hosts = discovery.hosts_now()
            except DISCOVERY_FAILS:
                continue  # unknown is never empty: the list stays
            self.locations.look_up(hosts)
            with self.changed:
                if hosts != self.membership.roster.listed:
                    self._take_hosts(hosts)
                    self._turn()

    def _take_hosts(self, hosts: dict[str, int]) -> None:
        log_hosts(self.events, self.membership.roster.listed, hosts)
        self.membership.hosts_listed(hosts)

    def _worker_is_ready(self, worker: Worker, pid: int, now: float) -> None:
        """Note the worker's own pid: behind a shim, or on another host, it is not the process's."""
        process = self.processes[worker.name]
        process.worker_pid = pid or process.worker_pid
        self.events.emit("driver.worker_ready", worker=worker.name, pid=process.worker_pid,
                         boot_s=round(now - worker.started_at, 3))

    def _decide_soon(self) -> None:
        """Wake the main thread, which decides once for all that arrives while it is busy."""
        if self.ended:  # the main thread only waits for workers' exits
            self._turn()
        else:
            self.changed.notify_all()

    def _await_exit(self, process: WorkerProcess) -> None:
        """Wait for a worker's exit, in a thread of its own, and report it."""
        code = process.wait()
        place = process.died_in(code)
        with self.changed:
            self.reached.receive(*self.membership.reached())  # with this worker's last heartbeat
            refused = self.messages.forget(process.name)
            reason = self.membership.exited(process.name, code, time.monotonic(), place)
            known = {"died_in": place, "lines_refused": refused}
            self.events.emit("driver.worker_gone", worker=process.name, host=process.host,
                             pid=process.worker_pid, exit_code=code, reason=reason,
                             **{name: fact for name, fact in known.items() if fact})
            del self.processes[process.name]
            if reason == "differed" and not self.membership.workers[process.name].has_differed:
                self._act(host_kept_out(self.membership.roster, process.host, time.monotonic()))
            if reason == "boot_failed" and not self.membership.blame.user_error:
                print(ended_early(code, process.host), file=sys.stderr)
            self._turn()

    # --- what to do (under the lock) ------------------------------------------------------------

    def _turn(self) -> None:
        """Act until membership decides nothing more, and answer the workers with news."""
        while actions := self.membership.decide(time.monotonic()):
            for action in actions:
                self._act(action)
        has_news = self.messages.turned(time.monotonic())
        if has_news and self.stores and self.membership.roster.is_broken():
            self.stores[-1].abandon()
        if self.ended or not self.processes:
            self.changed.notify_all()

    def _act(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Stop():
                self._stop(action)
            case Form():
                self._form(action)
            case Report(event, fields, sentence):
                self.events.emit(event, **fields)
                if sentence:
                    print(f"elastic-trainer: {sentence}", file=sys.stderr)
            case End():
                self.ended = action

    def _start(self, start: Start) -> None:
        assert self.server is not None
        is_remote = self.reach.by_agent or not self.locations.is_here[start.host]
        address = self.locations.addresses.get(start.host, start.host)
        env = ALLOCATOR | HASH_SEED | FAULTHANDLER | self.env | worker_environment(
            start, self.address, self.server.address[1], self.key, {} if is_remote else self.env,
            self.locations.zones.get(start.host, ""), self.membership.rounds.min_workers)
        try:
            process = WorkerProcess(start, through_shim(self.command, env, not is_remote), env,
                                    self.reach, sys.stdout, address if is_remote else None,
                                    self.tracebacks)
        except OSError as error:
            self.events.emit("driver.worker_start_failed", host=start.host, error=str(error))
            self.membership.exited(start.worker, 127, time.monotonic())
            return
        self.processes[start.worker] = process
        self.forwards = [it for it in (*self.forwards, *process.forwards) if it.is_alive()]
        log_start(self.events, start, process, address, self.reach)
        threading.Thread(target=self._await_exit, args=(process,), daemon=True).start()

    def _stop(self, stop: Stop) -> None:
        now = time.monotonic()
        self.stalls.give_up(stop, now)
        silent_s = round(now - self.membership.workers[stop.worker].heard_at, 2)
        self.events.emit("driver.worker_evicted" if stop.at_once else "driver.worker_dismissed",
                         worker=stop.worker, reason=stop.reason, silent_s=silent_s)
        self.processes[stop.worker].stop(stop.at_once, self.membership.limits.stop_grace_s)

    def _form(self, form: Form) -> None:
        """Open a generation's rendezvous store, and give its members their places."""
        contacts = [self.messages.contacts[name] for name in form.members]
        at_once = all(contact.meets_at_once for contact in contacts)
        try:
            store = Rendezvous(self.address, [contact.address for contact in contacts],
                               self.messages.refusals.refuse, at_once=at_once)
        except OSError as error:
            self.ended = self.membership.end(End(
                "failed", f"The driver cannot open a rendezvous store: {error}. Raise the limit of "
                          f"open files on this host (ulimit -n)."))
            return
        self.stores.append(store)
        while len(self.stores) > STORES_KEPT:
            threading.Thread(target=self.stores.pop(0).close, daemon=True).start()
        workers = [self.membership.workers[name] for name in form.members]
        for seat in seats(workers, form.generation, self.address, store.port, at_once):
            self.messages.seat(workers[seat.rank].name, seat)
        self.events.emit("driver.generation_formed", generation=form.generation,
                         size=len(workers), reason=form.reason, hosts=[w.host for w in workers],
                         workers=list(form.members))

    def _report_reached(self, *, is_last: bool = False) -> None:
        self.reached.receive(*self.membership.reached())
        if news := self.reached.news(time.monotonic(), is_last=is_last):
            self.events.emit("driver.step_reached", **news)

    # --- the end --------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Stop the attempt from outside (SIGTERM, SIGINT).

        Workers finish their step and write a checkpoint. After a second call the driver does not
        wait for them any more.
        """
        with self.changed:
            now = time.monotonic()
            self.interrupted_at = self.interrupted_at or now
            self.must_end = self.must_end or now - self.interrupted_at > STOP_AGAIN_S
            self.changed.notify_all()
            if not self.membership.verdict:
                self.ended = self.membership.end(
                    End("interrupted", "A signal has stopped the driver."))
                self.messages.spread()

    def stop_all(self) -> int:
        """Let every worker receive the verdict and leave, then end it; returns the exit code."""
        assert self.ended is not None
        end, grace_s = self.ended, self.membership.limits.stop_grace_s
        began, may_save = time.monotonic(), end.verdict in ("interrupted", "failed")
        with self.changed:
            for name, process in self.processes.items():
                if self.membership.workers[name].phase is Phase.BOOTING:
                    process.stop(False, grace_s)
            while self.processes and (left := self._left_s(began, may_save)) > 0:
                self.changed.wait(left)
            for process in list(self.processes.values()):
                process.stop(True, 0)
            deadline = time.monotonic() + grace_s
            while self.processes and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
        await_output(self.forwards)
        self.messages.refusals.log(math.inf)
        with self.changed:
            self._report_reached(is_last=True)
        self.events.emit("driver.stopped", verdict=end.verdict, detail=end.detail)
        if end.verdict != "finished":
            detail = plain_text(self.tracebacks.shortened(end.detail))
            print(f"elastic-trainer: attempt {end.verdict}: {detail}", file=sys.stderr)
        return exit_code_of(end, is_left=bool(self.membership.left))

    def _left_s(self, began: float, may_save: bool) -> float:
        """Return for how many seconds more workers may end by themselves."""
        if self.must_end:
            return 0.0
        until = (stop_deadline(began, self.messages.moved_at) if may_save
                 else began + self.membership.limits.stop_grace_s)
        return until - time.monotonic()
