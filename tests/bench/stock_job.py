"""The peer: stock horovodrun with the script of its own documentation, on names of this machine
that it takes for hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench

INTERFACE = "lab0"
HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1", "0x7f.1")


@dataclass(frozen=True)
class Line:
    """One step of one rank."""

    time: float
    rank: int
    size: int
    step: int
    pid: int


class StockJob:
    """One job; use as a context manager."""

    def __init__(self, folder: Path, hosts: Sequence[str], *, interface: str = "lo",
                 job: Sequence[str] = (),
                 start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen):
        self.folder, self.log = folder, folder / "steps"
        folder.mkdir(parents=True, exist_ok=True)
        self.set_hosts(hosts)
        script = folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
        script.chmod(0o755)
        command = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(len(hosts)),
                   "--min-np", "2", "--host-discovery-script", str(script), "--network-interfaces",
                   interface, *bench.job("stock.py", str(self.log), "1000000", *job)]
        self.is_here = start is subprocess.Popen
        self.process = start(command, stdout=open(folder / "output", "w"), stderr=subprocess.STDOUT,
                             start_new_session=True)

    @classmethod
    @contextmanager
    def in_lab(cls, folder: Path, hosts: Sequence[str],
               job: Sequence[str] = ()) -> Iterator[tuple[Any, StockJob]]:
        """Run a job on hosts of a lab of its own (tests/netlab.py); yields the lab, too."""
        from netlab import COORDINATOR, Lab

        with Lab(folder / "lab", interface=INTERFACE, has_agents=False) as lab:
            lab.boot(COORDINATOR, *hosts)
            with cls(folder, hosts, interface=INTERFACE, job=job,
                     start=lambda *command, **popen: lab.start(COORDINATOR, *command,
                                                               **popen)) as started:
                yield lab, started

    def __enter__(self) -> StockJob:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_here:
            self.process.kill()
            return  # the rest ends with the lab's hosts
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in self.pids():
            if Path(f"/proc/{pid}").exists() and b"stock.py" in Path(
                    f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)

    def set_hosts(self, hosts: Sequence[str]) -> None:
        """Replace the hosts file whole."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:1\n" for host in hosts))
        new.replace(self.folder / "hosts")

    def lines(self) -> list[Line]:
        """Return all steps of all ranks."""
        if not self.log.exists():
            return []
        rows = [line.split() for line in self.log.read_text().splitlines()]
        return [Line(float(t), int(rank), int(size), int(step), int(pid))
                for t, rank, size, step, pid in rows]

    def next_step_after(self, moment: float, size: int, deadline_s: float) -> float:
        """Return how long after a moment the first step of a world of another size was finished;
        inf: not in time."""
        after = self.wait(lambda: [line.time for line in self.lines()
                                   if line.time > moment + 0.05 and line.size != size], deadline_s)
        return float(after[0] - moment) if after else float("inf")

    def wait_for_step(self, step: int, deadline_s: float) -> None:
        """Wait until some rank has done a step."""
        assert self.wait(lambda: any(line.step >= step for line in self.lines()),
                         deadline_s), self.output()

    def pids(self) -> set[int]:
        """Return the pids of all workers that have ever done a step."""
        return {line.pid for line in self.lines()}

    def wait(self, seen: Callable[[], Any], deadline_s: float) -> Any:
        """Wait until `seen()` is true; returns it, or what is false at the deadline or when the job
        ends."""
        deadline = time.monotonic() + deadline_s
        while not (found := seen()) and time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.02)
        return found

    def output(self) -> str:
        """Return what the job has printed."""
        return (self.folder / "output").read_text(errors="replace")
