"""A worker's place in the world, and the three ways to get one: our driver, plain horovodrun, nobody.

driver → here → world (`hvd.init()`)

Each way answers the same few questions, so that `world` does not know who started it:
`next_place` (blocks until there is one), `wants_change` (leave at the next step boundary), `is_broken` (somebody of my
generation is gone), and takes the same few words: `note`, `fail`, `finish`.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from elastic_trainer.config import Launch
from elastic_trainer.wire.messages import DriverClient, DriverUnreachable
from elastic_trainer.world.arithmetic import Arithmetic

MAX_ERROR_CHARACTERS = 50_000
REACH_S = 2.0
"""How long a peer has to answer a connection; a SYN that was lost is sent again after 1 s. Less than `admit_s`."""
REACH_AGAIN_S = 2.0
"""Between two tries of a newcomer that does not reach all members."""
KNOCKS = 1024
"""How many connections wait at a door at most. All are let go at each beat: a queue that is full drops a
peer's SYN, and a peer that does not get through in REACH_S has one of the two evicted. 1024 take 8 ms."""
NAMED_S = 10.0
"""So long a worker waits for the driver to say who writes down what only memory holds."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A seat in one generation."""

    generation: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: tuple[str, int] | None
    """Where Gloo's peers find one another in this generation: address, port."""
    attempt: int | None = None
    """The number of this life of the run, where rank 0 says it and not a launcher."""
    at_once: bool = False
    """All members can find one another with one answer of the rendezvous store (deploy/install.sh, mend_meeting)."""


class Dismissed(Exception):
    """This worker is not wanted (any more): leave with exit code 75."""


class RunOver(Exception):
    """The attempt is over for a reason that is not this worker's: `verdict` and `detail` say which."""

    def __init__(self, verdict: str, detail: str):
        super().__init__(f"{verdict}: {detail}")
        self.verdict, self.detail = verdict, detail


class Driver(Protocol):
    """What a world needs of whoever starts workers."""

    def next_place(self, holds_state: bool, step: int) -> Place: ...
    def wants_change(self) -> bool: ...
    def wants_stop(self) -> bool: ...
    def drains(self) -> bool: ...
    def drain(self) -> None: ...
    def must_hurry(self) -> bool: ...
    def somebody_leaves(self) -> bool: ...
    def is_writer(self, rank: int, waited_s: float) -> bool: ...
    def is_broken(self) -> bool: ...
    def is_finished(self) -> bool: ...
    def note(self, phase: str, step: int) -> None: ...
    def go_back(self) -> None: ...
    def fail(self, error: str) -> None: ...
    def finish(self, step: int) -> None: ...


class Alone:
    """Nobody started us: a world of one, with the same bits as any other."""

    def next_place(self, holds_state: bool, step: int) -> Place:
        """Return the only place there is."""
        return Place(generation=1, rank=0, size=1, local_rank=0, local_size=1, rendezvous=None)

    def wants_change(self) -> bool:
        """Never."""
        return False

    wants_stop = drains = must_hurry = somebody_leaves = is_broken = is_finished = wants_change

    def drain(self) -> None:
        """Nobody asks: SIGTERM ends a process that nobody started as it ends any other."""

    def is_writer(self, rank: int, waited_s: float) -> bool:
        """Always: there is nobody else."""
        return True

    def note(self, phase: str, step: int) -> None:
        """Nobody listens."""

    def go_back(self) -> None:
        """Never asked: a world of one has nothing to compare."""

    def fail(self, error: str) -> None:
        """Nobody listens."""

    def finish(self, step: int) -> None:
        """Nobody listens."""


def show(phase: str, step: int) -> None:
    """Show what this worker does to `top`, `pgrep` and the agent of its host: as the short name of its process (proc(5),
    `comm`: 15 characters, so a long number is left out; discovery/agent.py has the same words)."""
    word = "step" if phase == "training" else phase
    with suppress(OSError):
        Path("/proc/self/comm").write_text(text if len(text := f"{word} {step}") <= 15 else word)


def open_door(driver: str) -> socket.socket:
    """Return a listening socket on the interface that leads to the driver: peers find out there whether they reach us.

    Nobody has to accept for that, and nothing is read.
    """
    door = socket.create_server((own_address_towards(driver.rpartition(":")[0]), 0), backlog=KNOCKS)
    door.setblocking(False)
    return door


def own_address_towards(host: str) -> str:
    """Return the address of this machine on the way to a host. Raises OSError when there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 1))  # sends nothing
        return str(way.getsockname()[0])


def interface_towards(host: str) -> str:
    """Return the name of the interface that leads to a host: each machine has names of its own (eth0, ens5), but Horovod's
    driver gives one to all. Raises OSError.
    """
    own = own_address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return str(name)
    raise OSError(f"no interface of this machine has the address {own}")


def answer_door(door: socket.socket) -> None:
    """Let go those who have knocked: the kernel has answered them, and that was all they wanted."""
    for _ in range(KNOCKS):  # strangers may knock faster than we answer
        try:
            door.accept()[0].close()
        except OSError:  # nobody is left, or no descriptor is
            return


def unreachable(peers: Mapping[str, Sequence[Any]], timeout_s: float) -> list[str]:
    """Return those of the peers (name → address, port) to whom packets do not get through, or not back. A refusal is an
    answer too.
    """
    failed, waiting = [], {}
    poll = select.poll()
    for name, (address, port) in peers.items():
        knock = socket.socket()
        knock.setblocking(False)
        code = knock.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            waiting[knock.fileno()] = (name, knock)
            poll.register(knock, select.POLLOUT)
        else:
            failed += [name] * (code not in (0, errno.ECONNREFUSED))
            knock.close()
    deadline = time.monotonic() + timeout_s
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(1000 * left):
            name, knock = waiting.pop(descriptor)
            poll.unregister(descriptor)
            failed += [name] * (knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in (0, errno.ECONNREFUSED))
            knock.close()
    for name, knock in waiting.values():
        failed.append(name)
        knock.close()
    return sorted(failed)


class OurDriver:
    """The mended driver: beats in a thread of their own say that we live, and bring its news within milliseconds.

    `on_broken` is called from the beats' thread when a member of our generation is gone: it closes the sockets to it.
    `is_saving` says whether a checkpoint moves on its way to the store: then the driver that stops waits for it.
    `published` says which is the newest checkpoint that this worker knows to be published.
    `write_alone` is called again and again while this worker waits and is to write down what only memory holds.
    """

    def __init__(self, launch: Launch):
        assert launch.driver is not None
        self.launch, self.limits = launch, launch.limits
        self.on_broken: Callable[[], None] = lambda: None
        self.write_alone: Callable[[], None] = lambda: None
        self.is_saving: Callable[[], bool] = lambda: False
        self.published: Callable[[], int] = lambda: -1
        self.generation = 0
        self.meets_at_once = False
        """This worker's Horovod has deploy/install.sh's mend_meeting."""
        self._lock = threading.Lock()
        self._count = launch.revived_count
        self.interface = interface_towards(launch.driver.rpartition(":")[0])
        self._door = open_door(launch.driver)
        self._status: dict[str, Any] = {"phase": "standby", "generation": 0, "accepted": 0, "holds_state": False,
                                        "drains": False, "step": 0, "door": self._door.getsockname()[1],
                                        "unreachable": None}
        self._news: dict[str, Any] = {}
        self._lost = False
        self._heard_at = time.monotonic()
        """When the driver answered last, whomever of us."""
        self._main = DriverClient(launch.driver, launch.worker, launch.key, timeout_s=self.limits.driver_lost_s / 2)
        self._beating = threading.Thread(target=self._beat, name="beats", daemon=True)

    def start(self, holds_state: bool, step: int, arithmetic: Arithmetic | None = None) -> None:
        """Begin to beat. A worker that revived itself goes on in the generation it was in."""
        if arithmetic:
            self._status["arithmetic"] = arithmetic.to_words()
        generation = self.launch.revived_generation
        self.generation, self._heard_at = generation, time.monotonic()
        self._status.update(generation=generation, holds_state=holds_state, step=step,
                            phase="waiting" if generation else "standby")
        self._beating.start()

    @property
    def count(self) -> int:
        """The number of our newest word (a successor has to count on from there)."""
        return self._count

    def _words(self, **changes: Any) -> dict[str, Any]:
        saves, published = self.is_saving(), self.published()
        with self._lock:
            self._status.update(changes)
            self._count += 1
            return {"count": self._count, "pid": os.getpid(), "time": time.time(),
                    "meets_at_once": self.meets_at_once,
                    "saves": saves, "published": published, **self._status}

    def _beat(self) -> None:
        assert self.launch.driver is not None
        client = DriverClient(self.launch.driver, self.launch.worker, self.launch.key, timeout_s=self.limits.silence_s / 2)
        version = ""
        while True:
            words = self._words()
            show(words["phase"], words["step"])
            try:
                news = client.ask({**words, "hold_s": self.limits.beat_s, "seen": version})
            except OSError:  # DriverUnreachable is one; the beats must not end by any other either
                self._lost = time.monotonic() - self._heard_at > self.limits.driver_lost_s
                if self._lost and self._status["phase"] == "finished":
                    return
                time.sleep(self.limits.beat_s / 5)
                continue
            self._heard_at, self._lost, version = time.monotonic(), False, news.pop("version")
            self._take(news)
            answer_door(self._door)

    def _take(self, news: dict[str, Any]) -> None:
        self._news = news
        if self._status["phase"] == "training" and self.is_broken():
            self.on_broken()

    def next_place(self, holds_state: bool, step: int) -> Place:
        """Wait, for as long as it takes, for a place in a generation after ours. Raises Dismissed, RunOver."""
        accepted, seen, tried_at = 0, "", 0.0
        tried: dict[str, list[Any]] | None = None
        while True:
            words = self._words(phase="waiting" if self.generation else "standby", accepted=accepted,
                                holds_state=holds_state, step=step)
            try:
                news = self._main.ask({**words, "hold_s": self.limits.beat_s, "seen": seen})
            except DriverUnreachable as error:
                if time.monotonic() - self._heard_at > self.limits.driver_lost_s:
                    self._lost = True
                    raise RunOver("failed", f"driver lost: {error}") from error
                time.sleep(0.02)
                continue
            self._heard_at, seen = time.monotonic(), news.pop("version")
            self._news = news
            if "over" in news:
                raise RunOver(news["over"], news["detail"])
            if news.get("evicted") or news.get("leave") or (news.get("finished") and not self.generation):
                raise Dismissed
            place = news.get("place")
            if place and place["generation"] > self.generation:
                self.generation = place["generation"]
                with self._lock:
                    self._status.update(phase="training", generation=self.generation, accepted=0)
                    self._status.pop("arithmetic", None)  # the driver has it
                return Place(generation=place["generation"], rank=place["rank"], size=place["size"],
                             local_rank=place["local_rank"], local_size=place["local_size"],
                             rendezvous=(place["address"], place["port"]), at_once=bool(place.get("at_once")))
            if news.get("finished"):
                raise RunOver("finished", "")
            if news.get("writes"):
                self.write_alone()
            reach = news.get("reach", {})
            is_asked_again = news.get("offer", 0) != accepted or time.monotonic() - tried_at > REACH_AGAIN_S
            if reach != tried or (self._status["unreachable"] and is_asked_again):
                tried, cut_off = reach, unreachable(reach, REACH_S)  # network: a connection to each peer
                tried_at = time.monotonic()
                with self._lock:
                    self._status["unreachable"] = cut_off if reach else None
            accepted = news.get("offer", 0)

    def wants_change(self) -> bool:
        """True when the driver wants a new generation: somebody joins, leaves, or we were told to drain."""
        return bool(self._news.get("notice")) or bool(self._status["drains"])

    def wants_stop(self) -> bool:
        """True when the attempt should stop at the next step, with a checkpoint: the driver is lost or was stopped."""
        return self._lost or "over" in self._news

    def drains(self) -> bool:
        """True when this worker was told to leave, by its host or by the list of hosts."""
        return self.must_hurry() or bool(self._news.get("unwanted"))

    def must_hurry(self) -> bool:
        """True when this worker's own host has told it to leave (SIGTERM): it has seconds, not the minutes of a notice."""
        return bool(self._status["drains"])

    def somebody_leaves(self) -> bool:
        """True when the host of a member of this generation has left the list."""
        return self._news.get("notice") == "leave"

    def is_writer(self, rank: int, waited_s: float) -> bool:
        """True when this worker is to write down what only memory holds, now that the attempt is over.

        The driver names one, and another one when that is gone. Without its word each rank gives those before it a second.
        """
        return bool(self._news.get("writes")) or waited_s >= rank + (0.0 if self._lost else NAMED_S)

    def is_broken(self) -> bool:
        """True when a member of our generation is gone (or we ourselves are, for the driver)."""
        place = self._news.get("place")
        is_ours = place is not None and place["generation"] == self.generation
        return bool(self._news.get("evicted")) or (is_ours and bool(self._news.get("dead")))

    def is_finished(self) -> bool:
        """True when a member has passed the last vote."""
        return bool(self._news.get("finished"))

    def drain(self) -> None:
        """Ask to leave at the next step boundary. Takes no lock: a signal handler may call it."""
        self._status["drains"] = True

    def note(self, phase: str, step: int) -> None:
        """Put into the next beat what we do; a worker in a phase of its own holds the state."""
        with self._lock:
            if self._status["phase"] != "reviving":
                self._status.update(phase=phase, step=step, holds_state=True)

    def go_back(self) -> None:
        """Nothing to do: the driver ends the attempt when nobody says that it holds the state, and the next restores."""

    def _tell(self, **changes: Any) -> None:
        """Say something now, and again until it is heard; when the driver is lost there is nobody to tell."""
        words, since = self._words(**changes), time.monotonic()
        while True:
            try:
                self._main.ask({**words, "hold_s": 0, "seen": ""})
                return
            except DriverUnreachable:
                if time.monotonic() - since > self.limits.driver_lost_s:
                    self._lost = True
                    return
                time.sleep(0.02)

    def fail(self, error: str) -> None:
        """Report the user's own exception: it ends the run everywhere. Not before this worker stood ready: what fails
        while it boots may be its host's fault, and must not take the others with it."""
        if self._beating.is_alive():
            self._tell(error=error[-MAX_ERROR_CHARACTERS:])

    def fail_machine(self, step: int, shard: int, kind: str, text: str) -> None:
        """Report that this machine has failed in a shard of a step (-1: in none), and that this worker leaves."""
        self._tell(machine={"step": step, "shard": shard, "kind": kind, "text": text[-MAX_ERROR_CHARACTERS:]})

    def tell_last(self, step: int) -> None:
        """Say how far this worker has come before it leaves an attempt that is over: its next beat may come too late."""
        if not self._lost:
            self._tell(step=step)

    def finish(self, step: int) -> None:
        """Report that the last vote has passed."""
        self._tell(phase="finished", step=step)

    def revive_soon(self) -> None:
        """Say that this process is about to start anew in place (from whatever thread notices it)."""
        assert self.launch.driver is not None
        client = DriverClient(self.launch.driver, self.launch.worker, self.launch.key, timeout_s=0.5)
        try:
            client.ask({**self._words(phase="reviving"), "hold_s": 0, "seen": ""})
        except DriverUnreachable:
            pass  # it will notice, by our silence


class PlainDriver:
    """Plain `horovodrun --host-discovery-script`: Horovod's own driver, unmended, so its limits remain (README).

    What is done against them from inside the worker: admission before `hvd.init()` (F1), leaving with 75 (F11).
    Horovod's notification service is used as it is (HMAC is checked before its pickle, network.py:92-99).
    """

    def __init__(self, launch: Launch):
        from horovod.common.elastic import notification_manager
        from horovod.runner.elastic.worker import HostUpdateResult

        self.launch, self.generation, self.attempt = launch, 0, launch.attempt
        self._changed = False
        self._drains = False
        self._update = HostUpdateResult
        env = os.environ
        self.address, self.port = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        self.host, self.local_rank = env["HOROVOD_HOSTNAME"], int(env["HOROVOD_LOCAL_RANK"])
        notification_manager.init()
        notification_manager.register_listener(self)

    def on_hosts_updated(self, timestamp: int, result: Any) -> None:
        """Hear Horovod's driver (it calls rank 0 only; the vote tells the others)."""
        self._changed = True

    def _http(self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None) -> bytes | None:
        url = f"http://{self.address}:{self.port}/{path}"
        request = urllib.request.Request(url, data=body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def next_place(self, holds_state: bool, step: int) -> Place:
        """Ask for a place and wait until everybody who got one has checked in (F1). Raises Dismissed, RunOver."""
        rounds = 0
        while True:
            if self._drains:
                raise Dismissed
            if self.generation == 0 and rounds == 0:
                names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
                seat = [int(os.environ[f"HOROVOD_{name}"]) for name in names]
            else:
                # READY may be said only once a round (registration.py:105-115), so this GET is never repeated and
                # waits as long as Horovod's barrier does.
                self._changed = False  # before we ask: what is announced later may not be in the answer
                try:
                    answer = self._http("GET", f"rank_and_size/{self.host}:{self.local_rank}")
                except OSError as error:
                    raise RunOver("failed", f"horovodrun is gone: {error}") from error
                seat = [int(x) for x in (answer or b"-1").decode().split(",")]
            rounds += 1
            if seat[0] < 0:
                raise Dismissed
            if self._is_admitted(seat[0], seat[1]):
                return Place(generation=self.generation, rank=seat[0], size=seat[1], local_rank=seat[2],
                             local_size=seat[3], rendezvous=(self.address, self.port), attempt=self.attempt)

    def _is_admitted(self, rank: int, size: int) -> bool:
        """Check in, and learn whether all have: rank 0 waits for everyone and says so.

        With it go the numbers of attempt and generation: rank 0 was there before, a newcomer counts from nowhere.
        """
        limit_s = self.launch.limits.boot_s if self.generation == 0 else 60.0
        deadline = time.monotonic() + limit_s
        self._http("PUT", f"admission/{rank}", str(size).encode())
        while time.monotonic() < deadline:
            if rank == 0:
                here = [r for r in range(size) if self._http("GET", f"admission/{r}") == str(size).encode()]
                if len(here) == size:
                    self.generation += 1
                    self._http("PUT", "admission/go", f"{self.attempt} {self.generation}".encode())
                    return True
            else:
                word = self._http("GET", "admission/go")
                if word and word != b"abort":
                    self.attempt, self.generation = map(int, word.split())
                if word:
                    return word != b"abort"
            time.sleep(0.02)
        if rank == 0:
            self._http("PUT", "admission/go", b"abort")
        return False

    def drain(self) -> None:
        """Ask to leave at the next step boundary. Takes no lock: a signal handler may call it."""
        self._drains = True

    def wants_change(self) -> bool:
        """True when Horovod's driver told us of other hosts, or we were told to drain."""
        return self._changed or self._drains

    def wants_stop(self) -> bool:
        """Never: this driver's death is noticed only at the next change."""
        return False

    is_broken = is_finished = somebody_leaves = wants_stop

    def is_writer(self, rank: int, waited_s: float) -> bool:
        """Return whether the ranks before this one have had a second each."""
        return waited_s >= rank

    def drains(self) -> bool:
        """True when this worker was told to leave."""
        return self._drains

    must_hurry = drains

    def note(self, phase: str, step: int) -> None:
        """Horovod's driver does not listen."""

    def go_back(self) -> None:
        """Count an attempt of the run more: it goes on from a checkpoint, in the same processes."""
        self.attempt += 1

    def fail(self, error: str) -> None:
        """Horovod's driver does not listen; the vote has told the others."""

    def finish(self, step: int) -> None:
        """Horovod's driver learns it from exit code 0."""
