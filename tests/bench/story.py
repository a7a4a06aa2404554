"""The story of a run, measured: the books of the hosts, the page, and what it costs to watch.

    python tests/bench/story.py [--faults 20] [--steps 1000000] [--long-faults 10000]

1. Books. The accounts of all hosts, against the lives of the hosts by an independent fold of the
   same events (tests/folds.py): on the soak (--faults), and on two replays: a storm, and one in
   which everybody is lost.
2. The page. `report --html` of a log of --steps steps and --long-faults faults.
3. Watching. A run of 4 workers is watched for a minute: in a terminal, and as a page with a reader
   that asks as the page's script does. Then the time from an event to its text in an answer.
   What the driver pays for now.json in a second, with 4, 64 and 1,000 workers that step.

Last line: one JSON object with books_error (the largest; limit 0.005), html_s (limit 20), html_mb
(limit 5), watch_cpu (the larger one, of a core; limit 0.03), page_update_s (the longest of 20;
limit 2), now_ms, and the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench
import long_run
import psutil
from cluster import Cluster
from folds import host_seconds
from waiting import wait_for

from elastic_trainer.driver.progress import NowFile
from elastic_trainer.driver.roster import Phase, Roster
from elastic_trainer.events.log import Events, read_events
from elastic_trainer.events.summary import summarize_log
from elastic_trainer.wire.heartbeat import At

PROGRAM = [sys.executable, "-m", "elastic_trainer"]
STORMS = {"storm": "rate=60/h,bulk=0.4,notice=0.5,replace=60,hours=0.25,seed=7",
          "zero": "rate=40/h,zero=0.5,notice=0.5,replace=90,hours=0.25,seed=3"}
IN_FORWARD = At(phase="forward", what="micro-batch 2, 32 samples from 64", for_s=0.5, step=0,
                waits_s=0.0, usual_s=1.0, own_s=0.5, steps=9)
WATCHED_S = 60.0
ASKS_S = 0.8
"""The interval of the page's script."""


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all three."""
    return (books(folder, options.faults) | page(folder, options.steps, options.long_faults)
            | watching(folder) | {"now_ms": [now_ms(folder, workers) for workers in (4, 64, 1000)]})


def books(folder: Path, faults: int) -> dict[str, Any]:
    """Return how far the accounts are from the lives of the hosts."""
    subprocess.run([sys.executable, bench.HERE / "soak.py", "--faults", str(faults), "--keep",
                    folder / "soak"], check=True)
    for name, storm in STORMS.items():
        subprocess.run([*PROGRAM, "replay", "--storm", storm, "--speed", "6", "--run", name,
                        "--runs-dir", folder / "replays"], check=True)
    errors = {}
    for name, run_dir in (("soak", folder / "soak" / "runs" / "run"),
                          *((name, folder / "replays" / name) for name in STORMS)):
        lived_s = host_seconds(read_events(run_dir))
        booked_s = sum(summarize_log(run_dir)["host_seconds"].values())
        errors[name] = round(abs(booked_s - lived_s) / lived_s, 6)
    return {"books_error": max(errors.values()), "books_errors": errors}


def page(folder: Path, steps: int, faults: int) -> dict[str, Any]:
    """Return the seconds and the megabytes of the page of a long run."""
    run_dir, file = folder / "long", folder / "long.html"
    long_run.write(run_dir, steps, faults)
    started = time.monotonic()
    subprocess.run([*PROGRAM, "report", run_dir, "--html", file], check=True)
    return {"html_s": round(time.monotonic() - started, 1),
            "html_mb": round(file.stat().st_size / 1e6, 2), "steps": steps, "faults": faults}


def watching(folder: Path) -> dict[str, Any]:
    """Return what it costs to watch a run of 4 workers, and when its page has an event."""
    with Cluster(folder / "watched", job=["--steps", "100000", "--step-s", "0.2"]) as cluster:
        cluster.wait_for_step(10)
        with Watch(cluster.run_dir) as terminal:
            in_terminal = terminal.of_a_core()
        with Watch(cluster.run_dir, "--web", "--bind", "127.0.0.1:0") as page:
            as_page = page.of_a_core()
            updates = [page.update_s(f"bench-{number}") for number in range(20)]
    return {"watch_cpu": max(in_terminal, as_page), "terminal_cpu": in_terminal,
            "page_cpu": as_page, "page_update_s": round(max(updates), 2)}


def now_ms(folder: Path, workers: int) -> float:
    """Return the milliseconds of processor time of a write of now.json."""
    roster = Roster()
    for number in range(workers):
        worker = roster.add(f"ip-10-0-{number // 256}-{number % 256}.ec2.internal", 0, 0.0)
        worker.phase, worker.count = Phase.TRAINING, 1
    roster.members = tuple(roster.workers)
    file, before = NowFile(folder, roster, threading.RLock()), time.process_time()
    for step in range(50):
        for worker in roster.workers.values():
            worker.step, worker.heard_at = step, time.monotonic()
            worker.at = replace(IN_FORWARD, step=step)
        file.write()
    return round((time.process_time() - before) / 50 * 1e3, 2)


class Watch:
    """`elastic-trainer watch` in a terminal; with --web also a reader of its page."""

    def __init__(self, run_dir: Path, *options: str):
        self.run_dir, self.newer = run_dir, 0
        self._shown, self._terminal = pty.openpty()
        self.process = subprocess.Popen([*PROGRAM, "watch", run_dir, *options],
                                        stdin=self._terminal, stdout=self._terminal)
        os.close(self._terminal)
        self._text = bytearray()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self._address() if options else ""

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def of_a_core(self) -> float:
        """Return the processor time of a minute, as a part of a core. Its start is no part of it.
        """
        process, until = psutil.Process(self.process.pid), time.monotonic() + 5 + WATCHED_S
        before = None
        while time.monotonic() < until:
            if self.url:
                self.ask()
            if before is None and time.monotonic() > until - WATCHED_S:
                before = process.cpu_times()
            time.sleep(ASKS_S)
        after = process.cpu_times()
        assert before and self.process.poll() is None
        return round((after.user + after.system - before.user - before.system) / WATCHED_S, 4)

    def ask(self) -> str:
        """Ask as the page's script does; return the sections that are new."""
        url = f"{self.url}sections?newer={self.newer}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text: str = answer.read().decode()
        self.newer = json.loads(text)["version"]
        return text

    def update_s(self, mark: str) -> float:
        """Return the seconds from an event until a reader of the page has it."""
        self.ask()
        Events(self.run_dir, run=self.run_dir.name).emit("driver.host_removed", host=mark)
        started = time.monotonic()
        while mark not in self.ask():
            assert time.monotonic() < started + 60
            time.sleep(ASKS_S)
        return time.monotonic() - started

    def _read(self) -> None:
        while True:
            try:
                self._text.extend(os.read(self._shown, 65536))
            except OSError:
                return

    def _address(self) -> str:
        wait_for("address", lambda: re.search(rb"http://\S+/", bytes(self._text)), 60)
        return re.findall(rb"http://\S+/", bytes(self._text))[0].decode()


if __name__ == "__main__":
    bench.run(measure, faults=20, steps=1_000_000, long_faults=10_000)
