"""A run of the lab under attack: every open port is found and attacked, and the costs are measured.

hostile.py → every open port of the lab ← here: open ports, memory, honest questions, events, steps

What always holds:
1. Ports are found in /proc/net of every host, again and again, so that no port is forgotten. Only
   sshd's is left out. `Siege.unattacked` names what was not attacked, such as a UDP port.
2. Memory is that of the processes that listen: before the attack, and at its peak.
3. Honest questions are asked every EVERY_S from the hosts that ask them in a run: the coordinator
   asks the agents, and a worker's host asks driver, rendezvous and the other workers' doors.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from hostile import WAYS
from netlab import COORDINATOR, Fleet, Lab

from elastic_trainer.discovery.client import ask, read_key
from elastic_trainer.discovery.commands import AGENT_PORT
from elastic_trainer.wire.messages import DriverClient
from elastic_trainer.world.reach import unreachable

HOSTILE = Path(__file__).resolve().parent / "hostile.py"
OUTSIDE = "10.66"
"""The attackers' network, reached by a route: all namespaces of a machine share its table of
neighbours (1024 entries), and 200 addresses on each of five hosts would fill it."""
EVERY_S = 0.2
LOOK_S = 1.0
ANSWER_S = 30.0
"""How long an honest asker waits; an answer that takes longer is none."""
LATE_S = 1.0
GROWTH_MIB = 16.0
DISTURBED_S = 1.0
"""A step that takes so much longer than the median step before the attack is disturbed."""
EVENT_EVERY_S = 59.5
"""One event an address and minute; the event log's clock is not the one that measures it."""
DISTURBANCES = ("worker.step_redone", "driver.worker_evicted", "driver.worker_gone",
                "driver.generation_formed", "worker.generation_started", "worker.revives",
                "worker.replica_differs", "state.checkpoint_restored")
BEGINNINGS = (b"POST", b"PUT", b"GET", b"DELETE", b"HTTP/")
TAP_BYTES = 1 << 22
ETH_P_ALL = 3
STATES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
NOT_REACHABLE = re.compile("0100007F|FEA9FEA9|00000000000000000000000001000000")
"""Loopback, and the address of the lab's own metadata service."""


# --- open ports -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Port:
    """One open port of a host, and the process that listens."""

    host: str
    kind: str
    number: int
    pid: int
    role: str


def owners(inodes: set[str], namespace: str) -> dict[str, int]:
    """Return which process of a network namespace holds each socket: of a parent and the child that
    it has just forked, the parent.
    """
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and os.readlink(entry / "ns/net") == namespace:
                for link in (entry / "fd").iterdir():
                    with suppress(OSError):
                        inode = os.readlink(link).removeprefix("socket:[").rstrip("]")
                        if inode in inodes:
                            found[inode] = min(int(entry.name), found.get(inode, sys.maxsize))
    return found


def variable(pid: int, name: str) -> str:
    """Return a variable of a process's environment; "" if it has none."""
    rows = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((row.partition(b"=")[2].decode() for row in rows
                 if row.startswith(name.encode() + b"=")), "")


def role_of(pid: int) -> str:
    """Return what a process is in a run."""
    said = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    if said.startswith(("sshd", "/usr/sbin/sshd")):
        return "sshd"
    if "elastic_trainer.driver.horovodrun" in said:
        return "driver"
    if "elastic_trainer.discovery" in said:
        return "agent"
    return "worker" if variable(pid, "ELASTIC_TRAINER_WORKER") else said[:60]


def open_ports(lab: Lab, but: str = "") -> set[Port]:
    """Return what listens on every host but one, without sshd."""
    found = set()
    for name, host in lab.hosts.items():
        rows: dict[str, tuple[str, int]] = {}
        if name == but:
            continue
        for kind, state in STATES.items():
            for line in Path(f"/proc/{host.pid}/net/{kind}").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == state and not NOT_REACHABLE.match(columns[1]):
                    rows[columns[9]] = kind, int(columns[1].rpartition(":")[2], 16)
        for inode, pid in owners(set(rows), os.readlink(f"/proc/{host.pid}/ns/net")).items():
            with suppress(OSError):  # it has ended
                if (role := role_of(pid)) != "sshd":
                    found.add(Port(name, *rows[inode], pid, role))
    return found


class FirstComer(threading.Thread):
    """Connects to each port of the workers' hosts as soon as it is open, from the stranger's host.

    The members of a world that forms listen for each other for milliseconds, on ports that a scan
    rarely finds in time. This one reads them in /proc.
    """

    def __init__(self, lab: Lab, stranger: str, hosts: Iterable[str]):
        super().__init__(daemon=True)
        self.lab, self.stranger, self.hosts = lab, stranger, list(hosts)
        self.lines: dict[tuple[str, int], list[socket.socket]] = {}
        """The connections to each port that was open."""
        self.over = threading.Event()

    def __enter__(self) -> FirstComer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()
        for line in [line for lines in self.lines.values() for line in lines]:
            line.close()

    def run(self) -> None:
        """Look every few milliseconds until told to end."""
        with self.lab.network_of(self.stranger):
            while not self.over.wait(0.003):
                for name in self.hosts:
                    for port in listening(self.lab, name) - {p for h, p in self.lines if h == name}:
                        self.lines[name, port] = [self._connect(name, port) for _ in range(2)]

    def _connect(self, name: str, port: int) -> socket.socket:
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex((self.lab.address(name), port))
        return line

    def accepted(self) -> int:
        """Return to how many ports a connection came about."""
        found = 0
        for lines in self.lines.values():
            with suppress(OSError):
                found += bool([line.getpeername() for line in lines])
        return found


def listening(lab: Lab, name: str) -> set[int]:
    """Return the ports on which a host of the lab accepts connections now."""
    if name not in lab.hosts:
        return set()
    rows = Path(f"/proc/{lab.hosts[name].pid}/net/tcp").read_text().splitlines()[1:]
    return {int(columns[1].rpartition(":")[2], 16) for columns in map(str.split, rows)
            if columns[3] == STATES["tcp"] and not NOT_REACHABLE.match(columns[1])}


# --- what honest ends say -------------------------------------------------------------------------

class Tap(threading.Thread):
    """Overhears the requests and answers that pass a host's interface, until `heard` is called."""

    def __init__(self, lab: Lab, name: str):
        super().__init__(daemon=True)
        with lab.network_of(name):
            self.tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self.tap.bind((lab.hosts[name].interface, ETH_P_ALL))
        self.tap.settimeout(0.5)
        self.streams: dict[tuple[bytes, bytes], bytearray] = defaultdict(bytearray)
        self.is_over = False
        self.start()

    def run(self) -> None:
        """Collect what each end of each connection says; of ssh only its name."""
        size = 0
        while not self.is_over and size < TAP_BYTES:
            try:
                frame = self.tap.recv(1 << 17)
            except TimeoutError:
                continue
            header = 4 * (frame[14] & 15)
            if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
                continue
            tcp = frame[14 + header : 14 + int.from_bytes(frame[16:18], "big")]
            payload = tcp[4 * (tcp[12] >> 4) :]
            ends = frame[26:30] + tcp[:2], frame[30:34] + tcp[2:4]
            if payload and (ends in self.streams or payload.startswith(BEGINNINGS)):
                self.streams[ends] += payload
                size += len(payload)

    def heard(self) -> list[tuple[bytes, bytes]]:
        """End, and return the requests, each with its answer."""
        self.is_over = True
        self.join()
        self.tap.close()
        pairs: list[tuple[bytes, bytes]] = []
        for (here, there), said in self.streams.items():
            if not said.startswith(b"HTTP/"):
                answers = bytes(self.streams.get((there, here), b""))
                pairs += zip(messages(bytes(said)), messages(answers), strict=False)
        return pairs


def messages(said: bytes) -> list[bytes]:
    """Return the whole messages of one end of a connection."""
    found = []
    while (end := said.find(b"\r\n\r\n")) >= 0:
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", said[:end])
        whole = end + 4 + (int(length[1]) if length else 0)
        if len(said) < whole:
            break
        found.append(said[:whole])
        said = said[whole:]
    return found


# --- honest questions -----------------------------------------------------------------------------

@dataclass
class Asker:
    """One thread on a host that asks one question every EVERY_S."""

    lab: Lab
    host: str
    name: str
    question: Callable[[], object]
    """Raises what it raises when there is no right answer."""
    took_s: list[tuple[float, float]] = field(default_factory=list)
    """When each question was asked, and how long its answer took."""
    failed: list[tuple[float, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Asker:
        """Begin to ask."""
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()
        return self

    def _ask(self) -> None:
        with self.lab.network_of(self.host):
            while not self.over.is_set():
                asked_at, began = time.time(), time.monotonic()
                try:
                    self.question()
                    self.took_s.append((asked_at, time.monotonic() - began))
                except Exception as error:
                    self.failed.append((asked_at, repr(error)))
                self.over.wait(max(0.0, EVERY_S - (time.monotonic() - began)))

    def stop(self) -> None:
        """Ask no more."""
        self.over.set()
        self.thread.join(2 * ANSWER_S)


def ask_driver(address: str, worker: str, key: bytes) -> None:
    """Send an empty word over a new connection, as a client whose first word is long does."""
    client = DriverClient(address, worker, key, timeout_s=ANSWER_S)
    try:
        client._connection.connect()
        assert client._exchange(b"") == b"{}"
    finally:
        client.close()


def ask_rendezvous(address: str, port: int) -> None:
    """Ask as Horovod's client at its end does: it deletes its name, and nothing is deleted."""
    connection = http.client.HTTPConnection(address, port, timeout=ANSWER_S)
    try:
        connection.request("DELETE", "/besieged/0")
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def ask_door(address: str, port: int) -> None:
    """Knock as a worker does that is to meet another one."""
    assert not unreachable({"door": (address, port)}, ANSWER_S)


# --- a siege --------------------------------------------------------------------------------------

@dataclass
class Memory:
    """What one process holds, by the names of `memory_of`."""

    role: str
    before: dict[str, float] = field(default_factory=dict)
    now: dict[str, float] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)

    def take(self, found: dict[str, float]) -> None:
        """Note what `memory_of` has found."""
        self.now = found
        self.peak = {name: max(value, self.peak.get(name, 0.0)) for name, value in found.items()}
        self.before = self.before or found


def memory_of(pid: int) -> dict[str, float]:
    """Return a process's memory in MiB, and its threads and descriptors. Raises OSError."""
    rows = re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    kib = {name: int(number) for name, number in rows}
    return {"private_mib": (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024,
            "resident_mib": kib["Rss"] / 1024, "threads": len(os.listdir(f"/proc/{pid}/task")),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


class Siege:
    """Attacks every open port of a run; use as a context manager, once all workers train.

    Memory, answers and steps are measured from here on; the attack begins with `begin`.
    """

    def __init__(self, lab: Lab, fleet: Fleet, folder: Path, *, stranger: str, addresses: int,
                 rate: float, turn_s: float, most_open: int = 2000):
        self.lab, self.fleet, self.folder, self.stranger = lab, fleet, folder, stranger
        self.log = folder / "hostile.log"
        folder.mkdir()
        self.driver, self.worker, self.key = self._driver()
        sources = [f"{OUTSIDE}.{number // 250}.{number % 250 + 1}" for number in range(addresses)]
        batch = "".join(f"addr add {source}/32 dev lo\n" for source in sources)
        (folder / "addresses").write_text(batch)
        lab.inside(stranger, "ip", "-batch", str(folder / "addresses"))
        files = {name: str(folder / name) for name in ("targets", "heard", "report")}
        (folder / "plan").write_text(json.dumps(files | {
            "sources": sources, "turn_s": turn_s, "rate": rate, "most_open": most_open}))
        self.routed: set[str] = set()
        """The hosts that know the way to the strangers."""
        self.ports: set[Port] = set()
        """All that were ever open."""
        self.memory: dict[int, Memory] = {}
        self.askers: list[Asker] = []
        self.attacker: subprocess.Popen[bytes] | None = None
        self.began_at = self.ended_at = 0.0

    def __enter__(self) -> Siege:
        self.look()
        self.askers = [Asker(self.lab, *one).start() for one in self._questions()]
        return self

    def __exit__(self, *_: object) -> None:
        for asker in self.askers:
            asker.over.set()
        self.end()

    def _driver(self) -> tuple[str, str, bytes]:
        """Return where the workers find the driver, the name of one of them, and its key."""
        for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]:
            with suppress(OSError):
                address = variable(pid, "ELASTIC_TRAINER_DRIVER")
                if address and variable(pid, "ELASTIC_TRAINER_RUN_DIR") == str(self.fleet.run_dir):
                    key = bytes.fromhex(variable(pid, "ELASTIC_TRAINER_KEY"))
                    return address, variable(pid, "ELASTIC_TRAINER_WORKER"), key
        raise AssertionError("no worker is there")

    def _questions(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """Yield who asks whom: the host, the name, the question."""
        key = read_key(self.lab.folder / "agent.key")
        workers = sorted({port.host for port in self.ports if port.role == "worker"})
        for number, name in enumerate(workers):
            agent, address = f"{self.lab.address(name)}:{AGENT_PORT}", self.lab.address(name)
            yield COORDINATOR, f"agent of {name}", partial(ask, agent, key, ANSWER_S)
            door = next(p.number for p in self.ports if p.role == "worker" and p.host == name)
            yield workers[number - 1], f"worker of {name}", partial(ask_door, address, door)
        yield workers[0], "driver", partial(ask_driver, self.driver, self.worker, self.key)
        for port in self.ports:
            if port.role == "rendezvous":
                address = self.lab.address(COORDINATOR)
                yield workers[1], "rendezvous", partial(ask_rendezvous, address, port.number)

    def begin(self, heard: Iterable[tuple[bytes, bytes]]) -> None:
        """Begin the attack, with what was overheard; the memory of before is what it is now."""
        (self.folder / "heard").write_text(json.dumps(
            [[base64.b64encode(said).decode() for said in pair] for pair in heard]))
        self.look()
        for memory in self.memory.values():
            memory.before = memory.peak = memory.now
        command: list[str | Path] = [sys.executable, HOSTILE, self.folder / "plan"]
        self.attacker = self.lab.start(self.stranger, command, stderr=open(self.log, "ab"))
        self.began_at = time.time()

    def last(self, seconds: float) -> None:
        """Let so much time go by, and look."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.look()
            time.sleep(min(LOOK_S, left))

    def last_until(self, what: str, seen: Callable[[], object]) -> None:
        """Look until `seen()` is true."""
        def looked() -> object:
            self.look()
            return seen()

        self.fleet.wait_for(what, looked)

    def end(self) -> None:
        """End the attack."""
        if self.attacker:
            self.attacker.kill()
            self.attacker.wait()
            self.attacker, self.ended_at = None, time.time()

    def look(self) -> None:
        """Look once for open ports and at the memory of those that listen."""
        assert not self.attacker or self.attacker.poll() is None, self.log.read_text()
        for name in self.lab.hosts.keys() - self.routed - {self.stranger}:
            self.routed.add(name)
            self.lab.inside(name, "ip", "route", "add", f"{OUTSIDE}.0.0/16",
                            "via", self.lab.address(self.stranger))
        now = {replace(port, role=self._role(port))
               for port in open_ports(self.lab, but=self.stranger)}
        self.ports |= now
        targets = json.dumps(sorted((self.lab.address(port.host), port.number, port.role)
                                    for port in now if port.kind == "tcp"))
        path = self.folder / "targets"
        if not path.exists() or path.read_text() != targets:
            path.with_suffix(".new").write_text(targets)
            path.with_suffix(".new").replace(path)
        for port in self.ports:
            role = "driver" if port.role == "rendezvous" else port.role
            with suppress(OSError):  # it has ended
                found = memory_of(port.pid)
                self.memory.setdefault(port.pid, Memory(role)).take(found)

    def _role(self, port: Port) -> str:
        """Return what a port is for: the driver has its own, and one for each rendezvous."""
        is_words = port.number == int(self.driver.rpartition(":")[2])
        return "rendezvous" if port.role == "driver" and not is_words else port.role

    # --- what was found ---------------------------------------------------------------------------

    def roles(self) -> list[str]:
        """Return what the processes are that listen."""
        return sorted({memory.role for memory in self.memory.values()})

    def growth_mib(self, role: str, kind: str = "private_mib") -> float:
        """Return by how much the processes of a role have grown at most, each."""
        return max(memory.peak[kind] - memory.before[kind]
                   for memory in self.memory.values() if memory.role == role)

    def attacks(self) -> dict[str, dict[str, int]]:
        """Return what was tried on whom, by `ROLE WAY`."""
        report = self.folder / "report"
        return dict(json.loads(report.read_text())["attacks"]) if report.exists() else {}

    def unattacked(self) -> list[str]:
        """Return the ports and ways that the attack has left out."""
        said = self.attacks()
        listening = {port.role for port in self.ports if port.kind == "tcp"}
        others = [f"{port.kind} {port.number} of {port.role} on {port.host}"
                  for port in self.ports if port.kind != "tcp"]
        names = [f"{role} {way}" for role in listening for way in WAYS]
        return sorted(others) + sorted({n for n in names if not said.get(n, {}).get("connected")})

    def consents(self) -> dict[str, int]:
        """Return which attacks were answered with a 200, and how often."""
        return {name: facts["consents"] for name, facts in self.attacks().items()
                if facts["consents"]}

    def answers_s(self, name: str = "", attacked: bool = True) -> list[float]:
        """Return how long honest answers took, sorted, in the attack or before it.

        `name`: only those of the questions whose name begins so.
        """
        return sorted(took_s for asker in self.askers if asker.name.startswith(name)
                      for asked_at, took_s in asker.took_s if self._is_in(asked_at, attacked))

    def unanswered(self) -> list[str]:
        """Return the honest questions that got no right answer, from the first to the last."""
        return [f"{asker.name}: {why}" for asker in self.askers for _, why in asker.failed]

    def _is_in(self, at: float, attacked: bool) -> bool:
        if not attacked:
            return at < self.began_at
        return self.began_at <= at <= (self.ended_at or time.time())

    def steps_s(self, attacked: bool = True) -> list[float]:
        """Return how long each step took, in the attack or before it, sorted."""
        ends = [event["time"] for event in self.fleet.events("worker.step_committed")]
        return sorted(end - begin for begin, end in pairwise(ends) if self._is_in(end, attacked))

    def disturbances(self) -> list[str]:
        """Return what was told in the attack that nobody may bring about from outside."""
        return [f"{name} {event.get('worker', '')} {event.get('reason', '')}"
                for name in DISTURBANCES for event in self.fleet.events(name)
                if self._is_in(event["time"], True)]

    def slow_steps(self) -> list[str]:
        """Return the steps that took much longer than the median step before the attack."""
        usual_s = statistics.median(self.steps_s(attacked=False))
        return [f"a step of {took_s:.2f} s" for took_s in self.steps_s()
                if took_s > usual_s + DISTURBED_S]

    def events_too_many(self) -> list[str]:
        """Return the addresses that have had two events within a minute while the attack lasted."""
        told: dict[str, list[float]] = defaultdict(list)
        for event in self.fleet.events("driver.stranger_refused"):
            if self._is_in(event["time"], True):
                told[event["address"]].append(event["time"])
        return sorted(address for address, at in told.items()
                      if any(later - sooner < EVENT_EVERY_S for sooner, later in pairwise(at)))
