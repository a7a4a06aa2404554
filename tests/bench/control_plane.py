"""What the driver costs while nothing happens: the real driver process, with simulated workers over
real sockets.

    .venv/bin/python tests/bench/control_plane.py [--sizes 64,512] [--seconds 20]

Each slot of the driver is a `sleep`. This process sends the messages of all workers as
`our_driver.OurDriver` does: each has a connection of its own, stands ready, accepts the offer, and
then sends one heartbeat after the other. CPU time is that of the driver's process (all threads), in
cores. A heartbeat's answer is late by what it took beyond the time for which the driver holds it
(`Membership.hold_s`).

Last line: one JSON object with cpu_64, cpu_512, beat_p99_s, wrong_evictions, met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import bench
import psutil

from elastic_trainer.config import Limits
from elastic_trainer.driver.membership import Membership
from elastic_trainer.driver.roster import Worker
from elastic_trainer.events.log import read_events
from elastic_trainer.wire.messages import NONCE, SIGNATURE, WORKER
from elastic_trainer.wire.seal import Kind, Session, seal

SLOT = ('echo "$ELASTIC_TRAINER_DRIVER $ELASTIC_TRAINER_KEY $ELASTIC_TRAINER_WORKER" > "$0/$$"; '
        'exec sleep 100000')
START_S = 240.0
BARS = {64: 0.05, 512: 0.35}
LATE_S = 0.25
AT = {"phase": "forward", "what": "micro-batch 17, 64 samples from 123456", "for_s": 0.05,
      "step": 1000, "waits_s": 0.0, "usual_s": 0.2, "own_s": 0.02, "steps": 900}


class Simulated:
    """One worker: it sends the heartbeats of a worker without news."""

    def __init__(self, driver: str, key: str, name: str):
        self.host, _, port = driver.rpartition(":")
        self.port, self.key, self.name, self.count = int(port), bytes.fromhex(key), name, 0
        self.session = Session()
        self.message: dict[str, Any] = {"phase": "standby", "generation": 0,
                                        "accepted": 0, "holds_state": False, "drains": False,
                                        "step": 0, "probe_port": 1, "unreachable": []}
        self.trains = asyncio.Event()
        self.lateness_s: list[float] = []

    async def open(self) -> None:
        """Connect, from the address of its host."""
        self.reader, self.writer = await asyncio.open_connection(
            self.host, self.port, local_addr=(self.name.split("/")[0], 0))

    async def ask(self, seen: str) -> dict[str, Any]:
        """Send a message and return the driver's answer."""
        self.count += 1
        request = {"worker": self.name, "count": self.count, "pid": 1, "time": time.time(),
                   **self.message, "hold_s": 0.25, "seen": seen}
        body, nonce = json.dumps(request).encode(), self.session.nonce()
        signature = seal(self.key, Kind.REQUEST, self.name.encode(), nonce.encode(), body)
        self.writer.write((
            f"POST /message HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Accept-Encoding: identity\r\n"
            f"Content-Length: {len(body)}\r\n{WORKER}: {self.name}\r\n{NONCE}: {nonce}\r\n"
            f"{SIGNATURE}: {signature}\r\n\r\n").encode() + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        assert " 200 " in head.splitlines()[0], head
        length = next(int(line.split(":")[1]) for line in head.splitlines()
                      if line.lower().startswith("content-length"))
        return dict(json.loads(await self.reader.readexactly(length)))

    async def live(self, hold_s: float) -> None:
        """Take a place, then send heartbeats until cancelled."""
        await self.open()
        seen = ""
        while True:
            asked_at = time.monotonic()
            news = await self.ask(seen)
            if self.trains.is_set() and news["version"] == seen:
                self.lateness_s.append(time.monotonic() - asked_at - hold_s)
            seen = news["version"]
            if place := news.get("place"):
                self.message |= {"phase": "training", "generation": place["generation"],
                                 "accepted": 0, "holds_state": True, "at": AT}
                self.trains.set()
            else:
                self.message["accepted"] = news.get("offer", 0)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process's threads so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def until(seen: Callable[[], Any]) -> None:
    """Wait until `seen()` is true."""
    deadline = time.monotonic() + START_S
    while not seen():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.1)


async def with_workers(folder: Path, size: int, act: Callable[[list[Simulated], int],
                                                              Awaitable[Any]]) -> Any:
    """Run the driver and `size` workers, and `act` with the workers and the driver's pid once all
    train."""
    slots = folder / "slots"
    slots.mkdir()
    hosts = "".join(f"127.0.{number // 250}.{number % 250 + 1}:1\n" for number in range(size))
    (folder / "hosts").write_text(hosts)
    command = [sys.executable, "-m", "elastic_trainer.driver.horovodrun", "-np", str(size),
               "--min-np", str(size), "--host-discovery-script", f"cat {folder / 'hosts'}",
               "sh", "-c", SLOT, str(slots)]
    env = os.environ | {"ELASTIC_TRAINER_RUN_DIR": str(folder / "run"),
                        "ELASTIC_TRAINER_LIMITS": f"boot_s={START_S:.0f},start_s={START_S:.0f}"}
    with open(folder / "log", "wb") as log, subprocess.Popen(
            command, env=env, stdout=log, stderr=log, start_new_session=True) as driver:
        tasks: list[asyncio.Task[None]] = []
        try:
            def started() -> list[list[str]]:
                assert driver.poll() is None, (folder / "log").read_text()
                return [text.split() for path in slots.iterdir()
                        if (text := path.read_text()).endswith("\n")]

            await until(lambda: len(started()) == size)
            workers = [Simulated(*message) for message in started()]
            membership = Membership(size, size, None)
            membership.roster.workers = {w.name: Worker(w.name, "", 0, 0.0, 0.0) for w in workers}
            tasks = [asyncio.create_task(worker.live(membership.hold_s())) for worker in workers]
            await until(lambda: all(worker.trains.is_set()
                                    for worker in workers) or any(t.done() for t in tasks))
            assert not any(t.done() for t in tasks), [t.exception() for t in tasks if t.done()][:1]
            return await act(workers, driver.pid)
        finally:
            for task in tasks:
                task.cancel()
            driver.send_signal(signal.SIGKILL)
            for path in slots.iterdir():
                os.kill(int(path.name), signal.SIGKILL)


def measured(folder: Path, size: int, seconds: float) -> tuple[float, list[float], int]:
    """Return the driver's cores, how late each answer was, and how many workers it has evicted."""
    async def idle(workers: list[Simulated], pid: int) -> tuple[float, list[float]]:
        await asyncio.sleep(5.0)  # what the start has left
        for worker in workers:
            worker.lateness_s.clear()
        before_s, began = cpu_s(pid), time.monotonic()
        await asyncio.sleep(seconds)
        used = (cpu_s(pid) - before_s) / (time.monotonic() - began)
        return used, [late_s for worker in workers for late_s in worker.lateness_s]

    with bench.empty(folder) as empty:
        cores, lateness_s = asyncio.run(with_workers(empty, size, idle))
        evicted = sum(e["event"] == "driver.worker_evicted" for e in read_events(empty / "run"))
    return cores, lateness_s, evicted


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure each size."""
    result: dict[str, Any] = {}
    late, evictions, met = [], 0, True
    for size in map(int, options.sizes.split(",")):
        cores, lateness_s, evicted = measured(folder, size, options.seconds)
        result[f"cpu_{size}"] = round(cores, 3)
        late += lateness_s
        evictions += evicted
        met &= cores <= BARS.get(size, 1.0)
        print(f"{size} workers: {cores:.3f} cores, {len(lateness_s) / options.seconds:.0f} "
              f"heartbeats a second, the last of 100 answered "
              f"{sorted(lateness_s)[int(len(lateness_s) * 0.99)]:.3f} s late, {evicted} evicted "
              f"(limit {Limits().silence_s:.0f} s)", flush=True)
    p99_s = sorted(late)[int(len(late) * 0.99)]
    return result | {"beat_p99_s": round(p99_s, 3), "wrong_evictions": evictions,
                     "met": met and p99_s < LATE_S and not evictions}


if __name__ == "__main__":
    bench.run(measure, sizes="64,512", seconds=20.0)
