"""Compare the members of a generation, and log a drift that the user allows.

reconcile (each member's arithmetic) → here → vote, transfer: a difference is a fault or allowed

What always holds: if the user allows members that compute other bits, a difference between replicas
is not a fault of a machine. It is logged once a generation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.world.arithmetic import (
    Arithmetic,
    advice,
    computes_otherwise,
    facts_that_differ,
)
from elastic_trainer.world.same_program import require_same_program


class Peers(Protocol):
    """What a comparison needs of the world."""

    rank: int
    size: int

    def gather_texts(self, text: str) -> list[str]: ...


class Mixture:
    """The arithmetic of the members of a generation."""

    def __init__(self, launch: Launch, events: Events):
        self._launch, self._events = launch, events
        self.is_mixed = False
        """Members of this generation compute different bits, and the user allows it."""
        self._is_drift_logged = False

    def compare(self, world: Peers, members: Sequence[Arithmetic | None], mine: Arithmetic | None,
                holders: Sequence[int], is_logged: bool) -> None:
        """Compare the arithmetic of all members, and their dataset and program. All members call
        it.

        `holders` have the state. `is_logged`: the driver compared the members before it formed the
        generation, and logged it. Raises ConfigError for another dataset or program.
        """
        if mine and mine.proof and world.size > 1 and not is_logged:
            require_same_program(world, mine.proof, holders, self._launch.allow_change)
        first = members[0]
        odd = [rank for rank, other in enumerate(members)
               if first and other and computes_otherwise(first, other)]
        self.is_mixed, self._is_drift_logged = bool(odd), False
        if not odd or is_logged:
            return
        assert mine
        me = {"host": self._launch.host, **mine.to_dict()}
        everyone = [json.loads(text) for text in world.gather_texts(json.dumps(me))]
        theirs = [Arithmetic.from_dict(values) for values in everyone]
        for rank in odd if world.rank == 0 else ():
            one, other = theirs[rank], theirs[0]
            differ = facts_that_differ(one, other) if one and other else {}
            self._events.emit(
                "worker.arithmetic_differs", host=everyone[rank]["host"],
                other_host=everyone[0]["host"], differs=differ, refused=False,
                meaning=advice(False, differ))

    def log_drift(self, world: Peers, step: int) -> None:
        """Log, once a generation, that replicas differ because their arithmetic does."""
        if self._is_drift_logged:
            return
        self._is_drift_logged = True
        if world.rank == 0:
            self._events.emit(
                "worker.replicas_drift", step=step,
                meaning="the workers hold different bits because their arithmetic differs "
                        "(worker.arithmetic_differs). This world cannot detect a machine's fault.")
