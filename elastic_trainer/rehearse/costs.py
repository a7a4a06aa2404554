"""What losses, joins, checkpoints and steps cost: read from the event log of a run or a replay.

event log → run (events/run.py) → here → model (a fleet without processes)

What always holds:
1. A cost that the log does not show has its default, and `measured` does not name it.
2. The time of a step is `fixed_s` and, for each micro-batch of the worker with the most,
   `microbatch_s`.

What it does not do: guess how pauses grow with the world. `grow_s` is an estimate, see its
sentence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from statistics import fmean, median, mode
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_trainer.config import ConfigError
from elastic_trainer.events.run import Run
from elastic_trainer.events.segments import Reader, has_events
from elastic_trainer.events.sentences import ENDINGS
from elastic_trainer.state.checkpoints.cadence import UploadCost

MOST_S, MOST_SAMPLES = 1e7, 1e12
"""The largest values of --cost."""
SHORTEST_STEP_S = 1e-6
Seconds = tuple[float, ...]
"""Values that were seen. The model draws from them."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds. The defaults are those of docs/benchmarks.md: 2 cores, 4 workers, 1 GB of state."""

    loss_s: Seconds = (0.32, 0.36, 0.36, 0.45, 0.88)
    """What an unannounced loss takes of the training, the step in flight included
    (tests/bench/recovery.py). The first step after it counts as a step, however slow it is."""
    change_s: Seconds = (0.35, 0.44, 0.44, 0.6, 0.95)
    """The same of a newcomer, or of a host that leaves under notice (tests/bench/join.py)."""
    listed_s: Seconds = (0.1, 0.5, 0.9)
    """From a host that is there to its first worker's start. The list is read each second."""
    boot_s: Seconds = (8.4,)
    """From the start of a worker until it stands ready, while others train."""
    first_boot_s: Seconds = (8.4,)
    """The same for the slowest worker of a run's first world: nobody trains beside it."""
    restart_boot_s: Seconds = (8.4,)
    """The same in a restart, which finds warm caches."""
    standby_s: Seconds = (0.3, 0.4, 0.5)
    """The same with a standby."""
    give_up_s: Seconds = (6.0, 7.0, 8.0)
    """From the loss of everybody to the next attempt (tests/bench/zero.py)."""
    enter_s: Seconds = (1.5, 2.5, 3.5)
    """From the last worker that stands ready to the first step of an attempt: restore included."""
    checkpoint_s: float = 0.033
    """The pause of a checkpoint (tests/bench/checkpoint.py)."""
    auto_s: Seconds = ()
    """What `auto` took a checkpoint to cost: its pause, and what its upload added to the steps
    beside it. Empty: checkpoint_s."""
    publish_s: Seconds = (5.0,)
    """From the copy to the record in the store."""
    fixed_s: float = 0.0
    """The part of a step that does not depend on the micro-batches of a worker: reduce, vote,
    apply."""
    microbatch_s: float = 1.0
    """The time of one micro-batch. The default is none: a step of one micro-batch takes 1 s."""
    between_s: float = 0.0
    """The time between two steps: the user's code, evaluations."""
    microbatches: int = 0
    """The number of micro-batches of the measured run; 0: microbatch_s is that of the planned
    number."""
    batch: int = 1
    """Samples of a step."""
    interval: str = ""
    """Between two checkpoints, as `checkpoint_every` of train() takes it: "50", "31s"."""
    world: int = 4
    """The world in which the pauses were measured."""
    grow_s: float = 0.001
    """What a pause is longer for each worker more. Derived, not measured on such a fleet: 48
    workers on 2 cores paused 1.14 s longer than 4 (tests/bench/world_size.py), so each of the 48
    connections of a worker took 1 ms of a core."""
    measured: tuple[str, ...] = ()
    """The names of the costs that come from a log."""

    def step_s(self, world: npt.NDArray[np.int64], microbatches: int) -> npt.NDArray[np.float64]:
        """Return the time of a step in worlds of these sizes."""
        microbatch_s = self.microbatch_s * (self.microbatches or microbatches) / microbatches
        owned = -(-microbatches // np.maximum(world, 1))
        return self.fixed_s + microbatch_s * owned


@dataclass
class _Weighed:
    """The costs of checkpoints as `auto` measures them in an attempt (training/timing.py)."""

    costs: list[float] = field(default_factory=list)
    pause_s: float = 0.0
    """Of the last checkpoint; 0: there was none in this attempt."""
    upload: UploadCost = field(default_factory=UploadCost)
    is_up: bool = False

    def enter(self) -> None:
        """Begin a generation. A change of the world drops the checkpoint on its way."""
        self.is_up = False
        self.upload.enter()

    def step(self, step_s: float, pause_s: float) -> None:
        """Take a step, and the pause of the checkpoint that was begun before it, if any."""
        if pause_s:
            self.end()
            self.upload.begin()
            self.pause_s, self.is_up = pause_s, True
        self.upload.step(step_s, self.is_up)

    def end(self) -> None:
        """Weigh the last checkpoint: the next one begins, or the attempt has ended."""
        if self.pause_s:
            self.costs.append(self.pause_s + self.upload.added_s)


class _Reader:
    """Measures the costs that need more than the run has: boots, restarts, hosts that join, and
    what `auto` weighs."""

    def __init__(self) -> None:
        self.run = Run()
        self.job: Mapping[str, Any] = {}
        self.steps: dict[int, list[float]] = defaultdict(list)
        """By the size of the world."""
        self.gaps_s = 0.0
        """The time between two steps of a generation, without either."""
        self.worlds: list[int] = []
        """After pauses."""
        self.published: list[tuple[int, float]] = []
        """Step and time of each checkpoint."""
        self.seen: dict[str, list[float]] = defaultdict(list)
        self.weighed = _Weighed()
        self.causes: list[str] = []
        """Of each generation of the run: the name of the cost of its pause, if it follows one."""
        self._reasons: dict[tuple[Any, ...], str] = {}
        self._firsts: list[float] = []
        """The boots of this attempt before its first generation."""
        self._joined: dict[str, float] = {}
        """When the hosts of a rehearsal came, until their first worker starts."""
        self._leaving = set[str]()
        """Hosts that have left the list."""
        self._ready: float | None = None
        self._lost_at: float | None = None
        """When this attempt's newest host was taken in a rehearsal."""
        self._is_sudden = False
        """A worker of this generation was lost whose host was on the list."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one more event."""
        now = float(event["time"])
        match event["event"]:
            case "run.started":  # another run, or another invocation of this one
                self._close()
                self._lost_at, self._is_sudden = None, False
                self._joined.clear()
                self._leaving.clear()
            case "attempt.started":
                self._begin_attempt(now)
            case "rehearsal.host_joined":
                self._joined[str(event["host"])] = now
            case "rehearsal.host_lost":
                self._lost_at = now
            case "driver.host_removed":
                self._leaving.add(str(event["host"]))
            case "driver.worker_gone":
                ending = ENDINGS.get(str(event.get("reason")))
                is_lost = ending is not None and ending.is_lost
                self._is_sudden |= is_lost and str(event.get("host")) not in self._leaving
            case "driver.worker_started" if event["host"] in self._joined:
                self.seen["listed_s"].append(now - self._joined.pop(event["host"]))
            case "driver.worker_ready":
                self._ready, boot_s = now, float(event.get("boot_s") or 0.0)
                (self.seen["standby_s"] if boot_s < 1.0 else
                 self.seen["boot_s"] if self.run.size else self._firsts).append(boot_s)
            case "driver.generation_formed":
                self._reasons[_place(event)] = str(event.get("reason"))
            case "worker.generation_started":
                self._enter(now)
            case "worker.step_committed" if not event.get("repeated"):
                self.weighed.step(float(event.get("step_s") or 0.0),
                                  float(event.get("checkpoint_s") or 0.0))
            case "state.checkpoint_published":
                self.weighed.is_up = False
        self.run.read(event)
        if len(self.run.generations) > len(self.causes):
            is_loss = self._reasons.get(_place(event)) == "death"
            self.causes.append("loss_s" if is_loss else "change_s")

    def _begin_attempt(self, now: float) -> None:
        run = self.run
        self.weighed.end()
        self.weighed = _Weighed(self.weighed.costs)
        if self._is_restart and run.size and len(run.steps) > run.generations[-1].first:
            since = run.steps.ends[-1] if self._is_sudden else self._lost_at
            if since is not None:  # else it waited with hosts under notice, until when?
                self.seen["give_up_s"].append(now - since)
        self._firsts, self._ready, self._lost_at = [], None, None

    def _enter(self, now: float) -> None:
        """Begin a generation."""
        self.weighed.enter()
        self._is_sudden = False
        if self.run.size:
            return  # not the first one of its attempt
        if self._firsts:
            self.seen["restart_boot_s" if self._is_restart else "first_boot_s"].append(
                max(self._firsts))
        if self._is_restart and self._ready is not None:
            self.seen["enter_s"].append(now - self._ready)

    @property
    def _is_restart(self) -> bool:
        """The run has had a generation since a person started it."""
        return not self.run.accounts.is_booting

    def _close(self) -> None:
        """Take the steps, pauses and checkpoints of a run. The first step of each generation is no
        usual one."""
        run, ends, seconds = self.run, np.array(self.run.steps.ends), np.array(
            self.run.steps.seconds)
        last, attempt = -1, None
        for one, after, cause in zip_longest(run.generations, run.generations[1:], self.causes):
            lines = np.arange(one.first, after.first if after else len(ends))
            # A line without a time repeats a step that no line had reported.
            lines = lines[seconds[lines] > 0.0]
            if not lines.size:
                continue
            if last >= 0 and one.attempt is attempt:
                self.seen[cause].append(
                    max(0.0, float(ends[lines[0]] - ends[last] - seconds[lines[0]])))
                self.worlds.append(one.size)
            if lines.size > 1:
                self.steps[one.size] += seconds[lines[1:]].tolist()
                self.gaps_s += float((np.diff(ends[lines]) - seconds[lines[1:]]).clip(0.0).sum())
            last, attempt = int(lines[-1]), one.attempt
        for checkpoint in run.checkpoints:
            self.published.append((checkpoint.step, checkpoint.time))
            self.seen["checkpoint_s"].append(checkpoint.pause_s)
            self.seen["publish_s"].append(checkpoint.duration_s)
        self.run, self.causes, self.job = Run(), [], run.job or self.job

    def costs(self) -> Costs:
        """Return the costs of the log, and the defaults for those that it does not show."""
        self._close()
        found: dict[str, Any] = {name: tuple(values) for name, values in self.seen.items()}
        if "first_boot_s" in found:  # a run without newcomers or restarts
            found.setdefault("boot_s", found["first_boot_s"])
            found.setdefault("restart_boot_s", found["first_boot_s"])
        if "checkpoint_s" in found:
            found["checkpoint_s"] = fmean(found["checkpoint_s"])
        self.weighed.end()
        if self.weighed.costs:
            found["auto_s"] = tuple(self.weighed.costs)
        microbatches = int(self.job.get("microbatches") or 0)
        if self.steps and microbatches:
            found |= {"microbatches": microbatches, "batch": int(self.job["global_batch"])}
            found["fixed_s"], found["microbatch_s"] = fitted(self.steps, microbatches)
            pauses_s = len(self.published) * float(found.get("checkpoint_s", 0.0))
            count = sum(map(len, self.steps.values()))
            found["between_s"] = max(0.0, self.gaps_s - pauses_s) / count
        if interval := str(self.job.get("checkpoint_every", "")) or interval_of(self.published):
            found["interval"] = interval
        if self.worlds:
            found["world"] = round(median(self.worlds))
        return Costs(**found, measured=tuple(sorted(found)))


def _place(event: Mapping[str, Any]) -> tuple[Any, ...]:
    return event.get("attempt"), event.get("generation")


def costs_of(events: Iterable[Mapping[str, Any]]) -> Costs:
    """Return what a run's events show of the costs."""
    reader = _Reader()
    for event in events:
        reader.take(event)
    return reader.costs()


def interval_of(published: Sequence[tuple[int, float]]) -> str:
    """Return the interval of checkpoints of (step, time): a number of steps, if most checkpoints
    are multiples of it, or else seconds. "" for fewer than three."""
    pairs = list(pairwise(published))
    steps = [after - before for (before, _), (after, _) in pairs if after > before]
    if len(steps) < 2:
        return ""
    usual = mode(steps)
    if sum(step % usual == 0 for step, _ in published) >= 0.6 * len(published):
        return str(usual)
    return f"{max(1, round(median(after - before for (_, before), (_, after) in pairs)))}s"


def read_costs(run_dirs: Sequence[Path]) -> Costs:
    """Return the costs of runs of one script. Raises ConfigError."""
    events, known = list[Iterable[Mapping[str, Any]]](), set[tuple[int, int]]()
    for run_dir in run_dirs:
        if not has_events(run_dir):
            raise ConfigError(f"--costs {run_dir} has no events.jsonl, so no cost is known. Name a "
                              f"run's folder, e.g. runs/NAME.")
        costs = costs_of(Reader(run_dir).events(to_the_end=True))
        if "microbatch_s" not in costs.measured:
            raise ConfigError(f"--costs {run_dir} has no two steps of train() or Trainer in a row, "
                              f"so the time of a step is unknown. Name a run that has trained.")
        known.add((costs.microbatches, costs.batch))
        events.append(Reader(run_dir).events(to_the_end=True))
    if len(known) > 1:
        raise ConfigError(f"--costs names runs with {sorted(known)} micro-batches and samples of a "
                          "step. Name runs of one script with the same options.")
    return costs if len(events) == 1 else costs_of(chain.from_iterable(events))


def fitted(steps: Mapping[int, Sequence[float]], microbatches: int) -> tuple[float, float]:
    """Return the fixed time of a step and the time of a micro-batch: least squares, neither
    negative.

    With one number of micro-batches for each worker all of a step is the time of its micro-batches.
    """
    owned = np.array([-(-microbatches // size) for size in steps], dtype=float)
    means = np.array([fmean(values) for values in steps.values()])
    weights = np.sqrt([len(values) for values in steps.values()])
    through_zero = float((weights**2 * owned) @ means / ((weights * owned) @ (weights * owned)))
    if len(set(owned)) < 2:
        return 0.0, through_zero
    rows = np.stack([np.ones_like(owned), owned], axis=1) * weights[:, None]
    fixed_s, microbatch_s = np.linalg.lstsq(rows, means * weights, rcond=None)[0]
    if microbatch_s < 0.0:
        return float(means @ weights**2 / (weights @ weights)), 0.0
    return (float(fixed_s), float(microbatch_s)) if fixed_s >= 0.0 else (0.0, through_zero)


def with_values(costs: Costs, given: Iterable[str]) -> Costs:
    """Return the costs with values of the user's, e.g. "loss_s=0.5". Raises ConfigError."""
    names = {one.name: one for one in fields(Costs) if one.type != "str" and
             one.name != "measured"}
    for item in given:
        name, _, text = item.partition("=")
        if name not in names:
            raise ConfigError(f"--cost is {item!r}. Use NAME=NUMBER with one of "
                              f"{', '.join(names)}, e.g. loss_s=0.5.")
        value = _value(item, text, is_whole=names[name].type == "int")
        if names[name].type == "Seconds":
            value = (value,)
        if name == "checkpoint_s":
            costs = replace(costs, auto_s=())
        if name == "boot_s":
            costs = replace(costs, first_boot_s=value, restart_boot_s=value)
        costs = replace(costs, **{name: value},
                        measured=tuple(sorted({*costs.measured, name})))
    if costs.fixed_s + costs.microbatch_s < SHORTEST_STEP_S:
        raise ConfigError(f"A step takes {costs.fixed_s + costs.microbatch_s:g} s. Use at least "
                          f"{SHORTEST_STEP_S:g} s, e.g. --cost microbatch_s=0.2.")
    return costs


def _value(item: str, text: str, *, is_whole: bool) -> Any:
    """Return the number of a --cost. Raises ConfigError."""
    least, most = (1.0, MOST_SAMPLES) if is_whole else (0.0, MOST_S)
    try:
        value = float(text)
        if not least <= value <= most or (is_whole and value != int(value)):
            raise ValueError
    except ValueError as error:
        raise ConfigError(f"--cost is {item!r}. Use a {'whole ' * is_whole}number from {least:g} "
                          f"to {most:g}.") from error
    return int(value) if is_whole else value
