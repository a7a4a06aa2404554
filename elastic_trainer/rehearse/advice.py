"""The questions of a user before a run, each answered by simulating its choices over many seeds.

fleet (pools or a trace), costs, policy → model → here → table, JSON, sentences

What always holds:
1. The choices of a question see the same changes, seed by seed. So a difference between two choices
   is none of luck.
2. Bounds are the 5th and the 95th percentile over the seeds: 90 % of the runs are between them.
3. A choice is advised by the price of a million samples alone. One that is cheaper by less than
   ALIKE is not advised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.events.sentences import count
from elastic_trainer.rehearse.costs import Costs
from elastic_trainer.rehearse.model import Outcome, Policy, World, outcome_of, world_of
from elastic_trainer.rehearse.pools import Lives, Pool, lives_of, merged, repeated
from elastic_trainer.state.checkpoints.cadence import Cadence

ALIKE = 0.001
INTERVALS = ("auto", "10s", "30s", "60s", "300s", "900s", "3600s")
SPARES = (0.01, 0.05)
"""As shares of the hosts."""
MILLION = 1e6
FEW = 3
"""Repetitions in which everybody is lost, below which no interval is advised."""


class Drawn(NamedTuple):
    """What one seed brings."""

    lives: Lives
    price: float
    """Of all hosts, for the whole time."""


@dataclass(frozen=True)
class Fleet:
    """Where hosts come from: pools, or a trace with the price of a host for an hour."""

    pools: tuple[Pool, ...] = ()
    trace: Lives | None = field(default=None, compare=False)
    price: float = 1.0

    @property
    def hosts(self) -> int:
        """Count the hosts that are wanted, or the most of the trace."""
        if self.pools:
            return sum(pool.hosts for pool in self.pools)
        return self.trace.most if self.trace else 0

    def cpu_s(self, seconds: float) -> float:
        """Return the processor's time that one repetition of all choices takes, at most."""
        if self.trace:
            return self.trace.cpu_s(seconds)
        return sum(pool.cpu_s(seconds) for pool in self.pools)

    def draw(self, seconds: float, seed: int) -> Drawn:
        """Return the lives of one seed, and what the hosts cost."""
        if self.trace:
            lives = repeated(self.trace, seconds, seed)
            return Drawn(lives, lives.hours(seconds) * self.price)
        found = [lives_of(pool, seconds, seed) for pool in self.pools]
        return Drawn(merged(found), sum(lives.hours(seconds) * pool.price
                                        for lives, pool in zip(found, self.pools, strict=True)))

    def with_spares(self, count: int) -> Fleet:
        """Return a fleet with more hosts, or fewer, in its largest pool."""
        largest = max(self.pools, key=lambda pool: pool.hosts)
        return replace(self, pools=tuple(
            replace(pool, hosts=pool.hosts + count) if pool is largest else pool
            for pool in self.pools))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer to a question, over all seeds: [5th percentile, mean, 95th percentile]."""

    name: str
    goodput: tuple[float, float, float]
    samples_per_hour: tuple[float, float, float]
    million: tuple[float, float, float]
    """The price of a million samples; infinite: a repetition finishes no step."""
    is_given: bool = False
    outcomes: tuple[Outcome, ...] = field(default=(), repr=False)

    def row(self) -> dict[str, Any]:
        """Return its part of the JSON object."""
        return {"choice": self.name, "is_given": self.is_given,
                **{name: [round(value, 5) if math.isfinite(value) else None
                          for value in getattr(self, name)]
                   for name in ("goodput", "samples_per_hour", "million")}}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its choices, the given one among them."""

    name: str
    choices: tuple[Choice, ...] = ()
    why_none: str = ""
    """The reason for which there is no choice."""
    caution: str = ""
    """The reason for which the given choice stays, whatever is cheaper."""

    @property
    def given(self) -> Choice:
        return next(choice for choice in self.choices if choice.is_given)

    @property
    def best(self) -> Choice:
        """The cheapest choice, or the given one if none is cheaper by ALIKE."""
        if self.caution:
            return self.given
        cheapest = min(self.choices, key=lambda choice: choice.million[1])
        return cheapest if self.gain(cheapest) > ALIKE else self.given

    def gain(self, choice: Choice) -> float:
        """Return the share of the price that a choice saves against the given one."""
        given, other = self.given.million[1], choice.million[1]
        if math.isinf(given):
            return 0.0 if math.isinf(other) else 1.0
        return 1.0 - other / given if given else 0.0

    def advice(self) -> str:
        """Return one sentence for the user."""
        if not self.choices:
            return f"{self.name}: {self.why_none}"
        best, given = self.best, self.given
        if math.isinf(given.million[1]):
            return (f"{self.name}: no choice finishes a step in each repetition." if best is given
                    else f"{self.name}: take {best.name} instead of {given.name}, which does not "
                         f"finish a step in each repetition.")
        if self.caution:
            return f"{self.name}: keep {given.name}; {self.caution}"
        if best is given:
            return (f"{self.name}: keep {given.name}; no other choice is cheaper by more than "
                    f"{ALIKE:.1%}.")
        more = best.samples_per_hour[1] / max(given.samples_per_hour[1], 1e-9) - 1.0
        return (f"{self.name}: take {best.name} instead of {given.name}; a million samples cost "
                f"{self.gain(best):.1%} less, samples/h {more:+.1%}, goodput "
                f"{given.goodput[1]:.1%} → {best.goodput[1]:.1%}.")


class Planner:
    """Answers questions about one fleet. Worlds are kept for the questions that share them."""

    def __init__(self, fleet: Fleet, costs: Costs, policy: Policy, seconds: float, seeds: int,
                 every: str):
        self.fleet, self.policy = fleet, policy
        self.every = every
        """The policy's interval of checkpoints, as the user writes it."""
        self.costs = (costs if costs.microbatches
                      else replace(costs, microbatches=policy.microbatches))
        self.seconds, self.seeds = seconds, range(seeds)
        self._drawn: dict[Fleet, list[Drawn]] = {}
        self._worlds: dict[tuple[Fleet, bool], list[World]] = {}

    def drawn(self, fleet: Fleet) -> list[Drawn]:
        """Return what each seed brings to a fleet."""
        if fleet not in self._drawn:
            self._drawn[fleet] = [fleet.draw(self.seconds, seed) for seed in self.seeds]
        return self._drawn[fleet]

    def choice(self, name: str, *, fleet: Fleet | None = None, policy: Policy | None = None,
               is_given: bool = False) -> Choice:
        """Simulate one choice over all seeds."""
        fleet, policy = fleet or self.fleet, policy or self.policy
        drawn, key = self.drawn(fleet), (fleet, policy.standby)
        if key not in self._worlds:
            self._worlds[key] = [
                world_of(one.lives, self.costs, policy, self.seconds, seed)
                for one, seed in zip(drawn, self.seeds, strict=True)]
        outcomes = [outcome_of(world, self.costs, policy, self.seconds, seed)
                    for world, seed in zip(self._worlds[key], self.seeds, strict=True)]
        samples = [one.steps * self.costs.batch for one in outcomes]
        return Choice(name=name, is_given=is_given, outcomes=tuple(outcomes),
                      goodput=bounds([one.goodput for one in outcomes]),
                      samples_per_hour=bounds([one.samples_per_hour for one in outcomes]),
                      million=bounds([one.price / count * MILLION if count else math.inf
                                      for one, count in zip(drawn, samples, strict=True)]))

    def forecast(self) -> Choice:
        """Return what the given choices bring."""
        return self.choice("as given", is_given=True)

    def questions(self) -> list[Question]:
        """Return all questions with their choices."""
        return [self._cadence(), self._microbatches(), self._standbys(), self._spares(),
                self._pools()]

    def _cadence(self) -> Question:
        choices = [self.choice("only the last" if name == "0" else
                               f"{name} steps" if name.isdigit() else name,
                               policy=replace(self.policy, checkpoint=Cadence.parse(name)),
                               is_given=name == self.every)
                   for name in dict.fromkeys([self.every, *INTERVALS])]
        seen = sum(one.redone_s > 0.0 for one in choices[0].outcomes)
        few = min(FEW, len(self.seeds))
        return Question(name="checkpoint_every", choices=tuple(choices), caution="" if seen >= few
                        else f"a checkpoint was needed in {seen} of {len(self.seeds)} repetitions, "
                             f"too few to choose by.")

    def _microbatches(self) -> Question:
        given, batch = self.policy.microbatches, self.costs.batch
        found = [given, *microbatches_for(self.fleet.hosts, batch if batch > 1 else None)]
        return Question(name="microbatches", choices=tuple(
            self.choice(str(microbatches),
                        policy=replace(self.policy, microbatches=microbatches),
                        is_given=microbatches == given) for microbatches in dict.fromkeys(found)))

    def _standbys(self) -> Question:
        if not any(pool.crash for pool in self.fleet.pools):
            return Question(name="standbys", why_none=(
                "they save nothing here, because no worker crashes on a host that stays "
                "(crash=0)."))
        return Question(name="standbys", choices=tuple(
            self.choice(name, policy=replace(self.policy, standby=standby),
                        is_given=standby == self.policy.standby)
            for name, standby in (("one a host", True), ("none", False))))

    def _spares(self) -> Question:
        if not self.fleet.pools:
            return Question(name="spare hosts", why_none=(
                "a trace has the hosts that it has. Use --storm or --pool."))
        hosts, idle = self.fleet.hosts, self.fleet.hosts - self.policy.microbatches
        counts = [0, *(max(1, round(part * hosts)) for part in SPARES)]
        if idle > 0 and len(self.fleet.pools) == 1:
            counts.append(-idle)
        return Question(name="spare hosts", choices=tuple(
            self.choice(count(hosts + more, "host"),
                        fleet=self.fleet.with_spares(more) if more else None,
                        policy=replace(self.policy, first=min(self.policy.first, hosts + more)),
                        is_given=not more) for more in dict.fromkeys(counts)))

    def _pools(self) -> Question:
        pools, hosts = self.fleet.pools, self.fleet.hosts
        if len(pools) < 2:
            return Question(name="pools", why_none="there is one. Give --pool twice or more.")
        evenly = [hosts // len(pools) + (place < hosts % len(pools))
                  for place in range(len(pools))]
        mixes = {"the given mix": pools}
        mixes |= {f"{pool.name} alone": (replace(pool, hosts=hosts),) for pool in pools}
        mixes["evenly mixed"] = tuple(replace(pool, hosts=count)
                                      for pool, count in zip(pools, evenly, strict=True))
        return Question(name="pools", choices=tuple(
            self.choice(name, fleet=replace(self.fleet, pools=mix), is_given=mix is pools)
            for name, mix in mixes.items()))


def microbatches_for(hosts: int, batch: int | None) -> list[int]:
    """Return the numbers of micro-batches that are worth a look: multiples of the hosts, and of 95
    % of them, so that a few losses leave no worker with one micro-batch more; at most one for each
    sample."""
    few = max(1, int(0.95 * hosts))
    found = {times * count for times in (1, 2, 4, 8) for count in (few, hosts)}
    return sorted({number if batch is None else min(number, batch) for number in found})


def bounds(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 5th percentile, the mean, and the 95th percentile."""
    is_finite = all(map(math.isfinite, values))  # between infinite ones there is no number
    low, high = np.percentile(values, [5, 95], method="linear" if is_finite else "nearest")
    return float(low), float(np.mean(values)), float(high)
