"""horovodrun, mended: the same command line, a driver that cannot be stopped by one dead host.

    python -m elastic_trainer.driver -np 4 --min-np 2 --host-discovery-script ./hosts.sh python my_train.py

discovery script, workers' words, processes' exits → here → membership (decides) → here → processes, rendezvous

Facts about Horovod 0.28.1 that this project answers, by the numbers its comments use:
- F1  a failure inside `hvd.init()` aborts all who are in it (operations.cc:444)         → membership, deploy/install.sh
      (mend_init), and where that is missing or Gloo throws in a thread of its own        → revive
- F2  after an error a rank keeps its sockets open (gloo_context.cc:385-388)             → world
- F3  the driver's barrier waits for a dead host's ssh, for ever (registration.py:121)   → below
- F4  it blocks in a call to a vanished rank 0 (driver.py:191-206)                       → below
- F5  its rendezvous listens with a backlog of 5: a dropped SYN costs a second           → rendezvous
- F6, F7, F8  TorchState: a newcomer's first step, `sync` saves nothing, `restore` aliases → state/elastic_state
- F9  skip_sync deadlocks when somebody is new (state.py)                                → world: reconcile
- F10 its rendezvous unpickles what anybody puts there (rendezvous.py:44-47)             → rendezvous, wire
- F11 exit code 0 of one worker ends the job for all (registration.py:146-149)           → loop, place

The mends of the driver:
- F3  a slot ends when its worker is silent, not when its ssh or its output ends; no barrier anywhere (membership.py)
- F4  no call to a worker: workers ask, and the answer is held back until there is news (wire.py)
- F10 no pickle: words are signed JSON
- the environment, with its secrets, does not travel on command lines (gloo_run.py:80-103 puts it there)
- a worker on another host ends when its driver or its ssh does (remote.py); its death waits for no ssh
- a worker's exit counts at once, not when everything that holds its output has gone (safe_shell_exec.py:267)
- discovery has a time-out, keeps order, and a bad answer never replaces a good one (discovery.py:238-252)
- every generation has a rendezvous store of its own, so that a straggler of an older one cannot disturb it

It replaces one function of the launcher, `horovod.runner.launch.gloo_run_elastic`; parsing, settings and configuration
stay Horovod's. It refuses any other version than the one it was written for.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.metadata
import ipaddress
import json
import math
import os
import queue
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import horovod.runner.launch as launch
import psutil
import structlog
from horovod.runner.common.util.env import is_exportable
from horovod.runner.elastic.discovery import HostDiscovery, HostDiscoveryScript
from horovod.runner.util import network
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from elastic_trainer import remote
from elastic_trainer.arithmetic import Arithmetic, advice
from elastic_trainer.config import (
    ALLOCATOR,
    EXIT_FINISHED,
    EXIT_NO_HOSTS,
    EXIT_USER_ERROR,
    ConfigError,
    Limits,
)
from elastic_trainer.courier import Desk, LineRefused, TooEarly
from elastic_trainer.crash import FAULTHANDLER, FAULTS, LINES, place_of
from elastic_trainer.edge.plain import plain_output, plain_text
from elastic_trainer.edge.seal import worker_key
from elastic_trainer.edge.strangers import Strangers
from elastic_trainer.events import Events
from elastic_trainer.lines import lines_of
from elastic_trainer.membership import Action, Differ, End, Form, Membership, Phase, Start, Stop, Worker, loud
from elastic_trainer.output import outlive_readers
from elastic_trainer.place import own_address_towards
from elastic_trainer.reached import Reached
from elastic_trainer.rendezvous import Rendezvous
from elastic_trainer.schema import HOST_NAME, flaw_of_words
from elastic_trainer.shim import through_shim
from elastic_trainer.wire import CONNECTIONS_EACH, WordRefused, WordServer

HOROVOD_VERSION = "0.28.1"
DISCOVERY_EVERY_S = 1.0
DISCOVERY_TIMEOUT_S = 10.0
FIRST_DISCOVERY_S = 60.0
"""A discovery that has never answered for this long is a mistake in the command, not a fault of the world."""
LOOKUP_S = 30.0
"""How long the driver looks for a way to any host of the list, before it leaves that to the next attempt."""
LOOKUP_AGAIN_S = 10.0
"""How long the driver waits before it looks up again a name that had no address (an alias of ssh's never has one)."""
DESCRIPTORS = 65536
"""So many the driver opens where the host allows it: three for each worker, and room for strangers, who cost one each."""
STOP_S = 30.0
"""How long workers have for their last step and checkpoint when the attempt is stopped from outside: from then, or from
when a worker last finished a step or said that a part of a checkpoint is on its way and moves."""
STOP_MOST_S = 900.0
"""How long workers have for that in all; an upload of which nothing moves for so long is given up, too (UPLOAD_S)."""
STOP_AGAIN_S = 2.0
"""A signal to stop that comes so long after the first one ends the workers at once. One that comes earlier is the same
one: a service manager sends it to the supervisor, which passes it on, and to the driver."""
SSH_CONNECTION_LOST = 255
FAR_BEAT_S = 1.0
"""How often the far end of an ssh hears that we live."""
FAR_LOST_S = 60.0
"""A far end that has heard nothing for so long takes us for dead (a frozen driver or a partition: no end of stdin)."""
FAR_KILL_S = 2.0
"""How long an ssh has to deliver the word that kills."""
FAR_OUTPUT_S = 1.0
"""How long after a far worker's exit its last words may arrive, when something there still holds its output."""
HEARD_AGAIN_S = 1.0
"""A worker that was silent for longer than this (and four of its beats), but not for long enough to be evicted, is told."""
CLOCK_S = 60.0
"""A worker whose clock differs from ours by more is told (discovery/agent.py has the same limit)."""
LAST_LINE_CHARACTERS = 1000
"""Of each of a worker's last lines so much is kept: a frame of faulthandler has fewer."""
LAST_OUTPUT_S = 2.0
"""How long the last lines of workers that are gone may take; a process that one has left behind may hold its output."""
DISCOVERY_FAILS = (ValueError, OSError, subprocess.SubprocessError)
"""What asking the discovery raises when it does not answer, or answers with anything but a list of hosts."""


class DiscoveryUnavailable(RuntimeError):
    """The discovery has not answered once; the next attempt asks again."""


class WaitedTooLong(RuntimeError):
    """The discovery has named no host for as long as the user lets an attempt wait (--elastic-timeout)."""


class HostsUnreachable(RuntimeError):
    """No host of the list has an address, or no way leads to any; the next attempt looks again."""


class WorkerProcess:
    """One worker's process, here in a process group of its own, or over ssh with `remote.py` at the far end."""

    def __init__(self, start: Start, command: list[str], env: dict[str, str], settings: Any, output: IO[str],
                 is_remote: bool):
        self.name, self.host, self.is_remote = start.worker, start.host, is_remote
        self.exit_code: int | None = None
        """What the far end says, as soon as it says it."""
        self.words: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.last_lines: collections.deque[str] = collections.deque(maxlen=LINES)
        """Of its stderr: where it has died, if it has of a signal."""
        if is_remote:
            command_here = remote.ssh(self.host, settings.ssh_port, settings.ssh_identity_file)
            env_here = os.environ | {"ELASTIC_TRAINER_SSH": self.name}  # who it is, for the supervisor
        else:
            command_here, env_here = command, env
        self.process = subprocess.Popen(
            command_here, env=env_here, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.PIPE if is_remote else subprocess.DEVNULL)
        self.worker_pid = self.process.pid  # until it says another: behind a shim, or on its own host
        if is_remote:
            there = {name: value for name, value in env.items() if is_exportable(name) and name.isidentifier()}
            job = {"command": command, "cwd": os.getcwd(), "env": there, "lost_s": FAR_LOST_S,
                   "grace_s": remote.ORPHANS_S}
            self.words.put(json.dumps(job).encode() + b"\n")
            threading.Thread(target=self._speak, daemon=True).start()
        self.forwards = [threading.Thread(target=self._forward, args=(kind, stream, output), daemon=True)
                         for kind, stream in (("stdout", self.process.stdout), ("stderr", self.process.stderr))]
        for thread in self.forwards:
            thread.start()

    def _speak(self) -> None:
        """Say to the far end what is to be said, and in between that we live. It may block as long as ssh does."""
        assert self.process.stdin is not None
        try:
            while self.process.returncode is None:
                try:
                    word = self.words.get(timeout=FAR_BEAT_S)
                except queue.Empty:
                    word = b"beat\n"
                self.process.stdin.write(word)
                self.process.stdin.flush()
        except OSError:
            pass  # ssh has ended, and `wait` says so

    def _forward(self, kind: str, stream: IO[bytes], output: IO[str]) -> None:
        """Pass lines on, prefixed with the host: ranks change, hosts do not. Ends when the last holder closes it."""
        for raw in lines_of(stream.fileno(), remote.EXITED.encode()):
            line, mark, code = raw.decode(errors="replace").rstrip().partition(remote.EXITED)
            if kind == "stderr":
                self.last_lines.append(line[:LAST_LINE_CHARACTERS])
            if line or not mark:
                line = plain_output(line)
                with suppress(OSError):  # whoever does not take our output: the worker must not wait until we read on
                    output.write(f"[{self.host}]<{kind}>: {line}\n")  # at once, or another worker's line gets in between
                    output.flush()
            if mark and self.is_remote and kind == "stdout" and re.fullmatch("-?[0-9]{1,3}", code):
                self.exit_code = int(code)
                self._later(FAR_OUTPUT_S, self._signal, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the exit and return its code (negative: a signal's number). What it left behind is killed."""
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._signal(signal.SIGKILL)  # not yet reaped, so the group's number cannot be another's
        code = self.process.wait()
        if self.is_remote:
            self.forwards[0].join(FAR_OUTPUT_S)  # ssh alone held it, so it ends now
            code = -signal.SIGHUP if code == SSH_CONNECTION_LOST else code
        return code if self.exit_code is None else self.exit_code

    def died_in(self, code: int) -> str:
        """Return where the process died, if faulthandler tells of the signal that ended it; "" otherwise.

        It has told before the process ends, but its lines may not be read yet. Of SIGKILL it cannot tell, and something
        that a killed worker has left behind may hold its stderr: everybody waits for this verdict.
        """
        if -code not in FAULTS:
            return ""
        self.forwards[1].join(FAR_OUTPUT_S)
        return place_of(list(self.last_lines))

    def stop(self, at_once: bool, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after a grace; or SIGKILL at once. An ssh that cannot deliver it is killed itself."""
        if at_once:
            self._kill()
        else:
            self.words.put(b"term\n") if self.is_remote else self._signal(signal.SIGTERM)
            self._later(grace_s, self._kill)

    def _kill(self) -> None:
        if self.is_remote:
            self.words.put(b"kill\n")
            self._later(FAR_KILL_S, self._signal, signal.SIGKILL)
        else:
            self._signal(signal.SIGKILL)

    def _later(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        timer = threading.Timer(seconds, act, arguments)
        timer.daemon = True
        timer.start()

    def _signal(self, number: int) -> None:
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                pass


def is_local(host: str) -> bool:
    """True if a host name means this machine: it resolves to one of our addresses, or to any loopback address."""
    address = network.resolve_host_address(host)
    return bool(address) and is_own(address)


def is_own(address: str) -> bool:
    """True if an address is one of this machine's, or any loopback address."""
    return ipaddress.ip_address(address).is_loopback or address in network.get_local_host_addresses()


def way_to(hosts: Iterable[str], resolve: Callable[[str], str | None] = network.resolve_host_address) -> str:
    """Return this machine's address on the way to the first far host that has an address; 127.0.0.1 if none is far.

    Raises HostsUnreachable when there may be far hosts, and no way to any of them is found.
    """
    failed: dict[str, str] = {}
    for host in hosts:
        address = resolve(host)
        if address and is_own(address):
            continue
        try:
            if address:
                return own_address_towards(address)
            failed[host] = "its name has no address"
        except OSError as error:
            failed[host] = f"no way leads to {address}: {error.strerror}"
    if not failed:
        return "127.0.0.1"
    first = ", ".join(f"{host} ({why})" for host, why in list(failed.items())[:3])
    raise HostsUnreachable(f"none of {len(failed)} hosts is found from here: {first}. The next attempt looks again; if "
                           f"the names are right, give this machine's interface: --network-interfaces eth0.")


def address_of(interface: str) -> str:
    """Return this machine's address on an interface. Raises ConfigError if there is no such interface, and
    HostsUnreachable if it has no address now.
    """
    if interface not in psutil.net_if_addrs():
        raise ConfigError(f"--network-interfaces is {interface}, which this machine does not have. Use one of "
                          f"{', '.join(sorted(psutil.net_if_addrs()))}.")
    try:
        return str(network.get_driver_ip([interface]))
    except RuntimeError as error:
        raise HostsUnreachable(f"the interface {interface} (--network-interfaces) has no IPv4 address now. The next "
                               f"attempt looks again.") from error


def parse_hosts(text: str, default_slots: int | None) -> dict[str, int]:
    """Read `host:slots` lines in their order. Raises ValueError on any line that is not one.

    A host's name goes into an ssh command: it has to look like one (RFC 1123), above all at its start.
    """
    hosts: dict[str, int] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line:
            continue
        host, colon, slots = line.rpartition(":")
        if not colon:
            host, slots = line, str(default_slots or 1)
        if not HOST_NAME.fullmatch(host) or not re.fullmatch("[0-9]{1,4}", slots) or int(slots) < 1:
            raise ValueError(f"{line!r} is not host:slots")
        hosts[host] = int(slots)
    return hosts


def stop_deadline(began: float, moved_at: float) -> float:
    """Return until when the workers of an attempt that was stopped at `began` are waited for."""
    return min(began + STOP_MOST_S, max(began, moved_at) + STOP_S)


class MendedDriver:
    """One attempt: the thin edge around `Membership`."""

    def __init__(self, settings: Any, env: dict[str, str], command: list[str], events: Events):
        self.settings, self.env, self.command, self.events = settings, env, command, events
        self.key = secrets.token_bytes(32)
        """Of this attempt: what zombies of an older one know is worth nothing. It is in this process's memory only."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Something has happened: the main thread decides."""
        self.news = threading.Condition(self.lock)
        """There may be news for those whose answers are held back."""
        self.version, self.notice = 0, ""
        self.basis: tuple[Any, ...] = ()
        """On what the answers of this version rest."""
        self.membership = Membership(
            first_workers=settings.num_proc, min_workers=settings.min_num_proc, max_workers=settings.max_num_proc,
            limits=Limits.from_environment(env), wait_s=settings.elastic_timeout,
            refuses_mixed=env.get("ELASTIC_TRAINER_MIXED_HARDWARE", "refuse") != "warn",
            has_trained=any(int(env.get(f"ELASTIC_TRAINER_{name}", "0")) for name in ("RESUME_STEP", "LOST_ATTEMPTS")))
        self.had_hosts = env.get("ELASTIC_TRAINER_HAD_HOSTS", "0") == "1"
        """The discovery has named hosts in an earlier attempt: it works, and when it fails now that is an outage."""
        self.failing_since: float | None = None
        """Since when the discovery does not answer."""
        self.processes: dict[str, WorkerProcess] = {}
        self.is_here: dict[str, bool] = {}
        """Whether a host is this machine. Found out once: a name server may take its time, and the lock must not wait."""
        self.looked_up_at: dict[str, float] = {}
        """When the name of a host was looked up last, for those that had no address."""
        self.addresses: dict[str, str] = {}
        self.told_to_stop_at: float | None = None
        self.must_end = False
        """Told to stop a second time: workers are not waited for any more."""
        self.moved_at = 0.0
        """When a worker was last heard that gets nearer to its end: by a step, or by a part of a checkpoint."""
        self.doors: dict[str, int] = {}
        """The port at which each worker lets others find out whether they reach it."""
        self.meet_at_once: dict[str, bool] = {}
        """Whether each worker's Horovod can find its peers by one answer of the rendezvous store."""
        self.rendezvous: list[Rendezvous] = []
        self.places: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, tuple[int, dict[str, Any]]] = {}
        """What each worker is told, and of which version that is."""
        self.forwards: list[threading.Thread] = []
        self.ended: End | None = None
        self.address = ""
        self.server: WordServer | None = None
        self.strangers, self.strangers_lock = Strangers(), threading.Lock()
        self.said_built = False
        self.clock_doubts: dict[str, int] = {}
        """How many words in a row of each worker's were by another clock."""
        self.reached = Reached(*(int(env.get(f"ELASTIC_TRAINER_{name}", "0")) for name in ("NEWEST_STEP", "RESUME_STEP")))
        self.desk = Desk(events.write, int(events.bound.get("attempt", 1)))

    # --- the outside -------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the attempt to its end; returns the exit code."""
        hosts = self._first_hosts()
        self.address = self._own_address(hosts)
        self.server = WordServer(self.address, self.key, self._answer, self._refused, self._expected_connections)
        threading.Thread(target=self.server.serve_forever, name="words", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=self._interrupt, daemon=True).start())
        self._locate(hosts)
        with self.changed:
            self._take_hosts(hosts)
        threading.Thread(target=self._discover, name="discovery", daemon=True).start()
        while True:
            with self.changed:
                if self.ended:
                    break
                self._turn()
                self._say_reached()
                self.changed.wait(0.1)
            self._tell_strangers(time.monotonic())
        return self._stop_all()

    def _first_hosts(self) -> dict[str, int]:
        """Return the first list that names a host: our address is the one on the way to it.

        Raises DiscoveryUnavailable, WaitedTooLong.
        """
        started, has_answered, wait_s = time.monotonic(), False, self.settings.elastic_timeout
        while True:
            waited_s = time.monotonic() - started
            try:
                if hosts := self._hosts_now():
                    return hosts
                has_answered = True
            except DISCOVERY_FAILS as error:
                if not has_answered and not self.had_hosts and waited_s > FIRST_DISCOVERY_S:
                    raise DiscoveryUnavailable(
                        f"the discovery has not answered once in {FIRST_DISCOVERY_S:.0f} s ({error}). Try the command "
                        f"given with --host-discovery-script by hand.") from error
            if (has_answered or self.had_hosts) and wait_s is not None and waited_s > wait_s:
                raise WaitedTooLong(f"the discovery has named no host in {wait_s:.0f} s (--elastic-timeout). Look "
                                    f"why with `elastic-trainer hosts`; the next attempt asks again.")
            time.sleep(DISCOVERY_EVERY_S)

    def _hosts_now(self) -> dict[str, int]:
        """Ask the discovery, and tell when it begins to fail and when it answers again. Raises what it fails with."""
        try:
            hosts = self._ask_discovery()
        except DISCOVERY_FAILS as error:
            if self.failing_since is None:
                self.failing_since = time.monotonic()
                self.events.emit("driver.discovery_failed", error=str(error))
            raise
        if self.failing_since is not None:
            self.events.emit("driver.discovery_recovered", failed_s=round(time.monotonic() - self.failing_since, 1))
            self.failing_since = None
        return hosts

    def _ask_discovery(self) -> dict[str, int]:
        discovery: HostDiscovery = self.settings.discovery
        if not isinstance(discovery, HostDiscoveryScript):
            return dict(discovery.find_available_hosts_and_slots())
        with subprocess.Popen(discovery._discovery_script, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, start_new_session=True) as script:
            try:
                hosts, complaint = script.communicate(timeout=DISCOVERY_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(script.pid, signal.SIGKILL)  # what it has started hangs too, and would be left each time
                raise
        if script.returncode != 0:
            raise ValueError(f"exit code {script.returncode}: {complaint.strip()[-200:]}")
        return parse_hosts(hosts, discovery._default_slots)

    def _discover(self) -> None:
        while not self.ended:
            time.sleep(DISCOVERY_EVERY_S)
            try:
                hosts = self._hosts_now()
            except DISCOVERY_FAILS:
                continue  # unknown is never empty: keep the list
            self._locate(hosts)
            with self.changed:
                if hosts != self.membership.listed:
                    self._take_hosts(hosts)
                    self._turn()

    def _locate(self, hosts: Iterable[str]) -> None:
        now = time.monotonic()
        for host in hosts:
            if host not in self.is_here or self.looked_up_at.get(host, now) + LOOKUP_AGAIN_S < now:
                address = network.resolve_host_address(host)
                self.is_here[host] = bool(address) and is_own(address)
                self.looked_up_at.pop(host, None)
                if not address:  # a name server that fails for a moment must not make this machine a far host for ever
                    self.looked_up_at[host] = now

    def _take_hosts(self, hosts: dict[str, int]) -> None:
        before = self.membership.listed
        for host in hosts.keys() - before.keys():
            self.events.emit("driver.host_added", host=host, slots=hosts[host])
        for host in before.keys() - hosts.keys():
            self.events.emit("driver.host_removed", host=host)
        self.membership.hosts_listed(hosts)

    def _own_address(self, hosts: dict[str, int]) -> str:
        """Return the address at which the hosts reach us: on the interface that was given, or on the way to them."""
        nics = list(self.settings.nics or [])
        if len(nics) > 1:
            raise ConfigError(f"--network-interfaces is {','.join(sorted(nics))}. Give the one interface of this machine "
                              f"that leads to the hosts, e.g. --network-interfaces eth0.")
        for attempt in Retrying(retry=retry_if_exception_type(HostsUnreachable), stop=stop_after_delay(LOOKUP_S),
                                wait=wait_exponential(multiplier=0.5, max=5.0), reraise=True):
            with attempt:
                return address_of(nics[0]) if nics else way_to(hosts)
        raise AssertionError("Retrying ends by a return or by raising")

    # --- words ---------------------------------------------------------------------------------------------------------

    def _answer(self, words: dict[str, Any], address: str) -> dict[str, Any]:
        """Take a worker's word and answer when there is news for it, or after `hold_s`. Raises WordRefused."""
        if wrong := flaw_of_words(words):
            raise WordRefused(f"a word that makes no sense: {wrong}")
        name = str(words["worker"])
        if "line" in words:
            with self.changed:
                worker = self.membership.workers.get(name)
                return self._take_line(words, address) if worker and worker.phase is not Phase.GONE else {}
        with self.changed:
            now = time.monotonic()
            worker = self.membership.workers.get(name)
            before, was = (worker.phase, loud(worker)) if worker else (None, None)
            # At our last decision: while we stand still ourselves nobody is silent.
            silent_s = self.membership.decided_at - worker.heard_at if worker else 0.0
            step_before = worker.step if worker else 0
            is_new = self.membership.reported(
                name, int(words["count"]), now, phase=words["phase"], generation=words["generation"],
                accepted=words.get("accepted", 0), holds_state=bool(words.get("holds_state")),
                drains=bool(words.get("drains")), step=words.get("step", 0), error=words.get("error", ""),
                unreachable=words.get("unreachable", ()), arithmetic=Arithmetic.from_words(words.get("arithmetic")),
                published=words.get("published", -1))
            if is_new and words.get("machine"):
                self.membership.machine_failed(name, words["machine"])
            if is_new:  # a word played back from elsewhere must not make that place a member's
                self.addresses[name], self.doors[name] = address, words.get("door", 0)
                self.meet_at_once[name] = bool(words.get("meets_at_once"))
            elif self.addresses.get(name, address) != address:
                raise WordRefused("a word of another's, played back")
            if worker and is_new and (words.get("saves") or worker.step > step_before):
                self.moved_at = now
            if worker and is_new and before is not Phase.BOOTING:
                self._say_odd(worker, silent_s, words)
            if worker and worker.phase is not before:
                if before is Phase.BOOTING:
                    process = self.processes[name]
                    process.worker_pid = int(words.get("pid", process.worker_pid))
                    self.events.emit("driver.worker_ready", worker=name, boot_s=round(now - worker.started_at, 3),
                                     pid=process.worker_pid)
            if worker and loud(worker) != was:
                self.answers.pop(name, None)
                self._decide_soon()
            deadline = now + (self.membership.hold_s() if words.get("hold_s") else 0.0)
            while True:
                told = self._told(name)
                if told["version"] != words.get("seen") or (left := deadline - time.monotonic()) <= 0:
                    return told
                self.news.wait(left)

    def _take_line(self, words: dict[str, Any], address: str) -> dict[str, Any]:
        """Write a worker's line into the event log. An honest worker must not wait for ever with a line that is refused."""
        try:
            self.desk.take(words)
        except TooEarly:
            return {"early": True}
        except LineRefused as refused:
            self._refused(address, str(refused))
            return {"refused": str(refused)}
        return {}

    def _say_odd(self, worker: Worker, silent_s: float, words: dict[str, Any]) -> None:
        """Tell what costs nobody anything yet: a line that comes and goes, a clock that is wrong."""
        limits = self.membership.limits
        if silent_s > max(HEARD_AGAIN_S, 4 * limits.beat_s) + self.membership.hold_s() - limits.beat_s:
            self.events.emit("driver.worker_heard_again", worker=worker.name, silent_s=round(silent_s, 2))
        off_s = float(words.get("time", time.time())) - time.time()
        doubts = self.clock_doubts[worker.name] = self.clock_doubts.get(worker.name, 0) + 1 if abs(off_s) > CLOCK_S else 0
        if doubts == 2:  # one alone may have waited for us, while we were frozen
            self.events.emit("driver.clock_differs", worker=worker.name, host=worker.host, off_s=round(off_s, 1))

    def _say_reached(self, *, is_last: bool = False) -> None:
        """Tell the supervisor how far the run has come, if there is news."""
        self.reached.hear(*self.membership.reached())
        if news := self.reached.news(time.monotonic(), is_last=is_last):
            self.events.emit("driver.step_reached", **news)

    def _told(self, name: str) -> dict[str, Any]:
        version, told = self.answers.get(name, (-1, {}))
        if version == self.version:
            return told
        told = self.membership.told(name, time.monotonic(), self.notice)
        if "place" in told:
            told["place"] |= self.places.get(name, {})
        told["reach"] = {peer: [self.addresses[peer], self.doors[peer]] for peer in told.get("reach", ())
                         if self.doors.get(peer)}
        told["version"] = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
        if name in self.membership.workers:
            self.answers[name] = self.version, told
        return told

    def _expected_connections(self) -> int:
        """Return how many connections the run's workers may have now: those that live, or those that are yet to start."""
        return CONNECTIONS_EACH * max(len(self.membership.workers), sum(self.membership.listed.values()))

    def _refused(self, address: str, why: str) -> None:
        with self.strangers_lock:
            self.strangers.refuse(address, why)
        self._tell_strangers(time.monotonic())

    def _tell_strangers(self, now: float) -> None:
        with self.strangers_lock:
            due = self.strangers.due(now)
        for facts in due:
            self.events.emit("driver.stranger_refused", **facts)

    # --- decisions into deeds (under the lock) ----------------------------------------------------------------------

    def _turn(self) -> None:
        """Do what membership decides, until it has nothing more to say, and tell those whom it concerns."""
        while actions := self.membership.decide(time.monotonic()):
            for action in actions:
                self._do(action)
        self.notice = self.membership.notice(time.monotonic())
        if (basis := self.membership.basis(self.notice)) != self.basis:
            self.basis = basis
            self._spread()
            if self.rendezvous and self.membership.is_broken():
                self.rendezvous[-1].abandon()
        if self.ended or not self.processes:
            self.changed.notify_all()

    def _spread(self) -> None:
        """Let everybody whose answer is held back look whether there is news for it."""
        self.version += 1
        self.news.notify_all()
        facts: tuple[dict[str, Any], ...] = (self.addresses, self.doors, self.places, self.answers, self.clock_doubts,
                                             self.meet_at_once)
        for known in facts:  # of who is gone
            for name in known.keys() - self.membership.workers.keys():
                del known[name]

    def _decide_soon(self) -> None:
        """Have the main thread decide: once for all the words that arrive while it is busy. (At the end it only waits.)"""
        if self.ended:
            self._turn()
        else:
            self.changed.notify_all()

    def _do(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Stop(worker, reason, at_once):
                self.events.emit("driver.worker_evicted" if at_once else "driver.worker_dismissed", worker=worker,
                                 reason=reason, silent_s=round(time.monotonic()
                                                               - self.membership.workers[worker].heard_at, 2))
                self.processes[worker].stop(at_once, self.membership.limits.stop_grace_s)
            case Form(generation, members, reason):
                self._form(generation, members, reason)
            case Differ():
                self._say_differ(action)
            case End():
                self.ended = action

    def _start(self, start: Start) -> None:
        assert self.server is not None
        env = ALLOCATOR | FAULTHANDLER | self.env | {
            "HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": start.host, "HOROVOD_LOCAL_RANK": str(start.slot),
            "ELASTIC_TRAINER_SLOT": str(start.slot),
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "PYTHONUNBUFFERED": "1",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self.address, "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
            "ELASTIC_TRAINER_DRIVER": f"{self.address}:{self.server.server_port}",
            "ELASTIC_TRAINER_KEY": worker_key(self.key, start.worker).hex(), "ELASTIC_TRAINER_WORKER": start.worker}
        try:
            is_remote = not self.is_here[start.host]
            command = through_shim(self.command, env, not is_remote)
            process = WorkerProcess(start, command, env, self.settings, sys.stdout, is_remote)
        except OSError as error:
            self.events.emit("driver.worker_start_failed", host=start.host, error=str(error))
            self.membership.exited(start.worker, 127, time.monotonic())
            return
        self.processes[start.worker] = process
        self.forwards = [thread for thread in [*self.forwards, *process.forwards] if thread.is_alive()]
        self.events.emit("driver.worker_started", host=start.host, slot=start.slot, worker=start.worker,
                         pid=process.process.pid, over_ssh=is_remote)
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def _watch(self, process: WorkerProcess) -> None:
        code = process.wait()
        place = process.died_in(code)
        with self.changed:
            self.reached.hear(*self.membership.reached())  # with this worker's last word
            refused = self.desk.forget(process.name)
            reason = self.membership.exited(process.name, code, time.monotonic(), place)
            self.events.emit("driver.worker_gone", worker=process.name, host=process.host, pid=process.worker_pid,
                             exit_code=code, reason=reason, **({"died_in": place} if place else {}),
                             **({"lines_refused": refused} if refused else {}))
            del self.processes[process.name]
            if reason == "differed":
                self._say_differed(process.host)
            if reason == "boot_failed" and not self.membership.user_error:
                print(f"elastic-trainer: the command ended with exit code {code} on {process.host} before its worker stood "
                      f"ready. It is tried there again, later each time, while that host is listed.", file=sys.stderr)
            self._turn()

    def _say_differ(self, found: Differ) -> None:
        """Tell that a newcomer computes other bits than the world, or that its weights were built as others."""
        both = {"host": found.host, "newcomer": found.worker, "other_host": found.other_host}
        if not found.is_arithmetic:
            if not self.said_built:
                self.said_built = True
                self.events.emit("worker.weights_differ_as_built", **both,
                                 meaning="the weights as built, or the first samples, differ. A newcomer receives the "
                                         "world's weights, so nothing is wrong. Set torch's seed before the model is "
                                         "built, and their gradients can be compared.")
            return
        what = advice(found.is_refused, found.differ)
        self.events.emit("worker.arithmetic_differs", level="warning", **both, differs=found.differ,
                         refused=found.is_refused, kept_out_s=round(found.kept_out_s, 1), meaning=what)
        if found.is_refused:
            facts = "; ".join(f"{name} {mine!r} there, {theirs!r} here" for name, (mine, theirs) in found.differ.items())
            print(f"elastic-trainer: the worker on {found.host} computes other bits than the one on {found.other_host} "
                  f"({facts or 'no name differs'}), and gets no place. {what}", file=sys.stderr)

    def _say_differed(self, name: str) -> None:
        host = self.membership.hosts[name]
        self.events.emit("driver.host_kept_out", level="error", host=name, differences=host.differences,
                         kept_out_s=round(host.not_before - time.monotonic(), 1),
                         why="a replica on it held other bits than the other workers' (worker.replica_differs)")

    def _form(self, generation: int, members: tuple[str, ...], reason: str) -> None:
        workers = [self.membership.workers[name] for name in members]
        try:
            at_once = all(self.meet_at_once.get(name) for name in members)
            store = Rendezvous(self.address, [self.addresses[name] for name in members], self._refused, at_once=at_once)
        except OSError as error:
            self.membership.verdict = self.ended = End("failed", f"members cannot find each other: {error}. Raise what "
                                                       f"this host lets the driver have of it (ulimit -n)")
            return
        self.rendezvous.append(store)
        while len(self.rendezvous) > 2:  # nobody can still be in the init of the one before the last
            threading.Thread(target=self.rendezvous.pop(0).close, daemon=True).start()
        for worker in workers:
            neighbours = [w.name for w in workers if w.host == worker.host]
            self.places[worker.name] = {"local_rank": neighbours.index(worker.name), "local_size": len(neighbours),
                                        "address": self.address, "port": store.port,
                                        "at_once": at_once}
        self.events.emit("driver.generation_formed", generation=generation, size=len(members), reason=reason,
                         hosts=[w.host for w in workers], workers=list(members))

    # --- the end --------------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Stop the attempt from outside (SIGTERM, SIGINT): workers finish their step and write a checkpoint.

        The second time they are not waited for any more.
        """
        with self.changed:
            now = time.monotonic()
            self.told_to_stop_at = self.told_to_stop_at or now
            self.must_end = self.must_end or now - self.told_to_stop_at > STOP_AGAIN_S
            self.changed.notify_all()
            if not self.membership.verdict:
                self.membership.verdict = self.ended = End("interrupted", "the driver was told to stop")
                self._spread()

    def _stop_all(self) -> int:
        """Give every worker the time to hear the verdict and leave by itself, then end it."""
        assert self.ended is not None
        limits = self.membership.limits
        began, may_save = time.monotonic(), self.ended.verdict in ("interrupted", "failed")

        def left_s() -> float:
            if self.must_end:
                return 0.0
            until = stop_deadline(began, self.moved_at) if may_save else began + limits.stop_grace_s
            return until - time.monotonic()

        with self.changed:
            for name, process in self.processes.items():
                if self.membership.workers[name].phase is Phase.BOOTING:
                    process.stop(False, limits.stop_grace_s)
            while self.processes and (left := left_s()) > 0:
                self.changed.wait(left)
            for process in list(self.processes.values()):
                process.stop(True, 0)
            deadline = time.monotonic() + limits.stop_grace_s
            while self.processes and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
        deadline = time.monotonic() + LAST_OUTPUT_S
        for thread in self.forwards:  # a traceback is what the user needs most
            thread.join(max(0.0, deadline - time.monotonic()))
        self._tell_strangers(math.inf)
        with self.changed:
            self._say_reached(is_last=True)
        self.events.emit("driver.stopped", verdict=self.ended.verdict, detail=self.ended.detail)
        if self.ended.verdict != "finished":
            print(f"elastic-trainer: attempt {self.ended.verdict}: {plain_text(self.ended.detail)}", file=sys.stderr)
        return {"finished": EXIT_FINISHED, "user_error": EXIT_USER_ERROR}.get(self.ended.verdict, 1)


def check_version() -> None:
    """Refuse to run on another Horovod than the one whose faults are mended here. Raises ConfigError."""
    found = importlib.metadata.version("horovod")
    if found != HOROVOD_VERSION:
        raise ConfigError(f"Horovod {found} is installed, but this driver mends Horovod {HOROVOD_VERSION}. Run "
                          f"deploy/install.sh, or use plain horovodrun without the mends.")


def check_options(settings: Any, env: dict[str, str]) -> None:
    """Refuse what would be ignored, or break a promise, and what is none of an elastic job's. Raises ConfigError."""
    options = {"--reset-limit": settings.reset_limit, "--blacklist-cooldown-range": settings.cooldown_range,
               "--output-filename": settings.output_filename}
    variables = {name: env.get(name, "0") not in ("", "0", "False")
                 for name in ("HOROVOD_AUTOTUNE", "HOROVOD_ENABLE_ASYNC_COMPLETION")}
    given = [name for name, value in (options | variables).items() if value]
    if given:
        raise ConfigError(f"{', '.join(given)} (or its option) is not kept by this driver: no membership is counted or "
                          f"banned, output goes to stdout, and tuned or asynchronous collectives lose steps. Leave it out.")


def refuse_static(*_: Any) -> None:
    """Refuse a job without a discovery. Raises ConfigError."""
    raise ConfigError("no --host-discovery-script is given, and Horovod's static launcher is not mended: it puts the "
                      "environment on ssh's command lines. Give --host-discovery-script, e.g. one that prints a file.")


def main(argv: list[str] | None = None) -> int:
    """Run horovodrun's command line with the mended driver; returns the exit code."""
    code = EXIT_FINISHED

    def run_elastic(settings: Any, env: dict[str, str], command: list[str], executable: str) -> None:
        nonlocal code
        check_options(settings, env)
        run_dir = env.get("ELASTIC_TRAINER_RUN_DIR")
        events = Events(Path(run_dir) if run_dir else None, run=Path(run_dir or "").name,
                        attempt=int(env.get("ELASTIC_TRAINER_ATTEMPT", "1")))
        code = MendedDriver(settings, env, command, events).run()

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        check_version()
        launch.gloo_run_elastic, launch._run_static = run_elastic, refuse_static
        launch.gloo_built = lambda verbose=False: True  # it would import torch in here; workers find out soon enough
        sys.argv = ["horovodrun", *(sys.argv[1:] if argv is None else argv)]
        launch.run_commandline()
    except (DiscoveryUnavailable, HostsUnreachable) as error:
        print(f"elastic-trainer: {plain_text(error)}", file=sys.stderr)
        return EXIT_NO_HOSTS
    except WaitedTooLong as error:
        print(f"elastic-trainer: {plain_text(error)}", file=sys.stderr)
        return 1
    except (ConfigError, ValueError) as error:
        print(f"elastic-trainer: {plain_text(error)}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    outlive_readers()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if 0 <= most < DESCRIPTORS else DESCRIPTORS, most))
    result = main()
    sys.stdout.flush()
    os._exit(result)  # threads that hold a dead worker's output must not keep us
