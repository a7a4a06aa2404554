"""Whether the members of a generation have one dataset and one program, where no driver compares
them: under plain horovodrun.

reconcile → here → the user's error on a member that differs
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Protocol

from elastic_trainer.config import ConfigError
from elastic_trainer.wire.proof import Proof, differences, refused, remedy, sentence


class Peers(Protocol):
    """What a comparison needs of the world."""

    rank: int

    def gather_texts(self, text: str) -> list[str]: ...


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
