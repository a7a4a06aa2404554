"""What the parts of the proof share: a folder, the device, the time that is left, runs of the job.

run.py → here → a Cluster (tests/cluster.py) whose workers share the one GPU

What always holds:
1. Each worker is a host of its own (127.0.0.1, 127.0.0.2, …) to the driver and to NCCL, because
   NCCL refuses two ranks of one host on one GPU. Its traffic goes over sockets on loopback.
2. All that a part starts ends with it, by its process id.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import Cluster, run_alone
from faults import Plan
from ports import free_port

HERE = Path(__file__).resolve().parent
SHARED_GPU = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
              "NCCL_IB_DISABLE": "1"}
"""NCCL_HOSTID, which differs from worker to worker, is set by the jobs themselves."""


def best_rounds(printed: str) -> dict[str, dict[str, Any]]:
    """Return the quickest line of each arm that speed.py has printed."""
    best: dict[str, dict[str, Any]] = {}
    for text in printed.splitlines():
        if text.startswith('{"model"'):
            line = json.loads(text)
            best[line["arm"]] = min(best.get(line["arm"], line), line,
                                    key=lambda one: one["step_ms"])
    return best


class OutOfTime(Exception):
    """The time of the proof is over."""


class Lab:
    """One proof: where it works, on what, and until when."""

    def __init__(self, folder: Path, device: str, seconds: float, generations: int,
                 is_tiny: bool):
        self.folder, self.device, self.generations = folder, device, generations
        self.is_tiny = is_tiny
        """For a test on CPUs, which has a minute: small models, fewer worlds."""
        self.long_steps = "700" if device == "cuda" else "150"
        """The steps of a run to which several faults happen; the last ones wait for the proof."""
        self.deadline = time.monotonic() + seconds
        self._weights: dict[tuple[str, ...], dict[str, str]] = {}
        self._number = 0
        os.environ.update(SHARED_GPU)

    def left_s(self, most: float) -> float:
        """Return how long something may take: at most so long, and no longer than is left."""
        left = self.deadline - time.monotonic()
        if left <= 1.0:
            raise OutOfTime
        return min(most, left)

    def is_over(self) -> bool:
        """True when the time of the proof is over: what is cut short then has not failed."""
        return time.monotonic() >= self.deadline - 1.0

    def job(self, *options: str) -> list[str]:
        """Return the command of the small job."""
        return [sys.executable, str(HERE / "job.py"), "--device", self.device, *options]

    def speed(self, *options: str) -> list[str]:
        """Return the command of the measured job."""
        return [sys.executable, str(HERE / "speed.py"), "--device", self.device,
                *(["--tiny"] if self.is_tiny else []), *options]

    def empty(self) -> Path:
        """Return a new folder."""
        self._number += 1
        folder = self.folder / str(self._number)
        folder.mkdir()
        return folder

    def alone(self, *options: str) -> dict[str, str]:
        """Return what the undisturbed job prints when it trains alone, by the first word."""
        if options not in self._weights:
            printed = run_alone(self.job(*options), self.empty(), self.left_s(120))
            self._weights[options] = dict(line.split(maxsplit=1) for line in printed.splitlines()
                                          if line.startswith(("weights ", "accuracy ")))
        return self._weights[options]

    @contextmanager
    def cluster(self, workers: int, command: Sequence[str], *options: str,
                plan: Plan | None = None) -> Iterator[Cluster]:
        """Run a command on so many workers for as long as the block."""
        self.left_s(60)
        with Cluster(self.empty(), hosts=workers, command=command, min_workers=1,
                     options=options, plan=plan) as cluster:
            yield cluster

    def measured(self, *options: str) -> dict[str, dict[str, Any]]:
        """Return the best round that a measured job prints for each arm when it runs alone. Where
        the time is over before its end, the rounds so far count."""
        try:
            printed = run_alone(self.speed(*options), self.empty(), self.left_s(240))
        except subprocess.TimeoutExpired as error:
            printed = (error.stdout or b"").decode(errors="replace")
        return best_rounds(printed)

    def measured_by(self, workers: int, *options: str) -> dict[str, Any]:
        """Return what a measured job prints with several workers of ours."""
        out = self.empty() / "speed.json"
        with self.cluster(workers, self.speed(*options, "--out", str(out))) as cluster:
            code = cluster.wait(self.left_s(180))
            assert code == 0, cluster.story()
        return next(iter(best_rounds(out.read_text()).values()))

    def measured_ddp(self, workers: int, *options: str) -> dict[str, Any]:
        """Return what a measured job prints with several workers of torch's DDP."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "WORLD_SIZE": str(workers), "GLOO_SOCKET_IFNAME": "lo"}
        limit_s = self.left_s(180)
        ranks = [self._start(self.speed("--arms", "ddp", *options), shared | {"RANK": str(rank)})
                 for rank in range(workers)]
        try:
            printed = [rank.communicate(timeout=limit_s)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert not any(rank.returncode for rank in ranks), printed
        return best_rounds(printed[0])["ddp"]

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=self.folder, env=os.environ | env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
