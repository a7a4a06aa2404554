"""What losses, joins, checkpoints and steps cost: read from the event log of a run or a replay.

event log → here → model (a fleet without processes)

What always holds:
1. A cost that the log does not show has its default, and `measured` does not name it.
2. The time of a step is `fixed_s` and, for each shard of the worker with the most, `shard_s`.

What it does not do: guess how pauses grow with the world. `grow_s` is an estimate, see its
sentence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, mode
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_trainer.config import ConfigError
from elastic_trainer.observe.segments import Reader, has_events

Seconds = tuple[float, ...]
"""Values that were seen. The model draws from them."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds. The defaults are those of docs/benchmarks.md: 2 cores, 4 workers, 1 GB of state."""

    loss_s: Seconds = (0.32, 0.36, 0.36, 0.45, 0.88)
    """The pause after an unannounced loss, the step in flight included (tests/bench/recovery.py).
    """
    change_s: Seconds = (0.35, 0.44, 0.44, 0.6, 0.95)
    """The pause for a newcomer, or for a host that leaves under notice (tests/bench/join.py)."""
    boot_s: Seconds = (8.4,)
    """From a host on the list to a worker that stands ready."""
    standby_s: Seconds = (0.3, 0.4, 0.5)
    """The same with a standby."""
    give_up_s: Seconds = (6.0, 7.0, 8.0)
    """From the loss of everybody to the next attempt (tests/bench/zero.py)."""
    enter_s: Seconds = (1.5, 2.5, 3.5)
    """From the last worker that stands ready to the first step of an attempt: restore included."""
    checkpoint_s: float = 0.033
    """The pause of a checkpoint (tests/bench/checkpoint.py)."""
    publish_s: float = 5.0
    """From the copy to the record in the store."""
    fixed_s: float = 0.0
    """The part of a step that does not depend on the shards of a worker: reduce, vote, apply."""
    shard_s: float = 1.0
    """The time of one shard. The default is none: a step of one shard takes 1 s."""
    between_s: float = 0.0
    """The time between two steps: the user's code, evaluations."""
    shards: int = 0
    """The number of shards of the measured run; 0: shard_s is that of the planned number."""
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

    def step_s(self, world: npt.NDArray[np.int64], shards: int) -> npt.NDArray[np.float64]:
        """Return the time of a step in worlds of these sizes."""
        shard_s = self.shard_s * (self.shards or shards) / shards
        owned = -(-shards // np.maximum(world, 1))
        return self.fixed_s + shard_s * owned


@dataclass
class _Log:
    """What is read of a log."""

    seen: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[tuple[Any, ...], str] = field(default_factory=dict)
    steps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By the size of the world."""
    gaps: list[float] = field(default_factory=list)
    """The time between two steps of a generation, without either."""
    worlds: list[int] = field(default_factory=list)
    published: list[tuple[int, float]] = field(default_factory=list)
    """Step and time of each checkpoint."""
    shards: int = 0
    batch: int = 1
    last: tuple[tuple[Any, ...], float] | None = None
    """The generation and the end of the newest step."""
    ready: float | None = None
    started: bool = False
    """An attempt after the first has begun, and has no generation yet."""
    stood_by: set[str] = field(default_factory=set)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one more event."""
        now, place = float(event["time"]), (event.get("attempt"), event.get("generation"))
        match event["event"]:
            case "attempt.started" if self.last:
                self.seen["give_up_s"].append(now - self.last[1])
                self.last, self.started, self.ready = None, True, None
            case "driver.worker_ready":
                self.ready = now
                boot_s = float(event.get("boot_s") or 0.0)
                self.seen["standby_s" if boot_s < 1.0 else "boot_s"].append(boot_s)
            case "driver.generation_formed":
                self.reasons[place] = str(event.get("reason"))
            case "worker.generation_started":
                if self.started and self.ready is not None:
                    self.seen["enter_s"].append(now - self.ready)
                self.started, self.last = False, None
            case "worker.pause_ended":
                name = "loss_s" if self.reasons.get(place) == "death" else "change_s"
                self.seen[name].append(float(event["duration_s"]))
                self.worlds.append(int(event.get("size") or 1))
            case "worker.step_committed" if not event.get("repeated"):
                self._step(event, place, now)
            case "state.checkpoint_published":
                self.published.append((int(event["step"]), now))
                for name, key in (("checkpoint_s", "pause_s"), ("publish_s", "duration_s")):
                    self.seen[name].append(float(event.get(key) or 0.0))
            case "job.described":
                self.shards, self.batch = int(event["shards"]), int(event["global_batch"])

    def _step(self, event: Mapping[str, Any], place: tuple[Any, ...], now: float) -> None:
        step_s = float(event.get("step_s") or 0.0)
        if self.last and self.last[0] == place:  # else it is the first step behind a pause
            self.steps[int(event["size"])].append(step_s)
            self.gaps.append(max(0.0, now - self.last[1] - step_s))
        self.last = place, now

    def costs(self) -> Costs:
        """Return the costs of the log, and the defaults for those that it does not show."""
        found: dict[str, Any] = {name: tuple(values) for name, values in self.seen.items()}
        for name in ("checkpoint_s", "publish_s"):
            if name in found:
                found[name] = fmean(found[name])
        if self.steps and self.shards:
            found |= {"shards": self.shards, "batch": self.batch}
            found["fixed_s"], found["shard_s"] = fitted(self.steps, self.shards)
            pauses_s = len(self.published) * float(found.get("checkpoint_s", 0.0))
            found["between_s"] = max(0.0, sum(self.gaps) - pauses_s) / len(self.gaps)
        if interval := interval_of(self.published):
            found["interval"] = interval
        if self.worlds:
            found["world"] = round(median(self.worlds))
        return Costs(**found, measured=tuple(sorted(found)))


def costs_of(events: Iterable[Mapping[str, Any]]) -> Costs:
    """Return what a run's events show of the costs."""
    log = _Log()
    for event in events:
        log.take(event)
    return log.costs()


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


def read_costs(run_dir: Path) -> Costs:
    """Return the costs of a run. Raises ConfigError."""
    if not has_events(run_dir):
        raise ConfigError(f"--costs {run_dir} has no events.jsonl, so no cost is known. Name a "
                          f"run's folder, e.g. runs/NAME.")
    costs = costs_of(Reader(run_dir).events(to_the_end=True))
    if "shard_s" not in costs.measured:
        raise ConfigError(f"--costs {run_dir} has no two steps of train() or Trainer in a row, so "
                          f"the time of a step is unknown. Name a run that has trained.")
    return costs


def fitted(steps: Mapping[int, Sequence[float]], shards: int) -> tuple[float, float]:
    """Return the fixed time of a step and the time of a shard: least squares, neither negative.

    With one number of shards for each worker all of a step is the time of its shards.
    """
    owned = np.array([-(-shards // size) for size in steps], dtype=float)
    means = np.array([fmean(values) for values in steps.values()])
    weights = np.sqrt([len(values) for values in steps.values()])
    through_zero = float((weights**2 * owned) @ means / ((weights * owned) @ (weights * owned)))
    if len(set(owned)) < 2:
        return 0.0, through_zero
    rows = np.stack([np.ones_like(owned), owned], axis=1) * weights[:, None]
    fixed_s, shard_s = np.linalg.lstsq(rows, means * weights, rcond=None)[0]
    if shard_s < 0.0:
        return float(means @ weights**2 / (weights @ weights)), 0.0
    return (float(fixed_s), float(shard_s)) if fixed_s >= 0.0 else (0.0, through_zero)


def with_values(costs: Costs, given: Iterable[str]) -> Costs:
    """Return the costs with values of the user's, e.g. "loss_s=0.5". Raises ConfigError."""
    names = {one.name: one for one in fields(Costs) if one.type != "str" and
             one.name != "measured"}
    for item in given:
        name, _, text = item.partition("=")
        try:
            value: Any = float(text)
            if name not in names or not 0.0 <= value < 1e12:
                raise ValueError
        except ValueError as error:
            raise ConfigError(f"--cost is {item!r}. Use NAME=NUMBER with one of "
                              f"{', '.join(names)}, e.g. loss_s=0.5.") from error
        if names[name].type == "Seconds":
            value = (value,)
        elif names[name].type == "int":
            value = max(1, int(value))
        costs = replace(costs, **{name: value},
                        measured=tuple(sorted({*costs.measured, name})))
    return costs
