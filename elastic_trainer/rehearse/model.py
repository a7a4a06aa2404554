"""A run without processes: the policies of driver and checkpoints over the lives of hosts.

lives of hosts, costs, policy → here → outcome → advice

What always holds:
1. Nothing here runs step by step. The time between two changes is one entry of an array.
2. A pause ends when the pause of the newest change ends: changes within a pause prolong it.
3. An attempt ends when nobody is left who trains. The next one starts from the newest checkpoint
   that was published. It loses nothing if the last workers left under notice, since they write one.
4. Checkpoints follow each other as in training/timing.py: the interval counts from the beginning of
   the last one, and none begins while another one is on its way. The interval of `auto` follows the
   costs that were measured, one by one.
5. A leave under notice begins a checkpoint at once. A loss drops the one that is on its way, and
   RETRY_S after its beginning the next one begins.
6. A life that is longer than REACH intervals is followed only through the last ones, from a random
   phase.

What it does not do: let an upload fail, or slow steps down while workers boot or checkpoints are
sent. Goodput is a share of the time, so it does not depend on that.

Source: the policies are those of driver/rounds.py (who enters, and when) and
state/checkpoints/cadence.py. Two recorded replays check it (tests/test_plan.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from elastic_trainer.config import Limits
from elastic_trainer.rehearse.costs import Costs, Seconds
from elastic_trainer.rehearse.entering import Draws, Entering
from elastic_trainer.rehearse.pools import HOUR_S, Flags, Floats, Lives
from elastic_trainer.state.checkpoints.cadence import SHORTEST_S, Cadence

Wholes = npt.NDArray[np.int64]
RETRY_S = 2.0
"""From the beginning of a checkpoint that was dropped to the next one."""
REACH = 20
RESTARTS = 1000
"""So many are drawn. The same ones follow them again."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a user decides."""

    microbatches: int
    checkpoint: Cadence = Cadence()
    standby: bool = True
    """Each host has a booted worker that waits: it matters when a worker crashes."""
    first: int = 1
    """How many workers the first generation of an attempt waits for (-np), at most `start_s`."""
    fewest: int = 1
    """Wait while fewer workers are left (--min-np)."""
    limits: Limits = Limits()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run has done."""

    goodput: float
    """As `report` defines it: the time of kept steps, by the time since the first generation."""
    steps: float
    samples_per_hour: float
    pausing_s: float
    waiting_s: float
    """Fewer than `fewest` workers, or none: restarts included."""
    redone_s: float
    """The time of steps that a start from a checkpoint does again."""
    began_s: float
    """When the first generation started; the end, if none did."""
    attempts: int
    changes: int


@dataclass(frozen=True)
class World:
    """The workers that stand ready, from each moment until the next."""

    times: Floats
    sizes: Wholes
    pauses: Floats
    """The pause that begins at each moment, with its growth left out; 0: nothing changes."""
    left: Wholes
    """Workers that leave under notice at each moment."""
    lost: Wholes
    """Workers that are lost at each moment."""


def simulate(lives: Lives, costs: Costs, policy: Policy, seconds: float, seed: int = 0) -> Outcome:
    """Return the outcome of a run of this duration."""
    return outcome_of(world_of(lives, costs, policy, seconds, seed), costs, policy, seconds, seed)


def outcome_of(world: World, costs: Costs, policy: Policy, seconds: float, seed: int) -> Outcome:
    """Return the outcome of a run in a world, which depends on nothing that is chosen here."""
    return _Run(world, costs, policy, seconds, np.random.default_rng(seed)).outcome()


# --- who stands ready -----------------------------------------------------------------------------

def world_of(lives: Lives, costs: Costs, policy: Policy, seconds: float, seed: int) -> World:
    """Return who stands ready when: of the policy, only `standby` and `limits` matter.

    A host under notice trains until the list is read and a checkpoint is published.
    """
    chance = np.random.default_rng(seed)
    is_soon = lives.joined < seconds
    began, gone = lives.joined[is_soon], lives.gone[is_soon]
    noticed, again = lives.noticed[is_soon], lives.again[is_soon]
    count = began.size
    boots = np.where(again & policy.standby, chance.choice(costs.standby_s, count),
                     chance.choice(costs.boot_s, count))
    listed = began + np.where(again, 0.0, _at_once(began, costs.listed_s, chance))
    lost = gone + noticed * lives.notice_s
    gone = gone + noticed * np.minimum(
        lives.notice_s, _at_once(gone, costs.listed_s, chance) +
        _at_once(gone, costs.publish_s, chance))
    drawn = [chance.choice(one, RESTARTS)
             for one in (costs.restart_boot_s, costs.give_up_s, costs.listed_s)]
    drawn[0][0] = chance.choice(costs.first_boot_s)
    draws = Draws(boots=boots.tolist(), attempts=list(zip(*(one.tolist() for one in drawn),
                                                          strict=True)))
    enters = np.array(Entering(listed.tolist(), gone.tolist(), lost.tolist(), draws,
                               policy.limits.settle_s).run(seconds))
    is_seen = (enters < gone) & (enters < seconds)
    is_left = is_seen & (gone < seconds)
    return _joined(enters[is_seen], gone[is_left & noticed], gone[is_left & ~noticed], costs,
                   chance)


def _at_once(times: Floats, costs: Seconds, chance: np.random.Generator) -> Floats:
    """Draw a cost for each time. Hosts that come or go together have the same one."""
    _, at = np.unique(np.round(times, 1), return_inverse=True)
    return np.asarray(chance.choice(costs, times.size))[at]


def _joined(arrivals: Floats, leaving: Floats, losses: Floats, costs: Costs,
            chance: np.random.Generator) -> World:
    """Join arrivals, departures under notice and losses into one list of moments."""
    every = (arrivals, leaving, losses)
    times, places = np.unique(np.concatenate(every), return_inverse=True)
    bounds = np.cumsum([part.size for part in every])[:-1]
    came, left, lost = (np.bincount(part, minlength=times.size)
                        for part in np.split(places.ravel(), bounds))
    sizes = np.cumsum(came - left - lost)
    before = np.concatenate([[0], sizes[:-1]])
    pauses = np.where((lost > 0) & (before > 0), chance.choice(costs.loss_s, times.size),
                      chance.choice(costs.change_s, times.size))
    return World(times, sizes, pauses, left, lost)


# --- what the run does ----------------------------------------------------------------------------

class _Run:
    """The lives of a run: from the first generation of an attempt until nobody is left."""

    def __init__(self, world: World, costs: Costs, policy: Policy, seconds: float,
                 chance: np.random.Generator):
        self.world, self.costs, self.policy = world, costs, policy
        self.seconds, self.chance = seconds, chance
        self.began: float | None = None
        self.steps = self.useful_s = self.trained_s = self.pausing_s = self.redone_s = 0.0
        self.attempts = self.zeros = self.changes = 0

    def outcome(self) -> Outcome:
        """Live all lives."""
        is_zero = self.world.sizes == 0
        stops = [*(np.flatnonzero(is_zero)), self.world.times.size]
        first = 0
        for stop in stops:
            if stop > first:
                self._live(first, int(stop))
            first = int(stop) + 1
        began = self.seconds if self.began is None else self.began
        wall_s = max(self.seconds - began, 1e-9)
        return Outcome(
            goodput=min(1.0, max(0.0, self.useful_s / wall_s)), steps=self.steps,
            samples_per_hour=self.steps * self.costs.batch / max(self.seconds, 1e-9) * HOUR_S,
            pausing_s=self.pausing_s, redone_s=self.redone_s,
            waiting_s=max(0.0, wall_s - self.trained_s - self.pausing_s),
            began_s=began, attempts=self.attempts, changes=self.changes)

    def _live(self, first: int, stop: int) -> None:
        """Train between two moments at which nobody was ready."""
        world, costs, policy = self.world, self.costs, self.policy
        ends = self.world.times[stop] if stop < world.times.size else self.seconds
        times, sizes = world.times[first:stop], world.sizes[first:stop]
        start = self._start(times, sizes, float(ends))
        if start is None:
            return
        self.attempts += 1
        self.began = start if self.began is None else self.began
        froms = np.maximum(times, start)
        untils = np.maximum(np.append(times[1:], ends), start)
        grown = world.pauses[first:stop] + costs.grow_s * np.maximum(0, sizes - costs.world)
        paused = np.where((world.pauses[first:stop] > 0) & (times > start), grown, 0.0)
        self.changes += int((paused > 0).sum())
        over = np.maximum.accumulate(times + paused)
        trained = np.maximum(0.0, untils - np.maximum(froms, over))
        trained[sizes < policy.fewest] = 0.0
        self.pausing_s += float((untils - froms - trained)[sizes >= policy.fewest].sum())
        self._train(trained, sizes, world.left[first:stop] > 0, world.lost[first:stop] > 0,
                    float(ends), is_lost=stop < world.times.size and bool(world.lost[stop]))
        self.zeros += stop < world.times.size

    def _start(self, times: Floats, sizes: Wholes, ends: float) -> float | None:
        """Return when the first generation trains; None: the life is too short."""
        policy = self.policy
        enough = np.flatnonzero(sizes >= policy.first)
        few = np.flatnonzero(sizes >= policy.fewest)
        found = [float(times[enough[0]])] if enough.size else []
        if few.size:
            found.append(max(float(times[0]) + policy.limits.start_s, float(times[few[0]])))
        if not found:
            return None
        start = min(found) + float(self.chance.choice(self.costs.enter_s))
        return start if start < ends else None

    def _train(self, trained: Floats, sizes: Wholes, is_left: Flags, is_hit: Flags, ends: float, *,
               is_lost: bool) -> None:
        """Count the steps of a life, without those that the loss of everybody takes back.

        `is_left`, `is_hit`: at the beginning of these times somebody left under notice, or was
        lost.
        """
        costs, policy = self.costs, self.policy
        step_s = costs.step_s(sizes, policy.microbatches)
        each_s = step_s + costs.between_s
        done, steps, useful = (np.append(0.0, np.cumsum(part)) for part in (
            trained, trained / each_s, trained * step_s / each_s))
        whole_s = float(done[-1])
        if not whole_s:
            return
        intervals = self._intervals(ends, whole_s / float(steps[-1]))
        every_s, kept_s = sum(intervals) / len(intervals), whole_s
        if is_lost:
            leaves = done[:-1][is_left & (not policy.checkpoint.is_last_only)]
            kept_s = last_published_s(
                whole_s, np.maximum(0.0, leaves - fmean(costs.publish_s)).tolist(),
                done[:-1][is_hit].tolist(),
                self._following(intervals, done, steps), lambda: self._one(costs.publish_s),
                first_s=self._first_s(intervals, done, steps), usual_s=every_s)
        share = every_s / (every_s + costs.checkpoint_s) if math.isfinite(every_s) else 1.0
        self.steps += share * float(np.interp(kept_s, done, steps))
        self.useful_s += share * float(np.interp(kept_s, done, useful))
        self.trained_s += whole_s
        self.redone_s += whole_s - kept_s

    def _intervals(self, ends: float, step_s: float) -> list[float]:
        """Return the intervals between checkpoints by the costs that were measured."""
        return [self.policy.checkpoint.interval_s(
            cost_s=cost_s, losses=self.zeros, observed_s=ends, step_s=step_s)
            for cost_s in self.costs.auto_s or (self.costs.checkpoint_s,)]

    def _first_s(self, intervals: Sequence[float], done: Floats, steps: Floats) -> float:
        """Return the time of a life's first checkpoint: `auto` does not know its cost yet."""
        every = self.policy.checkpoint
        if every.steps is None and every.seconds is None:
            return SHORTEST_S
        return self._following(intervals, done, steps)(0.0)

    def _following(self, intervals: Sequence[float], done: Floats,
                   steps: Floats) -> Callable[[float], float]:
        """Return what tells the time of the next checkpoint. Each one begins at a step's end."""
        def after_s(begun_s: float) -> float:
            step_s = float(done[-1] / steps[-1])
            return begun_s + self._one(intervals) + step_s * float(self.chance.random())

        def at_step_s(begun_s: float) -> float:
            step = self.steps + float(np.interp(begun_s, done, steps))
            following = (int(step + 1e-6) // every + 1) * every - self.steps
            return float(np.interp(following, steps, done)) if following <= steps[-1] else math.inf

        every = self.policy.checkpoint.steps or 0
        return at_step_s if every else after_s

    def _one(self, values: Sequence[float]) -> float:
        return values[int(len(values) * self.chance.random())]


# --- checkpoints ----------------------------------------------------------------------------------

def last_published_s(whole_s: float, leaves: Sequence[float], losses: Sequence[float],
                     next_s: Callable[[float], float], publish_s: Callable[[], float], *,
                     first_s: float, usual_s: float) -> float:
    """Return when the last checkpoint was begun that was published within `whole_s`; 0: none.

    All are times since the first step of a life. `leaves`, `losses`: the times of hosts that left
    under notice, and that were lost, in order. `next_s` returns the time of the next checkpoint
    after one at a time, `publish_s` how long one is on its way. `first_s` is the time of the
    first, `usual_s` the usual interval.
    """
    found, due_s, free_s, since_s = 0.0, first_s, 0.0, 0.0
    if whole_s > REACH * usual_s:
        found = since_s = whole_s - REACH * usual_s
        due_s = next_s(since_s)
    while True:
        begun_s = max(free_s, min(due_s, _after(leaves, since_s)))
        if begun_s >= whole_s:
            return found
        up_s = begun_s + publish_s()
        lost_s = _after(losses, begun_s)
        if lost_s < min(up_s, whole_s):
            due_s, free_s = begun_s + RETRY_S, lost_s
        elif up_s > whole_s:
            return found
        else:
            found, due_s, free_s = begun_s, next_s(begun_s), up_s
        since_s = max(begun_s, math.nextafter(since_s, math.inf))


def _after(times: Sequence[float], moment: float) -> float:
    """Return the first of the times after a moment; infinite: none."""
    at = bisect_right(times, moment)
    return times[at] if at < len(times) else math.inf
