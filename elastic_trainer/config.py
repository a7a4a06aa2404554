"""How a driver or a worker was launched, and its time limits: read and checked once, at start.

launcher → supervisor → environment → here → driver, train()

What always holds:
1. The variables by which a process was launched are read here: `Attempt` by the driver, `Launch` by
   a worker. Each field names its variable. (The shim and remote.py import nothing of ours.)
2. A mistake of the user is a `ConfigError` whose text names the key to change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.host import tracebacks
from elastic_trainer.host.terminal import VARIABLE as TERMINAL

EXIT_FINISHED = 0
EXIT_NO_HOSTS = 69
"""Of a driver: the discovery does not answer, or finds no host (EX_UNAVAILABLE of sysexits.h)."""
EXIT_USER_ERROR = 70
"""The user's code has raised an exception. The run is never retried (EX_SOFTWARE)."""
EXIT_MACHINE = 71
"""The worker's machine has failed (failures.py). The other workers do the step again
(EX_OSERR)."""
EXIT_UNSAVED = 74
"""The run has done all its steps, and its last checkpoint could not be written. The run is not
retried: the same command does the steps again that are lost (EX_IOERR)."""
EXIT_LEFT = 75
"""The worker has no place in the world. Never 0: Horovod takes 0 for the end of the job
(EX_TEMPFAIL)."""
EXIT_DIFFERS = 76
"""The worker holds other bits than the other workers (replicas.py; EX_PROTOCOL)."""
EXIT_INTERRUPTED = 130
"""A person, a signal or `break` in the user's loop has stopped the run, which can be resumed. The
same for a driver and for its supervisor."""

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing since Python 3.11

SEAT = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
"""HOROVOD_* with the place that plain horovodrun gives a worker at its start."""
CARRIES = ("checkpoints", "never", "always")
"""Who carries frozen content (state/frozen.py): checkpoints, but no transfer; neither; both."""
REDUCERS = ("exact", "ring")
ADASUM = (
    "reduce is Adasum, which is not supported under elasticity: Horovod has it only with MPI and "
    "for worlds of a power of two, its result depends on the number of workers, and each worker "
    "steps its optimizer before the sum, so a step that broke could not be done again. Use "
    "reduce=\"exact\" or \"ring\", and a function of the step for the learning rate "
    "(linear_scaling).")

HASH_SEED = {"PYTHONHASHSEED": "0"}
"""For workers, unless the user or the run has another one: a set of texts then has one order in all
processes of a run."""
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62), "MALLOC_ARENA_MAX": "1"}
"""Settings of glibc (mallopt(3)) for workers, unless the user sets them: the memory of large blocks
is kept, in one heap for all threads. Horovod allocates the result of each alltoall and allgather in
a thread of its own. By default glibc maps each result, clears it page by page, and unmaps it. That
takes 28 % of the CPU time of a step with 4 workers, and 0.3 s of a core on each survivor when a
worker joins (perf; 10 M parameters, 2 cores)."""


class ConfigError(ValueError):
    """A mistake of the user. The text names the key and a value that works.

    If it is not caught, it is shown with the lines of the user's code alone.
    """

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        tracebacks.shorten(ConfigError)


def unusable(run_dir: Path, error: OSError) -> ConfigError:
    """Return what to raise if a run's folder cannot be made or read."""
    return ConfigError(f"{run_dir} cannot be a run's folder: {error.strerror} ({error.filename}). "
                       f"Name a folder that can be written (--runs-dir), and a short name (--run).")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The engine's time limits that depend on the job or the network, in seconds
    (ELASTIC_TRAINER_LIMITS)."""

    heartbeat_s: float = 0.25
    """The time between two heartbeats of a worker, and the longest time that the driver holds a
    reply back, in worlds of at most 16 workers. Larger worlds have longer intervals, up to 1 s,
    because the driver receives all heartbeats."""
    silence_s: float = 5.0
    """A worker that sends no heartbeat for this time is frozen or cut off. It is evicted."""
    boot_s: float = 180.0
    """From the start of a worker's process until it stands ready; after that it is killed."""
    admit_s: float = 3.0
    """From the offer of a place until all workers have accepted (at least 0.2 s for each). After
    that the driver makes a new round."""
    settle_s: float = 10.0
    """How long a ready newcomer waits for others that are still booting, so that the world pauses
    once for all of them."""
    start_s: float = 60.0
    """How long the first generation waits for all -np workers if at least --min-np stand ready."""
    stuck_s: float = 300.0
    """How long the members of a broken generation wait for one that still trains in it. After that
    it is evicted."""
    hang_s: float = 0.0
    """A worker that is in one phase of your code for this time, while all others wait for it for as
    long, is evicted and replaced. If no worker waits, they may take `stuck_s`. 0: it is only named
    (`driver.step_stalled`)."""
    straggler_s: float = 30.0
    """A worker that computes slower than its peers for this time is named
    (`driver.straggler_found`)."""
    gloo_s: float = 10.0
    """Horovod's own timeout of a collective: a back-stop, because missing heartbeats are noticed
    earlier."""
    driver_lost_s: float = 3.0
    """A worker that cannot reach its driver for this time stops, and keeps its state."""
    save_s: float = 120.0
    """How long a run that has done all its steps tries to write its last checkpoint. After that it
    ends with exit code 74."""
    exit_s: float = 60.0
    """From a worker's last message, after it has finished or was dismissed, until its process must
    have ended."""
    stop_grace_s: float = 5.0
    """Between SIGTERM and SIGKILL for a worker that has to stop."""

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> Limits:
        """Read `ELASTIC_TRAINER_LIMITS`, e.g. "boot_s=600,silence_s=20". Raises ConfigError."""
        limits = Limits()
        for item in filter(None, env.get("ELASTIC_TRAINER_LIMITS", "").split(",")):
            key, _, seconds = item.partition("=")
            name = "heartbeat_s" if key == "beat_s" else key  # its name in version 0.1
            if name not in Limits.__dataclass_fields__ or not re.fullmatch(r"\d+(\.\d+)?", seconds):
                raise ConfigError(
                    f"ELASTIC_TRAINER_LIMITS has {item!r}. Use name=seconds with one of "
                    f"{', '.join(Limits.__dataclass_fields__)}.")
            limits = replace(limits, **{name: float(seconds)})
        # The driver holds a reply for one heartbeat_s.
        most_s = min(limits.silence_s / 4, limits.driver_lost_s / 3)
        if not 0 < limits.heartbeat_s <= most_s:
            raise ConfigError(
                f"heartbeat_s is {limits.heartbeat_s:g}, but 4 heartbeats have to fit into "
                f"silence_s ({limits.silence_s:g}) and 3 into driver_lost_s "
                f"({limits.driver_lost_s:g}). In ELASTIC_TRAINER_LIMITS set heartbeat_s to at most "
                f"{most_s:g}, or the other two higher.")
        return limits


def _given(variable: str, default: Any, read: Callable[[str], Any] = str, **more: Any) -> Any:
    """Return a field whose value is in a variable of the environment, unless that is empty."""
    return field(default=default, metadata={"variable": variable, "read": read}, **more)


def _fields_of(kind: Any, env: Mapping[str, str]) -> dict[str, Any]:
    return {one.name: one.metadata["read"](env[one.metadata["variable"]]) for one in fields(kind)
            if env.get(one.metadata.get("variable", ""))}


def _is_on(text: str) -> bool:
    return text == "1"


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a run, as its driver and its workers know it from the supervisor."""

    run_dir: Path | None = _given("ELASTIC_TRAINER_RUN_DIR", None, Path)
    """Where events, result and checkpoints of the run go; None: nothing is written."""
    run_id: str = _given("ELASTIC_TRAINER_RUN_ID", "")
    """The identifier in run_dir on the supervisor's machine. A host where it is missing has another
    disk."""
    attempt: int = _given("ELASTIC_TRAINER_ATTEMPT", 1, int)
    had_hosts: bool = _given("ELASTIC_TRAINER_HAD_HOSTS", False, _is_on)
    """The discovery has named a host in an earlier attempt."""
    newest_step: int = _given("ELASTIC_TRAINER_NEWEST_STEP", 0, int)
    """The most steps that the run has ever finished."""
    resume_step: int = _given("ELASTIC_TRAINER_RESUME_STEP", 0, int)
    """The step of the newest checkpoint in the run's event log. Starting afresh would lose it."""
    lost_attempts: int = _given("ELASTIC_TRAINER_LOST_ATTEMPTS", 0, int)
    """Earlier attempts of this run that ended with the loss of all workers."""
    run_s: float = _given("ELASTIC_TRAINER_RUN_S", 0.0, float)
    """The duration of the run before this attempt."""
    allow_change: tuple[str, ...] = _given("ELASTIC_TRAINER_ALLOW_CHANGE", (), _names)
    """Keys of the configuration, settings of the optimizer, or parts of the proof of dataset and
    program, that may differ from the run's."""
    mixed_hardware: str = _given("ELASTIC_TRAINER_MIXED_HARDWARE", "refuse")
    """refuse · warn: what happens to a newcomer that computes other bits than the world."""
    replaces_stragglers: bool = _given("ELASTIC_TRAINER_REPLACE_STRAGGLERS", False, _is_on)
    """A host whose workers are slower than their peers leaves, and is replaced."""
    agent_key_file: str = _given("ELASTIC_TRAINER_AGENT_KEY_FILE", "")
    """The file with the agents' key: hosts are reached by their agents. "": by ssh."""
    agent_port: int = _given("ELASTIC_TRAINER_AGENT_PORT", 7411, int)
    limits: Limits = field(default_factory=Limits)

    @property
    def run(self) -> str:
        """The name of the run; "": it has none."""
        return self.run_dir.name if self.run_dir else ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the launcher's variables. Raises ConfigError for a value that is not valid."""
        env = os.environ if environ is None else environ
        return cls(**_fields_of(cls, env), limits=Limits.from_environment(env))

    def to_environment(self) -> dict[str, str]:
        """Return the variables that differ from one attempt to the next."""
        def text(value: object) -> str:
            return str(int(value)) if isinstance(value, bool) else str(value)

        names = ("run_dir", "run_id", "attempt", "had_hosts", "newest_step", "resume_step",
                 "lost_attempts", "run_s")
        return {one.metadata["variable"]: text(getattr(self, one.name)) for one in fields(self)
                if one.name in names}


@dataclass(frozen=True, kw_only=True)
class Launch(Attempt):
    """How this worker was started: by our driver, by plain horovodrun, or alone."""

    driver: str | None = _given("ELASTIC_TRAINER_DRIVER", None)
    """host:port of our driver's control plane; None under plain horovodrun or alone."""
    key: bytes = _given("ELASTIC_TRAINER_KEY", b"", bytes.fromhex, repr=False)
    """Signs every message between this worker and the driver. No other worker has it
    (wire/seal.py). It is never printed, and never on a command line."""
    worker: str = _given("ELASTIC_TRAINER_WORKER", "")
    """This worker's name at the driver: unique for each process, `host/slot/number`."""
    host: str = _given("HOROVOD_HOSTNAME", "localhost")
    slot: int = _given("ELASTIC_TRAINER_SLOT", 0, int)
    zone: str = _given("ELASTIC_TRAINER_ZONE", "")
    """The zone of its host, as its place reports it; "": unknown, e.g. in a fixed list of hosts."""
    min_workers: int = _given("ELASTIC_TRAINER_MIN_WORKERS", 0, int)
    """The launcher's --min-np; 0: unknown, under plain horovodrun or alone."""
    horovod: bool = _given("HOROVOD_GLOO_RENDEZVOUS_ADDR", False, bool)
    """True when horovodrun (ours or plain) started us; False: a world of one."""
    seat: tuple[int, ...] = ()
    """Under plain horovodrun, the first place: rank, size, local rank and size, cross rank and
    size."""
    rendezvous: tuple[str, int] = "", 0
    """Under plain horovodrun, the address and the port of its rendezvous store."""
    token: str = _given("_HOROVOD_LAUNCH_TOKEN", "", repr=False)
    """Of a plain horovodrun with setup/patches/11-answer-only-with-the-key.patch."""
    reduce: str = _given("ELASTIC_TRAINER_REDUCE", "exact")
    reduce_asked: str | None = _given("ELASTIC_TRAINER_REDUCE", None)
    """The value of the launcher's --reduce; None: it was not given, so `reduce` is the default."""
    store: str = _given("ELASTIC_TRAINER_STORE", "")
    """Where checkpoints go: a folder, s3://, gs:// or az://bucket/prefix; "": into run_dir."""
    timeline: bool = _given("ELASTIC_TRAINER_TIMELINE", False, _is_on)
    """Write the spans of each step (events/trace.py)."""
    terminal: str = _given(TERMINAL, "")
    """The path of the launcher's terminal, for a debugger; "": it has none, or it is on another
    host."""
    configuration: str = _given("ELASTIC_TRAINER_CONFIG", "", repr=False)
    """The run's configuration as the launcher has read it, or the path of a TOML file
    (state/configuration.py)."""
    hash_seed: str = _given("PYTHONHASHSEED", "", lambda text: text.replace("random", ""))
    """PYTHONHASHSEED; "": the order of a set of texts is another one in each process."""
    revived_generation: int = _given("ELASTIC_TRAINER_REVIVED_GENERATION", 0, int)
    """Not 0: the generation in which `hvd.init()` was about to abort this same process, which was
    then replaced in place (revive.py)."""
    revived_count: int = _given("ELASTIC_TRAINER_REVIVED_COUNT", 0, int)
    """The number of the last message that it sent to the driver."""
    revived_since: float | None = _given("ELASTIC_TRAINER_REVIVED_SINCE", None, float)
    """When it last trained, by this machine's monotonic clock: its pause began then."""
    revived_from: int | None = _given("ELASTIC_TRAINER_REVIVED_FROM", None, int)
    """The descriptor of the live state that it left for itself, if it held any."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the launcher's variables. Raises ConfigError for a value that is not valid."""
        env = os.environ if environ is None else environ
        found = _fields_of(cls, env)
        reduce = found.get("reduce", "exact")
        if reduce.lower() == "adasum":
            raise ConfigError(ADASUM)
        if reduce not in REDUCERS:
            raise ConfigError(f"ELASTIC_TRAINER_REDUCE is {reduce!r}, which is no reducer. Use "
                              f"{' or '.join(REDUCERS)}.")
        seat = [env.get(f"HOROVOD_{name}") for name in SEAT]
        port = env.get("HOROVOD_GLOO_RENDEZVOUS_PORT") or 0
        more: dict[str, Any] = {
            "slot": int(env.get("HOROVOD_LOCAL_RANK") or 0),
            "seat": tuple(map(int, filter(None, seat))) if all(seat) else (),
            "rendezvous": (env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", ""), int(port))}
        return cls(**more | found, limits=Limits.from_environment(env))
