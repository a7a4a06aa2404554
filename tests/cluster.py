"""A real cluster on this machine: the mended horovodrun, real worker processes, hosts that come and
go.

Hosts are loopback addresses (127.0.0.1, 127.0.0.2, …): each a host of its own to horovodrun,
without root or ssh. Nothing here sleeps and hopes: everything waits for an event in the run's
event log, with a deadline.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from faults import RELEASED, Plan, asked_for
from folds import host_seconds
from forks import OF_A_DRIVER, allow, forked

from elastic_trainer.driver.standby_shim import through_shim
from elastic_trainer.events.log import EVENTS_FILE, read_events
from elastic_trainer.events.schema import flaw, misfit, parse_object
from elastic_trainer.events.segments import Reader
from elastic_trainer.host.processes import is_worker
from elastic_trainer.views.verify import verify

TESTS = Path(__file__).resolve().parent
JOB = [sys.executable, str(TESTS / "jobs" / "mlp.py")]
DEADLINE_S = 150.0
POLL_S = 0.02
PATIENT = "silence_s=8,gloo_s=16,driver_lost_s=6"
"""The time for which a healthy worker may be silent in a test, because its machine stalls. A bench
measures with the defaults."""
HEALTHY_ENDS = ("finished", "left", "stopped", "host_left", "arithmetic_differs", "program_differs")


SEATS = 4
"""The number of runs at the same time: a run waits half of its time, and the others have the cores
then."""
HASTY_SEATS = 3
"""What a run takes that has the time limits of a user's, as those of the lab have."""
MILESTONES = ("attempt.", "discovery.", "driver.generation_formed", "driver.host_",
              "driver.stopped", "driver.worker_")
"""The events of the whole run that a failed test shows, beside the last of all kinds."""
_turns: list[list[IO[bytes]]] = []


def take_turn(seats: int = 1) -> None:
    """Wait until so many of the machine's SEATS are free, for a run of this process; all: until no
    other process of tests has one. The deadline is that of pytest (pyproject.toml, timeout)."""
    files = [open(Path(tempfile.gettempdir(), f"elastic-trainer-tests-{os.getuid()}-{number}.lock"),
                  "ab") for number in range(SEATS)]
    if not _turns and seats > 1:
        for file in files[:seats]:
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with this process, however that ends
    elif not _turns:
        while not any(_takes(file) for file in reversed(files)):
            time.sleep(POLL_S)
    _turns.append(files)


def _takes(seat: IO[bytes]) -> bool:
    try:
        fcntl.flock(seat, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def end_turn() -> None:
    """Let the next one run, when all of this process have ended."""
    for seat in _turns.pop():
        seat.close()


def is_running(pid: int) -> bool:
    """True while a process runs: it is no zombie, and has not given up its memory (it dies)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return state not in "ZX" and not Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:  # gone before the open, or before the read
        return False


def run_alone(command: Sequence[str | Path], folder: Path, timeout_s: float | None = 300) -> str:
    """Run a command that no launcher has started; return what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "ELASTIC_"))}
    env = OF_A_DRIVER | env | forked(command, folder)
    allow(folder, 1)
    done = subprocess.run(through_shim([*map(str, command)], env, is_local=True), env=env,
                          cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights_alone(command: Sequence[str | Path], folder: Path,
                  timeout_s: float | None = 300) -> str:
    """Return the hash of the weights of a job done alone, undisturbed."""
    return run_alone(command, folder, timeout_s).split("weights ")[1].strip()


class Cluster:
    """One run, with everything it started; use as a context manager."""

    def __init__(self, folder: Path, *, hosts: int = 4, names: Sequence[str] = (),
                 start_with: int | None = None, min_workers: int = 2, job: Sequence[str] = (),
                 plan: Plan | None = None, discovery: str | None = None,
                 options: Sequence[str] = (), command: Sequence[str] | None = None,
                 run: str = "run", limits: str = PATIENT, forks: bool = True):
        self.folder, self.run_dir = folder, folder / "runs" / run
        self.plan = plan or Plan()
        folder.mkdir(parents=True, exist_ok=True)
        self.hosts_file = folder / "hosts"
        self.all_hosts = list(names) or [f"127.0.0.{number}" for number in range(1, hosts + 1)]
        self.start_with = start_with = start_with or len(self.all_hosts)
        self.set_hosts(self.all_hosts[:start_with])
        worker = command or [*JOB, *job]
        self.command = [sys.executable, "-m", "elastic_trainer", "run", "--run", run,
                        "--runs-dir", str(folder / "runs"), "--host-discovery-script", discovery
                        or f"{TESTS / 'print_hosts.sh'} {self.hosts_file}", "-np",
                        str(start_with), "--min-np", str(min_workers), *options, "--", *worker]
        self.env = os.environ | {"ELASTIC_TEST_PLAN": self.plan.to_json(),
                                 "ELASTIC_TEST_FOLDER": str(folder)}
        self.seats = SEATS
        if "PYTEST_CURRENT_TEST" in os.environ:
            self.env["ELASTIC_TRAINER_LIMITS"] = limits
            if forks and "--standby" not in options:
                self.env |= forked(worker, folder)
            self.seats = 1 if limits else HASTY_SEATS
        self.process: subprocess.Popen[bytes] | None = None
        self._told: list[dict[str, Any]] = []
        self._by_name: dict[str, list[dict[str, Any]]] = {}
        self._read_to = 0

    def __enter__(self) -> Cluster:
        take_turn(self.seats)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            end_turn()

    def end(self) -> None:
        """End whatever of the run is still there."""
        if self.process and self.process.poll() is None:
            with suppress(OSError, IndexError):  # it may just have ended
                os.kill(self.supervisor_pid(), signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for name, pid in self.live_pids().items():
            if is_worker(pid, name, self.run_dir):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def start(self) -> None:
        """Start the run, or resume it. Its workers are forked (forks.py)."""
        allow(self.folder, self.start_with)
        self.process = subprocess.Popen(self.command, env=self.env,
                                        cwd=self.folder, start_new_session=True,
                                        stdout=open(self.folder / "output.log", "ab"),
                                        stderr=subprocess.STDOUT)

    # --- what a test does -------------------------------------------------------------------------

    def set_hosts(self, hosts: Sequence[str]) -> None:
        """Replace the hosts file whole."""
        new = self.hosts_file.with_suffix(".new")
        new.write_text("".join(f"{host}:1\n" for host in hosts))
        new.replace(self.hosts_file)

    def signal_worker(self, host: str, number: int) -> int:
        """Send a signal to the worker on a host; returns its pid."""
        name, pid = next((n, p) for n, p in self.live_pids().items() if n.split("/")[0] == host)
        assert is_worker(pid, name, self.run_dir)
        os.kill(pid, number)
        return pid

    def signal_workers(self, hosts: Sequence[str], number: int) -> None:
        """Send a signal to the workers on some hosts at once: nothing is to happen between the
        first and the last."""
        pids = [pid for name, pid in self.live_pids().items()
                if name.split("/")[0] in hosts and is_worker(pid, name, self.run_dir)]
        assert len(pids) == len(hosts), self.story()
        for pid in pids:
            os.kill(pid, number)

    def supervisor_pid(self) -> int:
        """Return the supervisor's pid."""
        assert self.process
        return self.process.pid

    def driver_pid(self) -> int:
        """Return the pid of the driver (the supervisor's only child that runs it)."""
        pid = self.supervisor_pid()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return next(
            int(pid) for pid in children
            if b"elastic_trainer.driver.horovodrun" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def kill_everyone(self) -> None:
        """SIGKILL the supervisor, the driver and all workers, and wait until they are gone."""
        workers, driver = self.live_pids(), self.driver_pid()
        assert self.process
        for pid in (self.process.pid, driver, *workers.values()):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + DEADLINE_S
        while is_running(driver) or any(  # it holds the lock
                is_worker(pid, name, self.run_dir) for name, pid in workers.items()):
            assert time.monotonic() < deadline, self.story()
            time.sleep(POLL_S)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the end of the run; returns the exit code."""
        assert self.process
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the run did not end in {deadline_s:.0f} s; {self.story()}") from None

    def finish(self) -> int:
        """Let the rest of the run go as fast as it can; returns its exit code."""
        (self.folder / "hurry").touch()
        return self.wait()

    # --- what a test sees -------------------------------------------------------------------------

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the events, or those of one name. Reads only what is new: the tests share the
        cores."""
        path = self.run_dir / EVENTS_FILE
        if path.exists() and path.stat().st_size > self._read_to:
            with open(path, "rb") as file:
                file.seek(self._read_to)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read_to += len(whole)
            for line in whole.splitlines():
                self._told.append(json.loads(line))
                self._by_name.setdefault(self._told[-1]["event"], []).append(self._told[-1])
        return list(self._told if name is None else self._by_name.get(name, ()))

    def committed(self, generation: int = 0) -> list[dict[str, Any]]:
        """Return the finished steps from a generation on, each one once."""
        return [e for e in self.events("worker.step_committed")
                if e["generation"] >= generation and not e.get("repeated")]

    def wait_for(self, what: str, seen: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """Wait until `seen()` is true and return it."""
        deadline = time.monotonic() + deadline_s
        while not (result := seen()):
            assert time.monotonic() < deadline, f"no {what} in {deadline_s:.0f} s; {self.story()}"
            if self.process and self.process.poll() is not None:
                result = seen()  # what came with its end
                assert result, f"the run ended before {what}; {self.story()}"
                break
            time.sleep(POLL_S)
        return result

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is committed."""
        self.wait_for(f"step {step}", lambda: any(
            e["step"] >= step for e in reversed(self.events("worker.step_committed"))))

    def wait_for_world(self, size: int, after: int = 0) -> int:
        """Wait until a generation of this size has started after generation `after`; returns its
        number."""
        return int(self.wait_for(f"world of {size}", lambda: [
            e["generation"] for e in self.events("worker.generation_started")
            if e["size"] == size and e["generation"] > after])[-1])

    def ready(self, host: str) -> list[dict[str, Any]]:
        """Return the workers of a host that have stood ready, in order."""
        return [e for e in self.events("driver.worker_ready") if e["worker"].split("/")[0] == host]

    def wait_until_ready(self, host: str) -> None:
        """Wait until a worker of a host stands ready: it has asked for a place."""
        self.wait_for(f"worker of {host}", lambda: self.ready(host))

    def release(self) -> None:
        """Let the workers go on that the plan holds."""
        (self.folder / RELEASED).touch()

    def ask_for(self, number: int) -> None:
        """Let a fault of the plan fire that waits for it (Plan.add, is_asked_for)."""
        asked_for(self.folder, number).touch()

    def wait_until_fired(self, count: int | None = None) -> None:
        """Wait until the plan's faults (or `count` of them) have fired."""
        self.wait_for(
            "fault", lambda: len(self.fired()) >= (len(self.plan.faults)
                                                   if count is None else count))

    def fired(self) -> list[dict[str, Any]]:
        """Return what fired."""
        return [json.loads(p.read_text() or "{}") for p in sorted(self.folder.glob("fired-*"))]

    def live_pids(self) -> dict[str, int]:
        """Return the pids of the workers that were started and are not known to be gone."""
        live = {e["worker"]: e["pid"] for e in self.events("driver.worker_started")}
        # With a shim it is another one.
        live |= {e["worker"]: e["pid"] for e in self.events("driver.worker_ready")}
        for event in self.events("driver.worker_gone"):
            live.pop(event["worker"], None)
        return live

    def lost(self) -> list[dict[str, Any]]:
        """Return the workers that ended in any other way than finished, left on request, or stopped
        with the attempt."""
        return [e for e in self.events("driver.worker_gone") if e["reason"] not in HEALTHY_ENDS]

    def story(self) -> str:
        """Return what a person needs to see when a test fails."""
        events = [event for event in self.events() if event["event"] != "worker.step_committed"]
        shown = [e for e in events[:-40] if e["event"].startswith(MILESTONES)][-80:] + events[-40:]
        told = [f"{event['time'] - events[0]['time']:7.1f} s " + json.dumps(
            {name: value for name, value in event.items() if name not in ("run", "time")})[:300]
                for event in shown]
        log = self.folder / "output.log"
        output = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(["the events:", *told, "the output:", *output[-30:]])

    def malformed(self) -> list[str]:
        """Return the flaws of the run's events, and the driver's reasons to refuse what workers
        have sent."""
        lines = [event for line in Reader(self.run_dir).lines() if (event := parse_object(line))]
        wrong = [misfit(event) for event in lines if misfit(event)]  # also where no reader minds
        assert not wrong, wrong
        # An unauthenticated client may have recorded a message and repeated it.
        refused = [reason for event in self.events("driver.stranger_refused")
                   for reason in event["reason"].split("; ") if reason != "a repeated message"]
        flaws = [f"{event}: {wrong}" for event in lines if (wrong := flaw(event))]
        return flaws + [reason for reason in refused
                        if "a malformed message" in reason or "a line that" in reason]

    def assert_nothing_lost(self, twin: str, *, victims: int,
                            revived: bool = False) -> dict[str, Any]:
        """Assert the three laws: every planned fault fired, no healthy worker died, same bits, each
        sample once."""
        assert len(self.fired()) == len(
            self.plan.faults), f"{self.plan.faults} fired: {self.fired()}; {self.story()}"
        assert len(self.lost()
                   ) == victims, f"{len(self.lost())} workers lost, not {victims}; {self.story()}"
        revivals = self.events("worker.revives")
        assert all(e["where"] in ("init", "memory") for e in revivals), self.story()
        assert revived or not revivals, self.story()
        assert not self.events("worker.weights_differ_as_built"), self.story()
        assert not self.malformed(), f"events that no reader takes: {self.malformed()}"
        verdict = verify(self.run_dir)
        assert verdict.is_proved, "\n".join(verdict.sentences()) + self.story()
        result: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
        assert result["weights_sha256"] == twin, self.story()
        lived_s = host_seconds(read_events(self.run_dir))
        booked_s = sum(result["host_seconds"].values())
        assert abs(booked_s - lived_s) < 0.005 * lived_s, (booked_s, lived_s, self.story())
        return result
