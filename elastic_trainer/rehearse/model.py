"""A run without processes: the policies of driver and checkpoints over the lives of hosts.

lives of hosts, costs, policy → here → outcome → advice

What always holds:
1. Nothing here runs step by step. The time between two changes is one entry of an array: a month
   of 1,000 hosts takes milliseconds.
2. A pause ends when the pause of the newest change ends: changes within a pause prolong it.
3. An attempt ends when nobody is left who trains. The next one starts from the newest checkpoint
   that was published. It loses nothing if the last workers left under notice, since they write one.
4. An interval of checkpoints in seconds has a random phase, since `auto` follows noisy costs.

What it does not do: slow steps down while workers boot or checkpoints are sent; lose checkpoints.

Source: the policies are those of launch/rounds.py (who enters, and when) and state/cadence.py. Two
recorded storms check it (tests/test_plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_trainer.config import Limits
from elastic_trainer.rehearse.costs import Costs
from elastic_trainer.rehearse.pools import Flags, Floats, Lives
from elastic_trainer.rehearse.storm import HOUR_S
from elastic_trainer.state.cadence import Cadence

Wholes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a user decides."""

    shards: int
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

    A host that joins while nobody trains boots in the next attempt.
    """
    chance = np.random.default_rng(seed)
    is_soon = lives.joined < seconds
    began, gone = lives.joined[is_soon], lives.gone[is_soon]
    noticed, again = lives.noticed[is_soon], lives.again[is_soon]
    boots = np.where(again, chance.choice(costs.standby_s if policy.standby else costs.boot_s,
                                          began.size), chance.choice(costs.boot_s, began.size))
    ready = began + boots
    for zero in _zeros(ready, gone):  # an attempt ends: workers that boot start again
        restart = zero + float(chance.choice(costs.give_up_s))
        late = (began <= restart) & (ready > zero) & (gone > zero)
        ready[late] = restart + boots[late]
    enters = _together(began, ready, gone, policy.limits.settle_s)
    is_seen = (enters < gone) & (enters < seconds)
    is_left = is_seen & (gone < seconds)
    return _joined(enters[is_seen], gone[is_left & noticed], gone[is_left & ~noticed], costs,
                   chance)


def _zeros(ready: Floats, gone: Floats) -> list[float]:
    """Return the moments at which the last worker that stands ready is lost."""
    was_ready = ready < gone
    ends = gone[was_ready & np.isfinite(gone)]
    times = np.concatenate([ready[was_ready], ends])
    signs = np.concatenate([np.ones(int(was_ready.sum())), np.full(ends.size, -1.0)])
    order = np.argsort(times, kind="stable")
    sizes = np.cumsum(signs[order])
    return list(times[order][(sizes <= 0) & (signs[order] < 0)])


def _together(began: Floats, ready: Floats, gone: Floats, settle_s: float) -> Floats:
    """Return when newcomers enter: one waits for others that boot, at most `settle_s`."""
    enters: Floats = ready.copy()
    order = np.argsort(np.where(ready < gone, ready, np.inf), kind="stable")
    count = int((ready < gone).sum())
    starts, moments = began[order].tolist(), ready[order].tolist()
    at = 0
    while at < count:
        stop = at + 1
        while (stop < count and moments[stop] <= moments[at] + settle_s
               and starts[stop] <= moments[stop - 1]):
            stop += 1
        enters[order[at:stop]] = moments[stop - 1]
        at = stop
    return enters


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
        self._train(trained, sizes, world.left[first:stop] > 0,
                    is_lost=stop < world.times.size and bool(world.lost[stop]))
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

    def _train(self, trained: Floats, sizes: Wholes, drained: Flags, *, is_lost: bool) -> None:
        """Count the steps of a life, without those that the loss of everybody takes back.

        `drained`: at the beginning of these times somebody left under notice.
        """
        costs, policy = self.costs, self.policy
        step_s = costs.step_s(sizes, policy.shards)
        each_s = step_s + costs.between_s
        done, steps, useful = (np.append(0.0, np.cumsum(part)) for part in (
            trained, trained / each_s, trained * step_s / each_s))
        whole_s = float(done[-1])
        if not whole_s:
            return
        every_s = policy.checkpoint.interval_s(
            cost_s=costs.checkpoint_s, losses=self.zeros, observed_s=self.trained_s,
            step_s=whole_s / float(steps[-1]))
        cycle_s, kept_s = every_s + costs.checkpoint_s, whole_s
        if is_lost:  # a checkpoint is written when somebody leaves under notice, too
            kept_s = float(done[:-1][drained].max(initial=0.0))
            published_s = whole_s - costs.publish_s
            if every := policy.checkpoint.steps:
                step = self.steps + float(np.interp(published_s, done, steps))
                written_s = float(np.interp(step // every * every - self.steps, steps, done))
            else:  # no interval of seconds is kept so exactly that its phase is known
                written_s = published_s - cycle_s * float(self.chance.random())
            kept_s = max(kept_s, written_s)
        share = every_s / cycle_s
        self.steps += share * float(np.interp(kept_s, done, steps))
        self.useful_s += share * float(np.interp(kept_s, done, useful))
        self.trained_s += whole_s
        self.redone_s += whole_s - kept_s
