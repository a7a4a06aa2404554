"""The agent on each host: watches for the host's end and for its illnesses, and answers the poller.

metadata service, disk, memory, GPUs → here → poller (signed JSON over HTTP)

What always holds:
1. Once draining, always draining: a notice is never taken back. A stop of this service is for this life only; the next
   one's answers have another `life`.
2. An answer is signed with the fleet's key, as an answer to the asker's nonce (edge/seal.py); whoever says something
   without a right signature, with a nonce that was used, or for another agent's address, is refused and counted.
   Nothing is parsed before its signature is checked; no pickle.
3. What cannot be found out is not an illness: a machine without a metadata service is ready, and says so in `why`.
4. A notice is never late because a disk or GPU hangs: health is examined in a thread of its own, and one that hangs is ill.
5. Only processes of one user count as workers: the agent's own, or another that an agent of root's is told of. Anybody's
   environment can name a worker, and an agent that runs as root can read all of them. What is told of workers is bounded.
6. Connections are bounded in number, bytes and time (edge/gate.py). A host that lacks descriptors keeps its last verdict,
   says so in `why`, and is examined again every EXAMINE_S.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_trainer.discovery.hosts import Health
from elastic_trainer.discovery.notices import Metadata, MetadataUnavailable
from elastic_trainer.wire.gate import NO_DESCRIPTOR, Asked, Gate, head, refuse
from elastic_trainer.wire.seal import Kind, is_sealed, seal

WATCH_S = 1.0
EXAMINE_S = 2.0
HUNG_S = 20.0
"""An examination that takes so long has met something that does not answer; nvidia-smi alone may take half of it."""
NVIDIA_SMI_S = 10.0
HURRY_S = 30.0
"""Of a notice's time: enough for the rest of a step and a rendezvous."""
NONCES = 1 << 16
"""So many questions are remembered (18 hours of one poller's): an older one, repeated, tells only how the host is."""
DISK_FREE = 0.02
MEMORY_FREE = 0.02
CLOCK_S = 60.0
"""A host whose clock differs by more is sick: S3 refuses its requests from 15 minutes on, and its log misleads."""
MAX_BYTES = 1 << 16
REQUEST_S = 5.0
"""How long a question has to arrive, and its answer to be taken."""
ANSWERS_AT_ONCE = 16
"""So many questions with the key are answered at a time; there is one poller."""
MAX_TEXT = 300
"""Characters of a reason, or of what a worker does, that the poller takes over from an agent."""
SIGNATURE, NONCE = "X-Elastic-Signature", "X-Elastic-Nonce"
MOST_WORKERS, MOST_NAME = 256, 120
"""So many workers are told to the poller, and so many characters of a name: its answer stays below MAX_BYTES."""
DOING = re.compile("(standby|waiting|step|reviving|finished)( [0-9]+)?")
"""What a worker calls itself by what it does (elastic_trainer/world/place.py has the same words)."""


class AgentUnreachable(ConnectionError):
    """The agent did not answer, or what answers there does not have the run's key."""


class Agent:
    """What one host knows of itself."""

    def __init__(self, metadata: Metadata | None, folder: Path, devices: Path = Path("/dev"), user: int | None = None):
        self.metadata, self.folder, self.user = metadata, folder, user
        """`user`: whose processes are workers; None: this process's own user."""
        self._lock = threading.Lock()
        self._drains: dict[str, Any] | None = None
        self._rebalance = self._has_called = False
        self._sick = self._unknown = self._unexamined = ""
        self._gpus = len(list(devices.glob("nvidia[0-9]*")))
        self._examining_since: float | None = None
        self._life = secrets.token_hex(8)
        self.refused = 0

    def drain(self, why: str, deadline: float | None, for_good: bool = True) -> None:
        """Begin to drain: for good, or for as long as this process lives."""
        with self._lock:
            if self._drains is None or for_good and not self._drains["for_good"]:
                self._drains = {"why": why, "deadline": deadline, "for_good": for_good}

    def last_call(self) -> None:
        """Send SIGTERM, once, to the workers that are still here when HURRY_S are left: they wait for nothing any more."""
        with self._lock:
            deadline = self._drains["deadline"] if self._drains else None
            if self._has_called or deadline is None or time.time() < deadline - HURRY_S:
                return
        try:
            found = self.workers()
        except OSError:
            return  # no descriptor is free: the next turn tries again
        self._has_called = True
        for worker in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(worker["pid"], signal.SIGTERM)

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers on this machine."""
        return workers() if self.user is None else workers(self.user)

    def has_workers(self) -> bool:
        """True if this machine has workers, or if that cannot be found out (no descriptor is free)."""
        try:
            return bool(self.workers())
        except OSError:
            return True

    def deadline(self) -> float:
        """Return when a draining host ends; 0.0 if it does not drain, or nobody knows."""
        with self._lock:
            return float(self._drains["deadline"] or 0.0) if self._drains else 0.0

    def refuse(self) -> None:
        """Count a stranger."""
        with self._lock:
            self.refused += 1

    def listen(self) -> None:
        """Ask the metadata service once."""
        if self.metadata:
            try:
                notice = self.metadata.notice()
                if notice:
                    self.drain(f"{notice.action} at {time.strftime('%H:%M:%S', time.gmtime(notice.deadline))} UTC",
                               notice.deadline)
                self._rebalance, self._unknown = self.metadata.rebalance(), ""
            except MetadataUnavailable as error:
                self._unknown = str(error)

    def examine(self) -> None:
        """Look at the machine once. May hang, as a broken disk or GPU does."""
        self._examining_since = time.monotonic()
        try:
            gpus = gpu_count()
            self._gpus = max(self._gpus, gpus or 0)
            self._sick = illness(self.folder) or (
                f"GPU lost: {gpus} of {self._gpus} answer" if gpus is not None and gpus < self._gpus else "")
            self._unexamined = ""
        except OSError as error:  # no descriptor is free. That is no illness; the verdict before stands
            self._unexamined = f"not examined: {error}"
        finally:
            self._examining_since = None

    def health(self) -> dict[str, Any]:
        """Return the answer to the poller."""
        with self._lock:
            drains, since = self._drains, self._examining_since
        hung_s = 0.0 if since is None else time.monotonic() - since
        sick = self._sick if hung_s < HUNG_S else f"GPU lost, or disk: they have not answered for {hung_s:.0f} s"
        state = "draining" if drains else "sick" if sick else "ready"
        return {"state": state, "why": drains["why"] if drains else sick or self._unexamined or self._unknown,
                "deadline": drains["deadline"] if drains else None, "for_good": bool(drains and drains["for_good"]),
                "life": self._life, "rebalance": self._rebalance,
                "workers": [worker | {"worker": worker["worker"][:MOST_NAME]} for worker in self.workers()[:MOST_WORKERS]],
                "standby": standbys(standby_folder(self.user)), "time": time.time(),
                "refused": self.refused}


def illness(folder: Path) -> str:
    """Return what is wrong with this machine's disk or memory; "" if nothing is."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return f"disk: {error}"
    if disk.free < DISK_FREE * disk.total:
        return f"disk full: {disk.free >> 20} MiB left under {folder}"
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(memory[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    if free < MEMORY_FREE * total:
        return f"no memory: {free >> 10} MiB left"
    return ""


def gpu_count() -> int | None:
    """Return how many GPUs answer; None where there is no nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return None
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S)
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return 0
    except subprocess.TimeoutExpired:
        return 0


def workers(user: int | None = None) -> list[dict[str, Any]]:
    """Return a user's workers (by default one's own), by their environment: name, pid, and what each does by its own word
    ("step 7").

    A worker's children have its name, too, and so has the shim before it, which has no word: signals go to the outermost
    of a family, and the word is that of the outermost that has one.
    """
    found: dict[int, tuple[str, int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if not _is_of(entry, os.geteuid() if user is None else user):
                    continue
                environment = (entry / "environ").read_bytes().split(b"\0")
                before, _, after = (entry / "stat").read_text(errors="replace").rpartition(")")
            except OSError:
                continue
            found |= {int(entry.name): (line.partition(b"=")[2].decode(errors="replace"), int(after.split()[1]),
                                        before.partition("(")[2])
                      for line in environment if line.startswith(b"ELASTIC_TRAINER_WORKER=")}

    def outermost(family: dict[int, tuple[str, int, str]]) -> dict[str, int]:
        return {name: pid for pid, (name, parent, _) in family.items() if family.get(parent, ("",))[0] != name}

    speaking = outermost({pid: one for pid, one in found.items() if DOING.fullmatch(one[2])})
    return [{"pid": pid, "worker": name, "doing": found[speaking[name]][2] if name in speaking else "booting"}
            for name, pid in outermost(found).items()]


def _is_of(entry: Path, user: int) -> bool:
    """True for a process of a user's, by all its user ids: a setuid program that anybody has started has another real one.

    Raises OSError.
    """
    if entry.stat().st_uid != user:
        return False
    ids = re.search(rb"^Uid:([\t0-9]+)$", (entry / "status").read_bytes(), re.MULTILINE)
    return ids is not None and set(ids[1].split()) == {str(user).encode()}


def standby_folder(user: int | None = None) -> Path:
    """Return where a user's standby workers (by default one's own) wait on this machine, one socket each
    (elastic_trainer/standby/shim.py has the same rule)."""
    uid = os.getuid() if user is None else user
    return Path(os.environ.get("ELASTIC_TRAINER_STANDBY_DIR") or f"/tmp/elastic-trainer-{uid}")


def standbys(folder: Path) -> int:
    """Return how many standby workers have booted and wait in a folder."""
    return sum((Path("/proc") / path.stem.rpartition("-")[2]).exists() for path in folder.glob("*.sock"))


class AgentServer:
    """Answers `GET /health`, each time in a thread that begins when the question has shown the key."""

    def __init__(self, bind: str, port: int, key: bytes, agent: Agent):
        self.key, self.agent = key, agent
        self._nonces: deque[str] = deque(maxlen=NONCES)
        self._known: set[str] = set()
        self._answering = threading.Semaphore(ANSWERS_AT_ONCE)
        self.gate = Gate(bind, port, self._begin, lambda *_: agent.refuse(), request_s=REQUEST_S)
        self.server_address = self.gate.address

    def serve_forever(self) -> None:
        """Answer until `shutdown`."""
        self.gate.serve_forever()

    def shutdown(self) -> None:
        """Answer no more."""
        self.gate.shutdown()

    def server_close(self) -> None:
        """Close the listening socket."""
        self.gate.close()

    def is_new(self, nonce: str) -> bool:
        """True for a nonce that was not used before; it is from now on."""
        if nonce in self._known:
            return False
        if len(self._nonces) == NONCES:
            self._known.discard(self._nonces[0])
        self._nonces.append(nonce)
        self._known.add(nonce)
        return True

    def _begin(self, connection: socket.socket, _: str, asked: Asked, __: bytes) -> None:
        """Have a question answered if it is signed and new."""
        nonce = asked.headers.get(NONCE.lower(), "")
        given = asked.headers.get(SIGNATURE.lower(), "")
        asked_of = _parts(nonce, connection.getsockname()[0])
        is_signed = is_sealed(given, self.key, Kind.QUESTION, *asked_of)
        if not (f"{asked.method} {asked.path}" == "GET /health" and is_signed and self.is_new(nonce)):
            self.agent.refuse()
            return refuse(connection, 403)
        if not self._answering.acquire(blocking=False):
            return connection.close()
        try:
            threading.Thread(target=self._answer, args=(connection, nonce), daemon=True).start()
        except RuntimeError:  # no thread to be had
            self._answering.release()
            connection.close()

    def _answer(self, connection: socket.socket, nonce: str) -> None:
        try:
            connection.settimeout(REQUEST_S)
            body = json.dumps(self.agent.health()).encode()
            signature = f"{SIGNATURE}: {seal(self.key, Kind.HEALTH, nonce.encode(), body)}"
            connection.sendall(head(200, "OK", len(body), signature, "Connection: close") + body)
        except OSError:
            pass  # the poller has gone, or no descriptor is free: it asks again
        finally:
            connection.close()
            self._answering.release()


def ask(address: str, key: bytes, timeout_s: float, clock: Callable[[], float] = time.time) -> Health:
    """Ask the agent at host:port how it is. Raises AgentUnreachable."""
    nonce = secrets.token_hex(8)
    try:
        asked = clock()
        status, headers, body = _get(address, key, nonce, timeout_s)
        if status != 200 or not is_sealed(headers.get(SIGNATURE) or "", key, Kind.HEALTH, nonce.encode(), body):
            raise AgentUnreachable(f"what answers at {address} does not have the run's key, or has another address behind "
                                   f"NAT ({status})")
        says = json.loads(body)
        off = float(says["time"]) - (asked + clock()) / 2
        is_off = abs(off) > CLOCK_S and says["state"] == "ready"
        return Health(state="sick" if is_off else str(says["state"])[:MAX_TEXT],
                      why=f"its clock is {off:+.0f} s off" if is_off else str(says["why"])[:MAX_TEXT],
                      deadline=None if says["deadline"] is None else _checked_time(says["deadline"]),
                      for_good=bool(says["for_good"]), life=str(says["life"]), is_clock_off=is_off,
                      rebalance=bool(says["rebalance"]), refused=int(says["refused"]),
                      facts={"workers": [str(worker["doing"])[:MAX_TEXT] for worker in says["workers"]],
                             "standby": int(says["standby"])})
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, ArithmeticError,
            RecursionError) as error:
        if isinstance(error, AgentUnreachable):
            raise
        raise AgentUnreachable(f"the agent at {address} cannot be reached: {error!r}") from error


def _checked_time(seconds: Any) -> float:
    """Return seconds since 1970. Raises ValueError, TypeError."""
    if not 0 <= float(seconds) < 2.0**33:
        raise ValueError("a time that is none")
    return float(seconds)


def _parts(nonce: str, agent: str) -> tuple[bytes, ...]:
    """Return what the signature of a question covers: the IP address of the agent, too. A question that was overheard
    would be answered by every agent that was not asked it; each knows only the nonces that it has seen itself."""
    return nonce.encode(), agent.encode(), b"GET /health"


def _get(address: str, key: bytes, nonce: str, timeout_s: float) -> tuple[int, http.client.HTTPMessage, bytes]:
    """GET /health of host:port: status, headers and body. Whoever has not answered whole in that time is out of reach:
    http.client bounds only each of its reads. Raises OSError, HTTPException, ValueError, IndexError."""
    host, _, port = address.rpartition(":")
    deadline, said = time.monotonic() + timeout_s, b""
    with socket.create_connection((host, int(port)), timeout_s) as line:
        signature = seal(key, Kind.QUESTION, *_parts(nonce, line.getpeername()[0]))
        lines = ["GET /health HTTP/1.0", f"{NONCE}: {nonce}", f"{SIGNATURE}: {signature}", "", ""]
        line.sendall("\r\n".join(lines).encode())
        while len(said) < MAX_BYTES and (piece := line.recv(MAX_BYTES)):
            said += piece
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"its answer had not ended after {timeout_s} s")
            line.settimeout(left)
    head, _, body = said.partition(b"\r\n\r\n")
    first, _, fields = head.partition(b"\r\n")
    return int(first.split()[1]), http.client.parse_headers(io.BytesIO(fields + b"\r\n\r\n")), body


def read_key(path: Path) -> bytes:
    """Return the run's key. Raises ValueError when others on the machine can read it."""
    if os.stat(path).st_mode & 0o077:
        raise ValueError(f"{path} can be read by others. Run: chmod 600 {path}")
    key = path.read_bytes().strip()
    if len(key) < 32:
        raise ValueError(f"{path} has {len(key)} bytes. Write 64 random hex digits into it: "
                         f"(umask 077; openssl rand -hex 32 > {path})")
    return key


def serve(bind: str, port: int, key: bytes, agent: Agent, announce: Callable[[int], None] = lambda port: None) -> None:
    """Run the agent until SIGTERM, which drains the host first: whoever stops the machine stops services before it."""
    server = AgentServer(bind, port, key, agent)
    stopping, examined = threading.Event(), threading.Event()

    def stop() -> None:
        agent.drain("the host is being stopped", time.time() + 90.0, for_good=False)
        stopping.set()

    def examine() -> None:
        while not stopping.is_set():
            agent.examine()
            examined.set()
            stopping.wait(EXAMINE_S)

    # In a thread: the handler may interrupt this one where it holds a lock that `stop` needs.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=stop, daemon=True).start())
    threading.Thread(target=examine, daemon=True).start()
    examined.wait(HUNG_S)  # its first answer is not "ready" before that is known
    threading.Thread(target=server.serve_forever, daemon=True).start()
    announce(server.server_address[1])
    while not stopping.wait(WATCH_S):
        agent.listen()
        agent.last_call()
    while time.time() < agent.deadline() and agent.has_workers():
        agent.last_call()
        time.sleep(WATCH_S)  # the poller must hear it, and the workers must have left
    server.shutdown()
