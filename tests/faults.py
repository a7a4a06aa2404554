"""The vocabulary of faults: what happens to which worker, at which point of the protocol.

    Plan().kill(host="127.0.0.2", at="step.voted", step=7).freeze(host="127.0.0.3",
    at="step.prepared", step=12)

A plan travels to the workers as JSON; there it listens to the engine's own events
(`train(listeners=[…])`). Every fault fires once in the whole run, on whichever worker, and leaves a
file: tests assert that it fired.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POINTS = ("boot", "world.place_taken", "world.init_entered", "world.init_left",
          "world.transfer_started", "world.transfer_ended", "world.generation_entered",
          "step.computed", "step.prepared", "step.voted", "step.applied", "data", "batch",
          "gradient", "evaluate", "compile", "shards.moving", "shards.computed")
RELEASED = "released"
"""A test lets those go who are held when it makes this file in its folder."""


@dataclass
class Plan:
    """Faults to inject, in any order."""

    faults: list[dict[str, Any]] = field(default_factory=list)

    def add(self, do: str, *, at: str, host: str | None = None, step: int | None = None,
            generation: int | None = None, after: int = 0, is_asked_for: bool = False,
            **facts: Any) -> Plan:
        """Add a fault: `do` when a worker on `host` (any, if None) reaches the point `at` with
        these facts, and the first `after` faults of the plan have fired. `is_asked_for`: not
        before the test asks for it (Cluster.ask_for)."""
        assert at in POINTS, at
        wanted = {k: v for k, v in {"step": step, "generation": generation, **facts}.items()
                  if v is not None}
        self.faults.append({"do": do, "at": at, "host": host, "facts": wanted,
                            "number": len(self.faults), "after": after,
                            "is_asked_for": is_asked_for})
        return self

    def kill(self, **where: Any) -> Plan:
        """SIGKILL."""
        return self.add("kill", **where)

    def freeze(self, **where: Any) -> Plan:
        """SIGSTOP: the process exists, holds its sockets, and sends nothing."""
        return self.add("freeze", **where)

    def to_json(self) -> str:
        """Return the plan as it travels in the environment."""
        return json.dumps(self.faults)


def asked_for(folder: Path, number: int) -> Path:
    """Return the file with which a test asks for a fault of its plan."""
    return folder / f"asked-for-{number}"


def linger(folder: Path, seconds: float = 10.0) -> None:
    """Wait until the test has seen what it waits for (Cluster.finish), at most so long. A job whose
    last steps linger does not end before a newcomer on a busy machine has booted and joined.
    """
    deadline = time.monotonic() + seconds
    while not (folder / "hurry").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


class Injector:
    """In the worker: listens, and injects the plan's faults into this process."""

    def __init__(self, plan: str, folder: Path):
        self.faults, self.folder = json.loads(plan), folder
        self.tensors: dict[str, Callable[[], Any]] = {}
        """What the job lets a fault change: a name → what returns the tensor."""
        self.lingers_from = math.inf
        """The step from which each step lingers."""

    @property
    def host(self) -> str:
        """This worker's host; a standby gets one when it gets its place."""
        return os.environ.get("HOROVOD_HOSTNAME", "")

    def linger_at_the_end(self, steps: int, pause_s: float) -> None:
        """Let the last 10 of the steps linger, if the job pauses between steps for its test."""
        if pause_s >= 0.05:
            self.lingers_from = steps - 10

    def __call__(self, point: str, facts: dict[str, Any]) -> None:
        if point == "step.computed" and facts["step"] >= self.lingers_from:
            linger(self.folder)
        for fault in self.faults:
            if fault["at"] == point and self._is_due(fault, facts) and self._claim(fault, facts):
                self._do(fault["do"])

    def _is_due(self, fault: dict[str, Any], facts: dict[str, Any]) -> bool:
        return (fault["host"] in (None, self.host)
                and all(facts.get(name) == value for name, value in fault["facts"].items())
                and (not fault["is_asked_for"] or asked_for(self.folder, fault["number"]).exists())
                and all(self._fired(number).exists() for number in range(fault["after"])))

    def _fired(self, number: int) -> Path:
        return self.folder / f"fired-{number}"

    def flip(self, name: str) -> None:
        """Flip the lowest bit of the first element: the smallest fault of memory."""
        import torch  # here: a test does not need it

        self.tensors[name]().detach().view(-1)[:1].view(torch.uint8)[0] ^= 1

    def _claim(self, fault: dict[str, Any], facts: dict[str, Any]) -> bool:
        try:
            with open(self._fired(fault["number"]), "x") as file:
                json.dump({"host": self.host, "pid": os.getpid(),
                           **{k: str(v) for k, v in facts.items()}}, file)
            return True
        except FileExistsError:
            return False

    def _do(self, do: str) -> None:
        match do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill_together":
                self._wait_for_all(do)
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "abort":  # as an uncaught exception in a thread of Gloo's does
                ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
            case "crash":
                sys.exit(1)
            case "hang":
                while True:
                    time.sleep(3600)
            case "hold":
                hold_until_there(self.folder / RELEASED)
            case "lose_vote":
                from elastic_trainer.world.collectives import (
                    PeersLost,  # here: it imports torch, which a test does not need
                )

                raise PeersLost("the vote's answer did not arrive, as planned")
            case "flip_weight" | "flip_moment":
                self.flip(do.removeprefix("flip_"))
            case "io_error":
                raise OSError(errno.EIO, "Input/output error, as planned")
            case "gpu_lost":
                import torch  # here: a test does not need it

                raise torch.AcceleratorError(
                    "CUDA error: an illegal memory access was encountered, as planned")
            case "cuda_assert":
                import torch  # here: a test does not need it

                numbers = torch.zeros(4, device="cuda")
                numbers[torch.full((4,), 99, device="cuda")].sum().item()
            case "raise":
                raise ValueError("a bad sample, as planned")
            case "kill_in_init":
                # Before the thread starts: under load Gloo may listen before the thread runs.
                before = _listening()
                threading.Thread(target=_kill_when_listening, args=(before,), daemon=True).start()
            case "wait_for_death":
                _wait_for_death(self._fired(0))
            case "child_holds_stdout":
                subprocess.Popen(["sleep", "120"], env={}, start_new_session=True)  # outlives us
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                raise AssertionError(do)

    def _wait_for_all(self, do: str) -> None:
        """Hold this process until all faults of this kind have fired: one death must not keep the
        other from its place."""
        files = [self._fired(fault["number"]) for fault in self.faults if fault["do"] == do]
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, f"not all of {files} are there"
            time.sleep(0.001)


def hold_until_there(file: Path) -> None:
    """Hold this thread; the others, which say that we live, go on."""
    deadline = time.monotonic() + 150
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} is not there"
        time.sleep(0.001)


def _wait_for_death(fired: Path) -> None:
    """Hold this process until the victim of the plan's first fault is gone: what it takes part in
    cannot end before."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(json.loads(fired.read_text())["pid"], 0)
        except ProcessLookupError:
            return
        except (FileNotFoundError, json.JSONDecodeError):
            pass  # not fired yet
        time.sleep(0.001)
    raise AssertionError(f"the victim of {fired} lives")


def _kill_when_listening(before: set[str]) -> None:
    """SIGKILL this process when Gloo has opened its listening socket: in the middle of
    `hvd.init()`. `before` are the sockets that listened before it."""
    deadline = time.monotonic() + 60
    while _listening() <= before:
        assert time.monotonic() < deadline, "Gloo has opened no listening socket"
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)


def _listening() -> set[str]:
    """Return this process's sockets that listen for TCP connections."""
    inodes = {line.split()[9] for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]
              if line.split()[3] == "0A"}
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            mine.add(target)
    return mine
