"""What a job is and how it was launched: checked once, at start, before any machine does work.

launcher → environment → here → train()

What always holds:
1. What a launcher says in the environment is read here (`Launch.from_environment`) and in
   `__main__`; standby.py, shim.py and plain_driver.py read only what Horovod, or a place in the
   world, has put there.
2. A mistake of the user's is a `ConfigError` whose text names the key to change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

EXIT_FINISHED = 0
EXIT_USER_ERROR = 70  # sysexits.h EX_SOFTWARE: the user's own exception, never retried
# Sysexits.h EX_UNAVAILABLE: a driver's, when the discovery does not answer or no host is found.
EXIT_NO_HOSTS = 69
# Sysexits.h EX_OSERR: its machine has failed (machine_fault.py), and others do its part of the
# step.
EXIT_MACHINE = 71
# Sysexits.h EX_TEMPFAIL: not wanted (any more). Never 0: Horovod takes 0 for "job finished".
EXIT_LEFT = 75
# Sysexits.h EX_PROTOCOL: it holds other bits than the other workers (replicas.py)
EXIT_DIFFERS = 76

REDUCERS = ("exact", "ring")

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62), "MALLOC_ARENA_MAX": "1"}
"""What a worker's environment says to glibc (mallopt(3)), unless the user's own does: keep the
memory of large blocks, in one heap for all threads. Horovod allocates the result of each alltoall
and allgather anew, in a thread of its own, and without this each is mapped, cleared page by page
and unmapped again: 28 % of all CPU time of a step with 4 workers, and 0.3 s of a core for each
survivor when somebody joined (seen by perf; 10 M parameters, 2 cores)."""


class ConfigError(ValueError):
    """A mistake in what the user asked for; the text names the key and a value that works."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The engine's time limits that depend on the job or the network, in seconds
    (ELASTIC_TRAINER_LIMITS)."""

    beat_s: float = 0.25
    """How often a worker says that it lives (and the longest that a reply is held back), in worlds
    of at most 16 workers. Larger worlds have longer intervals, up to 1 s: the driver has to take
    all heartbeats."""
    silence_s: float = 5.0
    """A worker that was silent for this long is frozen or cut off: it is evicted."""
    boot_s: float = 180.0
    """From the start of a worker's process until it stands ready; after that it is killed."""
    admit_s: float = 3.0
    """From the offer of a place until all have accepted; after that a new round is made. (At least
    0.2 s a member.)"""
    settle_s: float = 10.0
    """How long a ready newcomer waits for others that are still booting: one pause for all of
    them."""
    start_s: float = 60.0
    """How long the first generation waits for all -np workers when fewer, but enough (--min-np),
    stand ready."""
    stuck_s: float = 300.0
    """How long members wait for one that still trains in a broken generation, before it is
    evicted."""
    gloo_s: float = 10.0
    """Horovod's own time-out for a collective: only a back-stop, the beats are faster."""
    driver_lost_s: float = 3.0
    """A worker that could not reach its driver for this long stops (and keeps what it knows)."""
    exit_s: float = 60.0
    """From a worker's last word, after it has finished or was let go, until its process must have
    ended."""
    stop_grace_s: float = 5.0
    """Between SIGTERM and SIGKILL for a worker that is told to stop."""


    @staticmethod
    def from_environment(env: Mapping[str, str]) -> Limits:
        """Read `ELASTIC_TRAINER_LIMITS`, e.g. "boot_s=600,silence_s=20". Raises ConfigError."""
        limits = Limits()
        for item in filter(None, env.get("ELASTIC_TRAINER_LIMITS", "").split(",")):
            name, _, seconds = item.partition("=")
            if name not in Limits.__dataclass_fields__ or not re.fullmatch(r"\d+(\.\d+)?", seconds):
                raise ConfigError(
                    f"ELASTIC_TRAINER_LIMITS has {item!r}. Use name=seconds with one of "
                    f"{', '.join(Limits.__dataclass_fields__)}.")
            limits = replace(limits, **{name: float(seconds)})
        # The driver holds an answer for one beat_s.
        most_s = min(limits.silence_s / 4, limits.driver_lost_s / 3)
        if not 0 < limits.beat_s <= most_s:
            raise ConfigError(
                f"beat_s is {limits.beat_s:g}, but a heartbeat must come 4 times in silence_s "
                f"({limits.silence_s:g}) and 3 times in driver_lost_s ({limits.driver_lost_s:g}). "
                f"Set "
                f"beat_s to at most {most_s:g} in ELASTIC_TRAINER_LIMITS, or the other two higher.")
        return limits


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How this process was started: by our driver, by plain horovodrun, or alone."""

    run_dir: Path | None = None
    """Where events, result and checkpoints of the run go; None: nothing is written."""
    run: str = ""
    run_id: str = ""
    """What stands in run_dir on the supervisor's machine: a host that does not see it has another
    disk."""
    attempt: int = 1
    driver: str | None = None
    """host:port of our driver's control plane; None under plain horovodrun or alone."""
    key: bytes = field(default=b"", repr=False)
    """Signs every word between this worker and the driver; no other worker has it (edge/seal.py).
    Never printed, never on a command line."""
    worker: str = ""
    """This worker's name at the driver: unique for each process, `host/slot/number`."""
    host: str = "localhost"
    slot: int = 0
    horovod: bool = False
    """True when horovodrun (ours or plain) started us; False: a world of one."""
    reduce: str = "exact"
    reduce_asked: str | None = None
    """What the launcher was asked for; None: nothing, so `reduce` is the default."""
    lost_attempts: int = 0
    """Earlier attempts of this run that ended with everybody gone: what checkpoints are for."""
    run_s: float = 0.0
    """How long the run had been going when this attempt began."""
    store: str = ""
    """Where checkpoints go: a folder or s3://bucket/prefix; "": into run_dir."""
    resume_step: int = 0
    """The newest step that the run's diary says is in a checkpoint: to start afresh would then be a
    loss."""
    revived_generation: int = 0
    """Not 0: this same process was there before, in that generation, and `hvd.init()` was about to
    abort it."""
    revived_count: int = 0
    """The number of the last word that it sent to the driver."""
    revived_since: float | None = None
    """When it last trained, by this machine's monotonic clock: the pause goes on."""
    revived_from: int | None = None
    """The descriptor of the live state that it left for itself, if it held any."""
    limits: Limits = field(default_factory=Limits)

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None) -> Launch:
        """Read what the launcher left for us. Raises ConfigError when it contradicts itself."""
        env = os.environ if environ is None else environ
        reduce = env.get("ELASTIC_TRAINER_REDUCE", "exact")
        if reduce not in REDUCERS:
            raise ConfigError(
                f"ELASTIC_TRAINER_REDUCE is {reduce!r}, which is no reducer. Use one of {REDUCERS}."
            )
        run_dir = env.get("ELASTIC_TRAINER_RUN_DIR")
        revived, since = env.get("ELASTIC_TRAINER_REVIVED_FROM"), env.get(
            "ELASTIC_TRAINER_REVIVED_SINCE")
        return Launch(
            run_dir=Path(run_dir) if run_dir else None,
            run=Path(run_dir).name if run_dir else "",
            run_id=env.get("ELASTIC_TRAINER_RUN_ID", ""),
            attempt=int(env.get("ELASTIC_TRAINER_ATTEMPT", "1")),
            driver=env.get("ELASTIC_TRAINER_DRIVER"),
            key=bytes.fromhex(env.get("ELASTIC_TRAINER_KEY", "")),
            worker=env.get("ELASTIC_TRAINER_WORKER", ""),
            host=env.get("HOROVOD_HOSTNAME", "localhost"),
            slot=int(env.get("ELASTIC_TRAINER_SLOT", env.get("HOROVOD_LOCAL_RANK", "0"))),
            horovod="HOROVOD_GLOO_RENDEZVOUS_ADDR" in env,
            reduce=reduce,
            reduce_asked=env.get("ELASTIC_TRAINER_REDUCE"),
            store=env.get("ELASTIC_TRAINER_STORE", ""),
            lost_attempts=int(env.get("ELASTIC_TRAINER_LOST_ATTEMPTS", "0")),
            run_s=float(env.get("ELASTIC_TRAINER_RUN_S", "0")),
            limits=Limits.from_environment(env),
            resume_step=int(env.get("ELASTIC_TRAINER_RESUME_STEP", "0")),
            revived_generation=int(env.get("ELASTIC_TRAINER_REVIVED_GENERATION", "0")),
            revived_count=int(env.get("ELASTIC_TRAINER_REVIVED_COUNT", "0")),
            revived_since=float(since) if since else None,
            revived_from=int(revived) if revived else None,
        )
