"""The agent on each host: watches for the host's end and for its illnesses, and answers the poller.

metadata service, disk, memory, GPUs → here → poller (signed JSON over HTTP)

What always holds:
1. Once draining, always draining: a notice is never taken back.
2. An answer is signed with the run's key and the asker's nonce; a question without a right signature gets 403 and is
   counted. Nothing is parsed before its signature is checked; no pickle.
3. What cannot be found out is not an illness: a machine without a metadata service is ready, and says so in `why`.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from discovery.hosts import Health
from discovery.notices import Metadata, MetadataUnavailable

WATCH_S = 1.0
DISK_FREE = 0.02
MEMORY_FREE = 0.02
CLOCK_S = 60.0
"""A host whose clock differs by more is sick: S3 refuses its requests from 15 minutes on, and its log misleads."""
MAX_BYTES = 1 << 16
SIGNATURE, NONCE = "X-Elastic-Signature", "X-Elastic-Nonce"


class AgentUnreachable(ConnectionError):
    """The agent did not answer, or what answers there does not have the run's key."""


def sign(key: bytes, nonce: str, body: bytes) -> str:
    """Return the hex HMAC-SHA256 of nonce and body."""
    return hmac.new(key, nonce.encode(errors="replace") + b"\n" + body, hashlib.sha256).hexdigest()


class Agent:
    """What one host knows of itself."""

    def __init__(self, metadata: Metadata | None, folder: Path):
        self.metadata, self.folder = metadata, folder
        self._lock = threading.Lock()
        self._drains: dict[str, Any] | None = None
        self._rebalance = False
        self._sick = self._unknown = ""
        self._gpus = gpu_count()
        self.refused = 0

    def drain(self, why: str, deadline: float | None) -> None:
        """Begin to drain, for good."""
        with self._lock:
            if self._drains is None:
                self._drains = {"why": why, "deadline": deadline}

    def look(self) -> None:
        """Ask the metadata service and the machine once."""
        if self.metadata:
            try:
                notice = self.metadata.notice()
                if notice:
                    self.drain(f"{notice.action} at {time.strftime('%H:%M:%S', time.gmtime(notice.deadline))} UTC",
                               notice.deadline)
                self._rebalance, self._unknown = self.metadata.rebalance(), ""
            except MetadataUnavailable as error:
                self._unknown = str(error)
        self._sick = illness(self.folder, self._gpus)

    def health(self) -> dict[str, Any]:
        """Return the answer to the poller."""
        with self._lock:
            drains = self._drains
        state = "draining" if drains else "sick" if self._sick else "ready"
        return {"state": state, "why": drains["why"] if drains else self._sick or self._unknown,
                "deadline": drains["deadline"] if drains else None, "rebalance": self._rebalance,
                "workers": workers(), "standby": standbys(standby_folder()), "time": time.time(),
                "refused": self.refused}


def illness(folder: Path, gpus: int | None) -> str:
    """Return what is wrong with this machine; "" if nothing is."""
    disk = shutil.disk_usage(folder)
    if disk.free < DISK_FREE * disk.total:
        return f"disk full: {disk.free >> 20} MiB left under {folder}"
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(memory[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    if free < MEMORY_FREE * total:
        return f"no memory: {free >> 10} MiB left"
    now = gpu_count()
    if gpus and now is not None and now < gpus:
        return f"GPU lost: {now} of {gpus} answer"
    return ""


def gpu_count() -> int | None:
    """Return how many GPUs the driver lists; None where there is no driver."""
    if not shutil.which("nvidia-smi"):
        return None
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    except (OSError, subprocess.TimeoutExpired):
        return 0


def workers() -> list[dict[str, Any]]:
    """Return the workers on this machine, by their environment: name and pid. (One behind a shim is there twice.)"""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {line.partition(b"=")[2].decode(errors="replace"): int(entry.name)
                      for line in environment if line.startswith(b"ELASTIC_TRAINER_WORKER=")}
    return [{"pid": pid, "worker": worker} for worker, pid in found.items()]


def standby_folder() -> Path:
    """Return where standby workers wait on this machine, one socket each (elastic_trainer/shim.py has the same rule)."""
    return Path(os.environ.get("ELASTIC_TRAINER_STANDBY_DIR") or f"/tmp/elastic-trainer-{os.getuid()}")


def standbys(folder: Path) -> int:
    """Return how many standby workers have booted and wait in a folder."""
    return sum((Path("/proc") / path.stem.rpartition("-")[2]).exists() for path in folder.glob("*.sock"))


class AgentServer(ThreadingHTTPServer):
    """Answers `GET /health`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, bind: str, port: int, key: bytes, agent: Agent):
        self.key, self.agent = key, agent
        super().__init__((bind, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A stranger's rubbish is counted where it is refused."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 5.0
    server: AgentServer

    def do_GET(self) -> None:
        nonce = self.headers.get(NONCE, "")
        given = self.headers.get(SIGNATURE, "").encode(errors="replace")
        if self.path != "/health" or not hmac.compare_digest(given, sign(self.server.key, nonce, b"GET /health").encode()):
            self.server.agent.refused += 1
            self.send_response(403)
            self.end_headers()
            return
        body = json.dumps(self.server.agent.health()).encode()
        self.send_response(200)
        self.send_header(SIGNATURE, sign(self.server.key, nonce, body))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the base class's)
        """Stay silent."""


def ask(address: str, key: bytes, timeout_s: float, clock: Callable[[], float] = time.time) -> Health:
    """Ask the agent at host:port how it is. Raises AgentUnreachable."""
    host, _, port = address.rpartition(":")
    nonce = secrets.token_hex(8)
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        asked = clock()
        connection.request("GET", "/health", headers={NONCE: nonce, SIGNATURE: sign(key, nonce, b"GET /health")})
        response = connection.getresponse()
        body = response.read(MAX_BYTES)
        given = (response.headers.get(SIGNATURE) or "").encode(errors="replace")
        if response.status != 200 or not hmac.compare_digest(given, sign(key, nonce, body).encode()):
            raise AgentUnreachable(f"what answers at {address} does not have the run's key ({response.status})")
        says = json.loads(body)
        off = float(says["time"]) - (asked + clock()) / 2
        is_off = abs(off) > CLOCK_S and says["state"] == "ready"
        return Health(state="sick" if is_off else str(says["state"]),
                      why=f"its clock is {off:+.0f} s off" if is_off else str(says["why"]), deadline=says["deadline"],
                      rebalance=bool(says["rebalance"]),
                      facts={"workers": len(says["workers"]), "standby": int(says["standby"]), "refused": says["refused"]})
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        if isinstance(error, AgentUnreachable):
            raise
        raise AgentUnreachable(f"the agent at {address} cannot be reached: {error!r}") from error
    finally:
        connection.close()


def read_key(path: Path) -> bytes:
    """Return the run's key. Raises ValueError when others on the machine can read it."""
    if os.stat(path).st_mode & 0o077:
        raise ValueError(f"{path} can be read by others. Run: chmod 600 {path}")
    key = path.read_bytes().strip()
    if len(key) < 32:
        raise ValueError(f"{path} has {len(key)} bytes. Write 64 random hex digits into it: openssl rand -hex 32 > {path}")
    return key


def serve(bind: str, port: int, key: bytes, agent: Agent, announce: Callable[[int], None] = lambda port: None) -> None:
    """Run the agent until SIGTERM, which drains the host first: whoever stops the machine stops services before it."""
    server = AgentServer(bind, port, key, agent)
    stopping = threading.Event()

    def stop(number: int, frame: Any) -> None:
        agent.drain("the host is being stopped", time.time() + 90.0)
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    announce(server.server_address[1])
    while not stopping.wait(WATCH_S):
        agent.look()
    while workers() and time.time() < (agent.health()["deadline"] or 0.0):
        time.sleep(WATCH_S)  # the poller must hear it, and the workers must have left
    server.shutdown()
