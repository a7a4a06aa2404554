"""Compare the members of a generation: how they compute, and, where no driver does, their dataset
and program. A drift that the user allows is logged.

reconcile (each member's arithmetic and proof) → here → vote, transfer: a difference is a fault or
allowed; the user's error on a member with another program

What always holds: if the user allows members that compute other bits, a difference between replicas
is not a fault of a machine. It is logged once a generation.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.events.log import Events
from elastic_trainer.wire.proof import Proof, differences, refused, remedy, sentence
from elastic_trainer.world.arithmetic import (
    Arithmetic,
    advice,
    computes_otherwise,
    facts_that_differ,
)
from elastic_trainer.world.vote import Peers


def require_same_program(world: Peers, mine: Proof, holders: Sequence[int],
                         allowed: Collection[str]) -> None:
    """Raise ConfigError on each member that differs from the first one that holds the state. If
    none holds it, all members raise: nothing shows which of them is right.

    All members call it. Network: one exchange of the proofs.
    """
    texts = world.gather_texts(json.dumps(mine.to_dict()))
    everyone = [Proof.from_dict(json.loads(text)) for text in texts]
    first = holders[0] if holders else 0
    runs = everyone[first]
    for rank, one in enumerate(everyone):
        if runs is None or one is None or (holders and rank != world.rank):
            continue
        if found := refused(differences(one, runs), allowed):
            raise ConfigError(
                f"The worker of rank {rank} has other data, or another program, than that of rank "
                f"{first} (\"the run\"): {sentence(found)}. {remedy(found, one, runs)}")


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
        outliers = [rank for rank, other in enumerate(members)
                    if first and other and computes_otherwise(first, other)]
        self.is_mixed, self._is_drift_logged = bool(outliers), False
        if not outliers or is_logged:
            return
        assert mine
        me = {"host": self._launch.host, **mine.to_dict()}
        everyone = [json.loads(text) for text in world.gather_texts(json.dumps(me))]
        theirs = [Arithmetic.from_dict(values) for values in everyone]
        for rank in outliers if world.rank == 0 else ():
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
