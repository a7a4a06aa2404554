"""What a fleet costs an hour: its machines at the present spot prices, and gradients between zones.

prices, zones (ec2_account.py), the size of the gradients → here → a finding; ec2_group (the brake)

What always holds:
1. Each machine sends and receives at least one set of gradients a step. With machines spread evenly
   over Z zones, (Z - 1) / Z of it comes from another zone.
2. An estimate names what it assumes, and the variable that changes the assumption.

What it does not do: add the coordinator, the disks, data from S3 (free within a region), taxes or
discounts.

Source: "Data transferred between Availability Zones is charged at 0.01 dollars per GB in each
direction" (aws.amazon.com/ec2/pricing/on-demand, "Data Transfer").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_trainer.discovery.places.ec2_checks import (
    IN_FILE,
    Finding,
    Unanswered,
    Wish,
    lacks,
    listed,
    unanswered,
    well,
)

BETWEEN_ZONES = 0.02
"""Dollars a GB: 0.01 to send and 0.01 to receive."""
Prices = Mapping[tuple[str, str], float]
"""(type, zone) → dollars an hour."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The size of a set of gradients, and how often it is exchanged."""

    gigabytes: float = 0.5
    """124 million parameters in float32."""
    step_s: float = 1.0


def traffic(machines: int, zones: int, gradients: Gradients) -> float:
    """Return the dollars an hour for gradients between zones, at least.

    A machine sends a set of gradients and receives one (reduce, then gather).
    """
    steps_an_hour = 3600 / gradients.step_s
    crossing = 2 * machines * gradients.gigabytes * (zones - 1) / zones
    return steps_an_hour * crossing * BETWEEN_ZONES


def affordable(budget: float, running: Iterable[float], dearest: float) -> int:
    """Return how many machines cost no more than the budget together, in dollars an hour.

    `running`: the present price of each machine that runs; `dearest`: the highest price at which
    another one may start. Which machine a smaller group would end is unknown, so the dear ones are
    counted first.
    """
    count, left = 0, budget
    for price in sorted(running, reverse=True):
        if price > left:
            return count
        count, left = count + 1, left - price
    return count + int(left // dearest) if dearest > 0 else count


def costs(wish: Wish, chosen: Sequence[str], prices: Prices | Unanswered,
          gradients: Gradients) -> Finding:
    """Show what the fleet costs an hour; check that it stays below max_price_per_hour.

    `chosen`: the fleet's zones.
    """
    if isinstance(prices, Unanswered):
        return unanswered("costs", wish, prices)
    there = {pool: price for pool, price in prices.items()
             if pool[0] in wish.instance_types and pool[1] in chosen}
    if not there:
        return lacks("costs", f"AWS has no spot price of {listed(wish.instance_types)} in "
                              f"{listed(chosen)}.",
                     f"Name other instance_types or zones {IN_FILE}.")
    (kind, zone), least = min(there.items(), key=lambda entry: entry[1])
    most = max(there.values())
    fact = (f"{wish.workers} machines cost {wish.workers * least:.2f} to {wish.workers * most:.2f} "
            f"dollars an hour at the present spot prices (the cheapest is {kind} in {zone}, "
            f"{least:.4f}); the gradients between {len(chosen)} "
            f"zone{'s' * (len(chosen) > 1)} cost {_between(wish, chosen, gradients)}.")
    budget = wish.max_price_per_hour
    if budget is not None and affordable(budget, [], least) < wish.workers:
        return lacks("costs", f"{fact} max_price_per_hour is {budget:g}, which allows "
                              f"{affordable(budget, [], least)} machines.",
                     f"Set max_price_per_hour = {wish.workers * most:.2f}, or workers lower, "
                     f"{IN_FILE}.")
    return well("costs", fact)


def _between(wish: Wish, chosen: Sequence[str], gradients: Gradients) -> str:
    if len(chosen) == 1:
        return "nothing"
    dollars = traffic(wish.workers, len(chosen), gradients)
    return (f"{dollars:.2f} dollars an hour or more, with {gradients.gigabytes:g} GB of gradients "
            f"and a step of {gradients.step_s:g} s (GRADIENT_GB and STEP_S before deploy/check.sh "
            f"change that), and nothing in one zone")
